// Rows that bring their own news, as the threads of a GPU send and take them; the protocol is in
// lowlatency/layout.cuh.
#pragma once
#include <weft/device/quantize_warp.cuh>
#include <weft/device/roles.cuh>
#include <weft/device/sentinel_vector.cuh>
#include <weft/lowlatency/layout.cuh>

namespace weft {

// Blocks of FP8 that end a row: behind the last scale, words up to a whole vector.
template <u32 blocks> WEFT_FN void send_scale(u8* scales, u32 block, float scale) {
    u32* words = reinterpret_cast<u32*>(scales);
    store_relaxed(words + block, __float_as_uint(scale));
    if constexpr (blocks % 4 != 0)
        if (block == blocks - 1)
            for (u32 i = blocks; i < (blocks + 3) / 4 * 4; ++i) store_relaxed(words + i, 0u);
}

// The i-th 16-byte vector of a lane, of 512 columns that a warp sends. Rows that travel as they are
// lie side by side: a warp's store fills whole lines. Those that are quantised on the way: 16
// columns of one block in each lane.
template <Number N, bool quantised> WEFT_FN u32 vector_of(u32 part, u32 i) {
    constexpr u32 width = Columns<N>::vectors;
    const u32 lane = threadIdx.x % warp_lanes;
    if constexpr (quantised) return (part * warp_lanes + lane) * width + i;
    return (part * width + i) * warp_lanes + lane;
}

// Where this rank stands, and whether the group is broken. Every thread reads for itself, with
// whatever else it needs on the same way; behind `admitted` nobody of the CTA reads it again, so it
// may count itself.
struct Standing {
    Progress progress;
    u32 failed, generation;

    template <LowShape S> WEFT_FN static Standing read(const LowShare<S>& own) {
        return {own.progress, own.header.turn.failed, own.header.generation};
    }

    // Has nobody failed, and may those store who will: are the peers' inboxes blank?
    template <LowShape S>
    WEFT_FN bool admitted(const Block& team, const Site& site, Phase phase, bool stores) const {
        bool well = true;
        // The last warp: in a teller of few tokens it has nothing else to wait for.
        const u32 before = team.lanes() - warp_lanes;
        if (stores && team.lane() >= before && team.lane() - before < S.ranks) {
            const u32 peer = team.lane() - before;
            const u64 seen = load_acquire(grant_of<S>(site, phase, peer));
            // Most often it is there, and just this one.
            const u64 usual = make_flag(generation, site.descriptor, granted_by(progress, phase));
            if (failed == 0 && seen != usual) well = await_grant<S>(site, progress, phase, peer);
        }
        well = well && failed == 0;
        return team.all(well);
    }
};

// Counts CTAs that have read where this rank stands; true for the thread that counts the last,
// which may then advance it. By one thread of each CTA.
WEFT_FN bool counts_last(Header& header) {
    if (add_relaxed(&header.arrived, 1) != gridDim.x - 1) return false;
    header.arrived = 0;
    return true;
}

// When an operation began, in the lane that writes it down: no other reads the clock of all ranks
// on its way to its first store.
WEFT_FN u64 start_of(const Block& team, const Crew& crew) {
    const bool keeps = crew.takes_first() || (WEFT_PROFILE && crew.heralds());
    return keeps && team.lane() == 0 ? now_ns() : 0;
}

constexpr u64 largest(u64 a, u64 b) { return a > b ? a : b; }

// By the herald of every operation, before it waits for anything: a warp for each kind, because a
// release waits for the store before it.
template <LowShape S>
WEFT_FN void grant_all(const Block& team, const Site& site, const Progress& progress) {
    if (team.warp() > 1 || team.warp_lane() >= S.ranks) return;
    const u32 rank = site.rank + team.warp_lane(), peer = rank < S.ranks ? rank : rank - S.ranks;
    grant<S>(site, progress, team.warp() == 0 ? Phase::dispatch : Phase::combine, peer);
}

}  // namespace weft
