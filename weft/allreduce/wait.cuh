// SPDX-License-Identifier: Apache-2.0
// A thread's view of a call of the fused all-reduce: the epoch, the slots, and the waits with
// flag-in-data. Every poll reads this rank's own memory.
#pragma once
#include <weft/allreduce/row.cuh>

namespace weft {

constexpr u32 pushes_in_flight = 4;  // vectors that a thread loads before it stores them at peers

template <Reduction R> struct Call {
    const ReduceArgs& a;
    Header& header;
    u64 start, epoch;
    RankSet summed;  // the ranks whose rows are summed
    bool live;       // the group is not broken

    WEFT_FN explicit Call(const ReduceArgs& args)
        : a(args), header(own_share<R>(args.site).header), start(0) {
        // One load instruction, which a compiler does not generate for a struct: a team that has
        // read `failed` and counts itself has read the epoch, too. The last team to count may write
        // the next epoch.
        const uint4 state = load_input(reinterpret_cast<const uint4*>(&header.state));
        epoch = ((u64(state.y) << 32 | state.x) + 1) & epoch_mask;
        live = state.z == 0;
        summed = summed_ranks<R>(header);
        if (fault(header, Point::reduce_enter, a.site.rank, epoch) == Action::stay_away)
            live = false;
    }

    WEFT_FN u32 me() const { return a.site.rank; }
    WEFT_FN u32 side() const { return side_of(epoch); }
    WEFT_FN ReductionInbox<R>& at(u32 rank) const { return share<R>(a.site, rank).inbox; }

    // Counts the teams that have read the epoch state; the last one may advance it. Lane 0 gets the
    // number of earlier teams, which only `advance` uses. The counter publishes nothing: every team
    // has read the epoch state before, and no other order is needed.
    WEFT_FN u32 arrive(const Block& team) {
        live = team.all(live);
        if (team.lane() != 0 || !live) return 0;
        start = now_ns();
        if (blockIdx.x == 0) header.call = a.call;
        return add_relaxed(&header.arrived, 1);
    }

    // `failed` is another word of the epoch state and is not written.
    WEFT_FN void advance(const Block& team, u32 before) {
        if (team.lane() != 0 || !live || before != team.teams() - 1) return;
        header.arrived = 0;
        header.state.epoch = epoch;
        keep_record(header, all_reduce_phase, epoch, start, a.tokens);
    }

    // One lane per peer sends this call's word; the same lane compares the peer's. A CTA has enough
    // threads (_iter_row_shapes in allreduce/kernels.py).
    WEFT_FN bool has_peer(u32 offset) const {
        return live && blockIdx.x == 0 && offset < R.ranks &&
               is_summed<R>(summed, next_rank<R>(me(), offset));
    }
    WEFT_FN void send_call_words(const Block& team) const {
        const u32 offset = team.lane() + 1;
        if (has_peer(offset))
            send_call_word<R>(a.site, epoch, a.call.hash, next_rank<R>(me(), offset));
    }
    WEFT_FN u64 load_call_word(const Block& team) const {
        const u32 offset = team.lane() + 1;
        if (blockIdx.x != 0 || offset >= R.ranks) return 0;
        return load_relaxed(&at(me()).call[side()][next_rank<R>(me(), offset)]);
    }
    WEFT_FN void check_call_word(const Block& team, u64 seen) const {
        const u32 offset = team.lane() + 1;
        if (has_peer(offset))
            same_call<R>(a.site, epoch, a.call.hash, next_rank<R>(me(), offset), seen);
    }

    WEFT_FN bool should_stop(SlotWait& wait) const {
        return wait_failed<R>(a.site, epoch, a.call.hash, wait);
    }
};

// The same vector of one row in the slots of all peers: peer p's is at `first + slot_index(me, p) *
// step`.
struct PeerSlots {
    uint4* first;
    u64 step;  // bytes
    Slot kind;

    WEFT_FN uint4* at(u32 me, u32 peer) const {
        return reinterpret_cast<uint4*>(reinterpret_cast<u64>(first) + slot_index(me, peer) * step);
    }
};

// Records a wait for the vectors of all peers. It counts for the peer that was missing last: a time
// for each peer would take registers of every thread. The wait for a call's first vectors is skew,
// and a later one transfer. Not inlined, so that the path of a short wait stays short.
WEFT_SLOW_FN void record_arrival(Header& header, u64 epoch, u32 peer, bool is_first, u64 start_ns) {
    const u64 waited_ns = now_ns() - start_ns;
    if (waited_ns == 0) return;
    PeerWaits& waits = waits_for(header, all_reduce_phase, peer);
    record_duration(is_first ? waits.skew : waits.transfer, waited_ns);
    waits.epoch = epoch;
}

// Waits for the vector of every peer that is summed; row[me] is the caller's own. polls_one: poll
// only one missing vector at a time, so that many waiting threads leave memory bandwidth to the
// others. Rows of more than 8 ranks do not fit into registers.
template <Reduction R, bool polls_one>
WEFT_FN bool await_vectors(const Call<R>& call, const PeerSlots& slots, u32 token, u32 v,
                           uint4 (&row)[R.ranks]) {
    const u32 me = call.me();
    RankSet missing = without(call.summed, me);
    u32 last = 0;  // a peer that was missing at the last poll
    SlotWait wait{.slot = slots.kind, .peer = 0, .token = token, .vector = v};
    // The first thread that sums rows records its waits. All others would wait for the clock, too.
    const bool records = threadIdx.x == 0 && blockIdx.x == call.a.pushers;
    for (u32 polls = 1;; ++polls) {
#pragma unroll
        for (u32 i = 0; i < R.ranks; ++i)
            if (has(missing, i)) row[i] = poll_vector(slots.at(me, i));
#pragma unroll
        for (u32 i = 0; i < R.ranks; ++i)
            if (is_ready(row[i])) missing = without(missing, i);
        if (missing == RankSet{}) {
            if (records && polls > untimed_polls) {
                const bool first_row = slots.kind == Slot::direct ? token == 0 : token < R.ranks;
                record_arrival(call.header, call.epoch, last, first_row && v == 0, wait.start);
            }
            return true;
        }
        last = first_of(missing);
        // Before the loop, which may last until the next check.
        if (records && polls == untimed_polls + 1) wait.start = now_ns();
        while (polls_one && polls != untimed_polls && polls % polls_per_check != 0 &&
               !is_ready(poll_vector(slots.at(me, last)))) {
            relax(polls);
            ++polls;
        }
        if (polls <= untimed_polls) continue;
        if (polls % polls_per_check == 0) {
            wait.peer = last;
            if (call.should_stop(wait)) return false;
        }
        relax(polls);
    }
}

// Restores the sentinels for the next call that uses the slots.
template <Reduction R> WEFT_FN void clear_slots(const Call<R>& call, const PeerSlots& slots) {
#pragma unroll
    for (u32 offset = 1; offset < R.ranks; ++offset)
        restore_sentinel(slots.at(call.me(), next_rank<R>(call.me(), offset)));
}

template <Reduction R>
WEFT_FN bool await_vector(const Call<R>& call, uint4* at, u32 peer, u32 token, u32 v, uint4& row) {
    SlotWait wait{.slot = Slot::whole, .peer = peer, .token = token, .vector = v};
    for (u32 polls = 1;; ++polls) {
        row = poll_vector(at);
        if (is_ready(row)) return true;
        if (polls % polls_per_check == 0 && call.should_stop(wait)) return false;
        relax(polls);
    }
}

template <Reduction R>
WEFT_FN bool await_trailer(const Call<R>& call, const Trailer* at, u32 peer, u32 token,
                           RowStats& m) {
    SlotWait wait{.slot = Slot::trailer, .peer = peer, .token = token, .vector = 0};
    const u32 tag = trailer_tag(call.epoch);
    for (u32 polls = 1;; ++polls) {
        const uint4 seen = poll_u64_pair(reinterpret_cast<const uint4*>(at));
        m = {__uint_as_float(seen.x), seen.z};
        if (seen.y == tag && seen.w == tag) return true;
        if (polls % polls_per_check == 0 && call.should_stop(wait)) return false;
        relax(polls);
    }
}

// A barrier of the cluster, or of the CTA if a cluster is one CTA.
WEFT_FN void sync_cluster(const Cluster& cluster, u32 neighbours) {
    if (neighbours == 1) return __syncthreads();
    cluster.arrive();
    cluster.wait();
}

}  // namespace weft
