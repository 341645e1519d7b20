// The protocol: who writes what, in which order, and what may be read afterwards. A Team is the set
// of threads that act as one (a CTA on a GPU, one thread on a CPU) with the verbs lane, lanes and
// all; a profiled one also has first, teams and meet_publishers.
//
// Why single buffers are safe: both phases are barriers of all ranks. I overwrite a peer's inbox in
// round e + 1 only after its `ready` flag of round e, which it sends when its experts have read
// that inbox; and my experts overwrite my outbox in round e + 1 only after every peer's
// `dispatched` flag of e + 1, sent after its combine e has read it.
#pragma once
#include <weft/protocol/fault.cuh>
#include <weft/protocol/timeline.cuh>

namespace weft {

struct Place {
    u32 rank, local;
};

// Contiguous blocks: the first experts % ranks ranks hold one expert more than the others.
template <u32 experts, u32 ranks> WEFT_FN Place block_place(u32 expert) {
    constexpr u32 low = experts / ranks, longer = experts % ranks, edge = longer * (low + 1);
    if constexpr (longer == 0) {
        return {expert / low, expert % low};
    } else if constexpr (low == 0) {
        return {expert, 0};
    } else {
        if (expert < edge) return {expert / (low + 1), expert % (low + 1)};
        return {longer + (expert - edge) / low, (expert - edge) % low};
    }
}

template <Shape S> WEFT_FN Place place_of(const DispatchArgs& a, u32 expert) {
    if constexpr (S.mapped) {
        const u32 entry = u32(a.placement[expert]);
        return {entry >> 16, entry & 0xffffu};
    } else {
        return block_place<S.experts, S.ranks>(expert);
    }
}

// Bad input: drop it, tell the host, go on. One refusal is written at a time; others of that moment
// are only lost as reports, never as checks.
WEFT_FN void refuse(Header& header, const Site& site, ErrorRecord record) {
    if (!claim(&header.refusing, 0, 1)) return;
    const u32 serial = ++header.refusals;
    Mailbox& box = mailbox(site);
    record.rank = site.rank;
    box.refused[serial % 8] = record;
    store_release(&box.refusals, serial);
    claim(&header.refusing, 1, 0);
}

// The group is broken: the first record wins, and every later kernel of this rank returns at once.
WEFT_FN void fail(Header& header, const Site& site, ErrorRecord record) {
    if (!claim(&header.turn.failed, 0, record.code)) return;
    Mailbox& box = mailbox(site);
    record.rank = site.rank;
    box.broken = record;
    store_release(&box.broken_code, record.code);
}

// The id at one place of a tensor of int32 or int64.
WEFT_FN i64 id_at(const void* ids, u32 bytes, u64 at) {
    return bytes == 8 ? static_cast<const i64*>(ids)[at] : static_cast<const i32*>(ids)[at];
}

template <Shape S> WEFT_FN i64 raw_id(const DispatchArgs& a, u32 token, u32 k) {
    return id_at(a.ids, a.ids_bytes, u64(token) * S.top_k + k);
}

WEFT_FN void refuse_id(Header& header, const Site& site, u32 experts, i64 id, u32 token, u32 k) {
    refuse(header, site,
           {.code = u32(Code::bad_expert_id),
            .phase = u32(Phase::dispatch),
            .wanted = experts,
            .seen = u64(id),
            .token = token,
            .slot = k});
}

// The id as an index, or -1 for "no expert". Ids come from users' prompts: anything outside
// [0, experts) is refused here and never becomes an address.
template <Shape S>
WEFT_FN i32 expert_id(const DispatchArgs& a, i64 id, u32 token, u32 k, bool reports) {
    if (id >= 0 && id < i64(S.experts)) return i32(id);
    if (id != -1 && reports) refuse_id(mine<S>(a.site).header, a.site, S.experts, id, token, k);
    return -1;
}

WEFT_FN void refuse_duplicate(Header& header, const Site& site, u32 token, u32 k, i32 id) {
    refuse(header, site,
           {.code = u32(Code::duplicate_expert),
            .phase = u32(Phase::dispatch),
            .wanted = 1,
            .seen = u64(id),
            .token = token,
            .slot = k});
}

// How many tokens this round has: the device-side count where there is one, never more than the
// tensors hold.
template <Shape S> WEFT_FN u32 token_count(const DispatchArgs& a, bool reports) {
    if (a.num_tokens == nullptr) return a.tokens;
    const i32 count = *a.num_tokens;
    if (count >= 0 && u32(count) <= a.tokens) return u32(count);
    if (reports)
        refuse(mine<S>(a.site).header, a.site,
               {.code = u32(Code::token_overflow),
                .phase = u32(Phase::dispatch),
                .wanted = a.tokens,
                .seen = u64(i64(count))});
    return count < 0 ? 0 : a.tokens;
}

// The tokens that a source brought in this round. A count comes from a peer: never believe more
// than the inbox holds. Of one that cannot be, routes alone decide: -1 behind the last token.
template <Shape S> WEFT_FN u32 tokens_from(const Inbox<S>& inbox, u32 source) {
    const u32 count = u32(inbox.counts[source]);
    return count < S.tokens ? count : S.tokens;
}

// Publishes epoch `wanted` at every peer.
// Order: each release covers all that this team wrote or acquired: the whole rank's payload, routes
// and counts.
template <Shape S, class Team>
WEFT_FN void publish(const Team& team, const Site& site, Phase phase, u64 wanted, u32 count) {
    Header& header = mine<S>(site).header;
    const u64 flag = make_flag(header.generation, site.descriptor, wanted);
    mark_sent(team, header, phase, wanted);
    for (u32 i = team.lane(); i < S.ranks; i += team.lanes()) {
        const u32 peer = (site.rank + i) % S.ranks;
        Inbox<S>& to = share<S>(site, peer).inbox;
        const bool sending = phase == Phase::dispatch;
        const Action planned =
            fault(header, sending ? Point::before_flag : Point::before_ready, peer, wanted);
        if (planned == Action::drop) continue;
        if (sending) to.counts[site.rank] = i32(count);
        const u64 lie = planned == Action::lie ? 1ull << 40 : 0;
        store_release(sending ? &to.dispatched[site.rank] : &to.ready[site.rank], flag ^ lie);
    }
    mark_published(team, header, phase, wanted);
}

// Why a wait ends without its flag: the code, and the rank to name for it.
struct Verdict {
    Code code;
    u32 rank;
};

// The slow half of a wait, entered every 1024 turns: has another wait of this rank failed, has a
// host asked it to leave, its own or a peer's, or has `peer` let the deadline pass? Code ok means:
// wait on. A rank that waits for itself has more time: it is held up by a wait for a peer, and that
// one is to be named. So has a wait that follows: for what `peer` may hold back until a third rank
// has come, for whom another wait of this rank has begun, too.
WEFT_FN Verdict out_of_patience(Header& header, const Site& site, u32 peer, u64 start, u64 wanted,
                                bool follows = false) {
    if (load_relaxed(&header.turn.failed) != 0) return {Code::aborted, site.rank};  // told already
    if (load_acquire(&mailbox(site).abort) != 0) return {Code::aborted, site.rank};
    const u64 asked = load_acquire(&header.abort);
    if (asked != 0) return {Code::aborted, u32(asked - 1)};
    const bool first = ((wanted - header.first_epoch) & epoch_mask) <= 1;
    const u64 limit = first ? header.first_deadline_ns : header.deadline_ns;
    const u64 grace = peer == site.rank ? limit / 4 : follows ? limit / 8 : 0;
    return {now_ns() - start > limit + grace ? Code::peer_timeout : Code::ok, peer};
}

// What a wait is for, as an error record tells it.
struct Wait {
    u32 peer;
    Phase phase;
    u64 wanted, seen;
    bool follows = false;  // see out_of_patience
};

// How long one thread has waited: the slow half is entered every 1024 turns.
struct Patience {
    static constexpr u32 period = 1024;
    u64 start = 0;
    u32 turns = 0;

    // Will `lasts` look at the clock the next time?
    WEFT_FN bool is_asked_next() const { return (turns + 1) % period == 0; }

    // False when the wait is over without its end; what ended it is recorded then.
    WEFT_FN bool lasts(Header& header, const Site& site, const Wait& wait) {
        if (++turns % period == 0) {
            if (start == 0) start = now_ns();
            const Verdict verdict =
                out_of_patience(header, site, wait.peer, start, wait.wanted, wait.follows);
            if (verdict.code != Code::ok) {
                fail(header, site,
                     {.code = u32(verdict.code),
                      .peer = verdict.rank,
                      .phase = u32(wait.phase),
                      .wanted = wait.wanted,
                      .seen = wait.seen,
                      .elapsed_ns = now_ns() - start});
                return false;
            }
        }
        relax(turns);
        return true;
    }
};

// Waits for one peer's flag. Order: after `true`, all that the peer published with that epoch may
// be read by this thread, and by its team once it has met in `all`.
// expected: the epoch of the flag, where it is not that of the operation (`wanted`).
// follows: see out_of_patience.
WEFT_FN bool await_flag(Header& header, const Site& site, u64* flag, u32 peer, Phase phase,
                        u64 wanted, u64 expected, bool follows = false) {
    Patience patience;
    for (;;) {
        const u64 seen = load_acquire(flag);
        if (flag_generation(seen) == (header.generation & 0xffffu) &&
            not_older(flag_epoch(seen), expected)) {
            if (flag_descriptor(seen) == site.descriptor) return true;
            fail(header, site,
                 {.code = u32(Code::geometry_mismatch),
                  .peer = peer,
                  .phase = u32(phase),
                  .wanted = site.descriptor,
                  .seen = flag_descriptor(seen)});
            return false;
        }
        if (!patience.lasts(header, site, {peer, phase, wanted, flag_epoch(seen), follows}))
            return false;
    }
}

WEFT_FN bool await_flag(Header& header, const Site& site, u64* flag, u32 peer, Phase phase,
                        u64 wanted) {
    return await_flag(header, site, flag, peer, phase, wanted, wanted);
}

// Waits for every peer; false, for the whole team, when one of them did not come.
template <Shape S, class Team>
WEFT_FN bool await_all(const Team& team, const Site& site, Phase phase, u64 wanted) {
    Share<S>& own = mine<S>(site);
    bool arrived = true;
    for (u32 peer = team.lane(); peer < S.ranks; peer += team.lanes()) {
        fault(own.header, phase == Phase::dispatch ? Point::before_poll : Point::before_read, peer,
              wanted);
        u64* flag = phase == Phase::dispatch ? &own.inbox.dispatched[peer] : &own.inbox.ready[peer];
        const bool came = await_flag(own.header, site, flag, peer, phase, wanted);
        arrived = came && arrived;
        if (came) mark_arrived(team, own.header, phase, wanted, peer);
    }
    return team.all(arrived);
}

// Leaves a line in the ring for whoever looks after this rank has died. Returns the end that it
// wrote down.
WEFT_FN u64 keep_record(Header& header, Phase phase, u64 epoch, u64 start_ns, u32 tokens) {
    const u64 end_ns = now_ns();
    header.ring[(epoch * 2 + (phase == Phase::combine)) % ring_records] = {epoch, start_ns, end_ns,
                                                                           u32(phase), tokens};
    return end_ns;
}

}  // namespace weft
