// SPDX-License-Identifier: Apache-2.0
// The protocol: the writes of each rank, their order, and the reads that they allow. A Team is
// the set of threads that act as one (a CTA on a GPU, one thread on a CPU). It has the functions
// lane, lanes and all; a profiled one also has first, teams and meet_publishers.
//
// Why single buffers are safe: both phases are barriers of all ranks. This rank overwrites a peer's
// inbox in round e + 1 only after it has that peer's `ready` flag of round e, which the peer sends
// when its experts have read the inbox. This rank's experts overwrite its outbox in round e + 1
// only after every peer's `dispatched` flag of e + 1, which each peer sends after its combine e has
// read the outbox.
#pragma once
#include <weft/alltoall/layout.cuh>
#include <weft/device/wait.cuh>

namespace weft {

template <Shape S> WEFT_FN i64 raw_id(const DispatchArgs& a, u32 token, u32 k) {
    return id_at(a.ids, a.ids_bytes, u64(token) * S.top_k + k);
}

// The id as an index, or -1 for "no expert". Ids depend on users' prompts: an id outside [0,
// experts) is reported here and never becomes an address.
template <Shape S>
WEFT_FN i32 expert_id(const DispatchArgs& a, i64 id, u32 token, u32 k, bool reports) {
    if (id >= 0 && id < i64(S.experts)) return i32(id);
    if (id != -1 && reports)
        refuse_id(own_share<S>(a.site).header, a.site, S.experts, id, token, k);
    return -1;
}

// The location of the expert of a valid id. For an expert on a rank that has exited, the id becomes
// -1 and is reported.
template <Shape S>
WEFT_FN ExpertLocation living_location(const DispatchArgs& a, RankSet living, i32& id, u32 token,
                                       u32 k, bool reports) {
    const ExpertLocation location = locate_expert<S>(a.placement, u32(id));
    if (has(living, location.rank)) return location;
    if (reports) refuse_gone(own_share<S>(a.site).header, a.site, location.rank, id, token, k);
    id = -1;
    return location;
}

// The start of this kernel, in the lanes that publish, wait or keep records.
template <Shape S, class Team> WEFT_FN u64 start_of_lane(const Team& team) {
    return team.lane() < S.ranks ? now_ns() : 0;
}

// The Route of one of this rank's tokens at a peer. For a peer that has exited it is the peer's
// slot at this rank: those slots must hold no experts either when `source_rows` moves them.
template <Shape S>
WEFT_FN Route<S>& route_at(const DispatchArgs& a, RankSet living, u32 peer, u32 token) {
    const bool alive = has(living, peer);
    const u32 at = alive ? peer : a.site.rank, source = alive ? a.site.rank : peer;
    return share<S>(a.site, at).inbox.route[slot_of(a.source_rows, source, token)];
}

// The tokens of this round: the count on the device if there is one, never more than the tensors
// hold.
template <Shape S> WEFT_FN u32 token_count(const DispatchArgs& a, bool reports) {
    if (a.num_tokens == nullptr) return a.tokens;
    const i32 count = *a.num_tokens;
    if (count >= 0 && u32(count) <= a.tokens) return u32(count);
    if (reports)
        refuse(own_share<S>(a.site).header, a.site,
               {.code = u32(Code::token_overflow),
                .phase = u32(Phase::dispatch),
                .expected = a.tokens,
                .observed = u64(i64(count))});
    return count < 0 ? 0 : a.tokens;
}

// The tokens that a source sent in this round. A peer wrote the count, so it is clamped to the
// capacity of the inbox. A wrong count is harmless: routes after the last token are -1.
template <Shape S> WEFT_FN u32 tokens_from(const Inbox<S>& inbox, u32 source) {
    const u32 count = u32(inbox.counts[source]);
    return count < S.tokens ? count : S.tokens;
}

// Publishes epoch `epoch` with the hash of the call, and for a dispatch the token count, at every
// living peer. start_ns: when a dispatch began. Order: each release covers everything that this
// team wrote or acquired: the whole rank's payload, routes and counts.
template <Shape S, class Team>
WEFT_FN void publish(const Team& team, const Site& site, RankSet living, Phase phase, u32 call,
                     u64 epoch, u64 start_ns, u32 count) {
    Header& header = own_share<S>(site).header;
    const u64 flag = make_flag(header.generation, call, epoch);
    mark_sent(team, header, phase, epoch);
    for (u32 i = team.lane(); i < S.ranks; i += team.lanes()) {
        const u32 peer = (site.rank + i) % S.ranks;
        if (!has(living, peer)) continue;
        Inbox<S>& to = share<S>(site, peer).inbox;
        const bool sending = phase == Phase::dispatch;
        const Action planned =
            fault(header, sending ? Point::before_flag : Point::before_ready, peer, epoch);
        if (planned == Action::drop) continue;
        if (sending) {
            to.counts[site.rank] = i32(count);
            const u64 ns = now_ns() - start_ns;
            store_relaxed(&to.sent_ns[site.rank], u32(ns < ~0u ? ns : ~0u));
        }
        const u64 lie = planned == Action::lie ? 1ull << 40 : 0;
        store_release(sending ? &to.dispatched[site.rank] : &to.ready[site.rank], flag ^ lie);
    }
    mark_published(team, header, phase, epoch);
}

constexpr u64 long_wait_ns = 1 << 15;

// Records a finished wait for a peer's flag. A peer stores rows between the start of its dispatch
// and the flag, so that a wait for the flag divides: if the peer began after this rank, the
// difference is skew, and the rest transfer. Durations need no clock that the ranks share. A wait
// for the flag of a combine is skew.
//
// sent_before: the peer's sent_ns, loaded before the wait, so it is of the round before. It is
// loaded again after a long wait only, because a load lengthens the round.
template <Shape S>
WEFT_FN void record_flag(const Site& site, Phase phase, u64 epoch, u32 peer, u64 start_ns,
                         u32 sent_before, const SpinWait& spin) {
    Share<S>& own = own_share<S>(site);
    const u64 waited_ns = spin.waited_ns();
    u64 transfer_ns = 0;
    if (phase == Phase::dispatch && waited_ns != 0) {
        const u32 sent_ns =
            waited_ns < long_wait_ns ? sent_before : load_relaxed(&own.inbox.sent_ns[peer]);
        const i64 late_ns = i64(spin.end - start_ns) - i64(sent_ns);
        const u64 skew_ns = late_ns < 0 ? 0 : u64(late_ns);
        transfer_ns = skew_ns < waited_ns ? waited_ns - skew_ns : 0;
    }
    record_wait(own.header, phase, epoch, peer, waited_ns, transfer_ns);
}

// Waits for every living peer's flag; false, for the whole team, when one wait has failed. All
// teams of a combine wait, and the first one records its waits. start_ns: when a dispatch began.
template <Shape S, class Team>
WEFT_FN bool await_all(const Team& team, const Site& site, RankSet living, Phase phase, u32 call,
                       u64 epoch, u64 start_ns) {
    Share<S>& own = own_share<S>(site);
    bool arrived = true;
    for (u32 peer = team.lane(); peer < S.ranks; peer += team.lanes()) {
        if (!has(living, peer)) continue;
        fault(own.header, phase == Phase::dispatch ? Point::before_poll : Point::before_read, peer,
              epoch);
        u64* flag = phase == Phase::dispatch ? &own.inbox.dispatched[peer] : &own.inbox.ready[peer];
        const u32 sent_before =
            phase == Phase::dispatch ? load_relaxed(&own.inbox.sent_ns[peer]) : 0;
        const bool marks = phase == Phase::dispatch || team.first();
        const bool records = marks && peer != site.rank;
        SpinWait spin{.is_timed = records || (marks && WEFT_PROFILE)};
        const bool ok = await_flag(own.header, site, flag, peer, phase, call, epoch, epoch, spin);
        arrived = ok && arrived;
        if (ok && marks) mark_arrived(own.header, phase, epoch, peer, spin);
        if (ok && records) record_flag<S>(site, phase, epoch, peer, start_ns, sent_before, spin);
    }
    return team.all(arrived);
}

// Publishes this rank's dispatch and its call record.
template <Shape S, class Team>
WEFT_FN void publish_dispatch(const Team& team, const DispatchArgs& a, RankSet living, u64 epoch,
                              u64 start_ns, u32 count) {
    if (team.lane() == 0) own_share<S>(a.site).header.call = a.call;
    publish<S>(team, a.site, living, Phase::dispatch, u32(a.call.hash), epoch, start_ns, count);
}

// Publishes that peers may read the rows of this rank's experts. The dispatch has verified the
// call, so this flag carries the hash of the geometry.
template <Shape S, class Team>
WEFT_FN void publish_combine(const Team& team, const Site& site, RankSet living, u64 epoch) {
    publish<S>(team, site, living, Phase::combine, site.descriptor, epoch, 0, 0);
}

// Waits for every peer's dispatch, which must be the same call.
template <Shape S, class Team>
WEFT_FN bool await_dispatch(const Team& team, const DispatchArgs& a, RankSet living, u64 epoch,
                            u64 start_ns) {
    return await_all<S>(team, a.site, living, Phase::dispatch, u32(a.call.hash) & flag_mask, epoch,
                        start_ns);
}

template <Shape S, class Team>
WEFT_FN bool await_combine(const Team& team, const Site& site, RankSet living, u64 epoch) {
    return await_all<S>(team, site, living, Phase::combine, site.descriptor, epoch, 0);
}

}  // namespace weft
