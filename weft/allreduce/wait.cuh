// A call of the fused all-reduce as its threads see it: the epoch, the slots, and the waits for
// data that is its own flag. Every poll is of this rank's own memory.
#pragma once
#include <weft/allreduce/row.cuh>

namespace weft {

template <Reduction R> struct Calling {
    const ReduceArgs& a;
    Header& header;
    u64 start, epoch;
    bool live;  // nobody has broken the group

    WEFT_FN explicit Calling(const ReduceArgs& args)
        : a(args), header(mine<R>(args.site).header), start(0) {
        // One instruction, which a compiler does not make of a struct: whoever has seen `failed`,
        // and counts itself, has the epoch too. The last one to count may write the next epoch.
        const uint4 turn = load_input(reinterpret_cast<const uint4*>(&header.turn));
        epoch = ((u64(turn.y) << 32 | turn.x) + 1) & epoch_mask;
        live = turn.z == 0;
        if (fault(header, Point::reduce_enter, a.site.rank, epoch) == Action::stay_away)
            live = false;
    }

    WEFT_FN u32 me() const { return a.site.rank; }
    WEFT_FN u32 side() const { return side_of(epoch); }
    WEFT_FN Summands<R>& at(u32 rank) const { return share<R>(a.site, rank).slots; }

    // Counts the teams that have read the turn; the last one may advance it. Lane 0 gets how many
    // came before it, and needs that no earlier than in `advance`. Nothing is published here: no
    // team comes so far without the turn, and that is all the order there must be.
    WEFT_FN u32 count(const Block& team) {
        live = team.all(live);
        if (team.lane() != 0 || !live) return 0;
        start = now_ns();
        return add_relaxed(&header.arrived, 1);
    }

    // `failed` is another word of the turn, and stays.
    WEFT_FN void advance(const Block& team, u32 before) {
        if (team.lane() != 0 || !live || before != team.teams() - 1) return;
        header.arrived = 0;
        header.turn.epoch = epoch;
        keep_record(header, all_reduce_phase, epoch, start, a.tokens);
    }

    // One lane tells each peer what this call is; the same lane compares with what the peer told.
    WEFT_FN void tell(const Block& team) const {
        const u32 turn = team.lane() + 1;
        if (live && blockIdx.x == 0 && turn < R.ranks)
            tell_call<R>(a.site, epoch, a.signature, next_rank<R>(me(), turn));
    }
    WEFT_FN u64 hear(const Block& team) const {
        const u32 turn = team.lane() + 1;
        if (blockIdx.x != 0 || turn >= R.ranks) return 0;
        return load_relaxed(&at(me()).call[side()][next_rank<R>(me(), turn)]);
    }
    WEFT_FN void compare(const Block& team, u64 heard) const {
        const u32 turn = team.lane() + 1;
        if (live && blockIdx.x == 0 && turn < R.ranks)
            same_call<R>(a.site, epoch, a.signature, next_rank<R>(me(), turn), heard);
    }

    WEFT_FN bool gives_up_on(SlotWait& wait) const {
        return gives_up<R>(a.site, epoch, a.signature, wait);
    }
};

// The same vector of one row in the slots of all peers: peer p's at `first + place_at(me, p) *
// step`.
struct Slots {
    uint4* first;
    u64 step;  // bytes
    Slot kind;

    WEFT_FN uint4* at(u32 me, u32 peer) const {
        return reinterpret_cast<uint4*>(reinterpret_cast<u64>(first) + place_at(me, peer) * step);
    }
};

// Waits for every peer's vector; row[me] is the caller's. Patient: while one is missing, only that
// one is polled, so that many waiting threads leave the memory to those that work.
template <Reduction R, bool patient>
WEFT_FN bool await_vectors(const Calling<R>& call, const Slots& slots, u32 token, u32 v,
                           uint4 (&row)[R.ranks]) {
    const u32 me = call.me();
    u32 missing = ((1u << R.ranks) - 1) & ~(1u << me);
    SlotWait wait{.slot = slots.kind, .peer = 0, .token = token, .vector = v};
    for (u32 turns = 1;; ++turns) {
#pragma unroll
        for (u32 i = 0; i < R.ranks; ++i)
            if (missing >> i & 1) row[i] = poll_vector(slots.at(me, i));
#pragma unroll
        for (u32 i = 0; i < R.ranks; ++i)
            if (is_ready(row[i])) missing &= ~(1u << i);
        if (missing == 0) return true;
        wait.peer = __ffs(int(missing)) - 1;
        while (patient && turns % polls_per_check != 0 &&
               !is_ready(poll_vector(slots.at(me, wait.peer)))) {
            relax(turns);
            ++turns;
        }
        if (turns % polls_per_check == 0 && call.gives_up_on(wait)) return false;
        relax(turns);
    }
}

// Leaves the slots empty for the next call that uses them.
template <Reduction R> WEFT_FN void clear_slots(const Calling<R>& call, const Slots& slots) {
#pragma unroll
    for (u32 turn = 1; turn < R.ranks; ++turn)
        post_vector(slots.at(call.me(), next_rank<R>(call.me(), turn)), sentinel_vector());
}

template <Reduction R>
WEFT_FN bool await_vector(const Calling<R>& call, uint4* at, u32 peer, u32 token, u32 v,
                          uint4& row) {
    SlotWait wait{.slot = Slot::whole, .peer = peer, .token = token, .vector = v};
    for (u32 turns = 1;; ++turns) {
        row = poll_vector(at);
        if (is_ready(row)) return true;
        if (turns % polls_per_check == 0 && call.gives_up_on(wait)) return false;
        relax(turns);
    }
}

template <Reduction R>
WEFT_FN bool await_trailer(const Calling<R>& call, const Trailer* at, u32 peer, u32 token,
                           Moments& m) {
    SlotWait wait{.slot = Slot::trailer, .peer = peer, .token = token, .vector = 0};
    const u32 tag = trailer_tag(call.epoch);
    for (u32 turns = 1;; ++turns) {
        const uint4 seen = poll_halves(reinterpret_cast<const uint4*>(at));
        m = {__uint_as_float(seen.x), seen.z};
        if (seen.y == tag && seen.w == tag) return true;
        if (turns % polls_per_check == 0 && call.gives_up_on(wait)) return false;
        relax(turns);
    }
}

// Meets the cluster, or the CTA where a cluster is one.
WEFT_FN void meet(const Cluster& cluster, u32 neighbours) {
    if (neighbours == 1) return __syncthreads();
    cluster.arrive();
    cluster.wait();
}

}  // namespace weft
