// Rows that bring their own news, as the threads of a GPU send and take them; the protocol is in
// protocol/lowlatency.cuh.
#pragma once
#include <weft/kernels/quant.cuh>
#include <weft/protocol/lowlatency.cuh>

namespace weft {

WEFT_FN bool has_come(uint4 v) {
    return v.x != absent && v.y != absent && v.z != absent && v.w != absent;
}

WEFT_FN void leave_blank(uint4* at) { post_vector(at, make_uint4(absent, absent, absent, absent)); }

template <Number N> WEFT_FN uint4 presentable(uint4 v) {
    return make_uint4(presentable<N>(v.x), presentable<N>(v.y), presentable<N>(v.z),
                      presentable<N>(v.w));
}

// Blocks of FP8 that end a row: behind the last scale, words up to a whole vector.
template <u32 blocks> WEFT_FN void send_scale(u8* scales, u32 block, float scale) {
    u32* words = reinterpret_cast<u32*>(scales);
    store_relaxed(words + block, __float_as_uint(scale));
    if constexpr (blocks % 4 != 0)
        if (block == blocks - 1)
            for (u32 i = blocks; i < (blocks + 3) / 4 * 4; ++i) store_relaxed(words + i, 0u);
}

// What one warp does of a kernel's work: units `first`, `first + step`, ...
struct Turns {
    u32 first, step;
};

// The CTAs of a kernel by what they do: those that tell, that send rows, that take rows. They stand
// in this order, so that whoever waits has been preceded by whoever sends.
struct Crew {
    u32 tellers, senders;

    WEFT_FN bool tells() const { return blockIdx.x < tellers; }
    WEFT_FN bool sends() const { return !tells() && blockIdx.x < tellers + senders; }
    WEFT_FN bool takes() const { return blockIdx.x >= tellers + senders; }
    WEFT_FN bool takes_first() const { return blockIdx.x == tellers + senders; }
    WEFT_FN u32 warps() const { return blockDim.x / warp_lanes; }
    WEFT_FN u32 role() const { return tells() ? 0 : sends() ? 1 : 2; }
    // This warp's first unit of what its crew does, and the step to its next.
    WEFT_FN Turns of_senders() const {
        return {(blockIdx.x - tellers) * warps() + threadIdx.x / warp_lanes, senders * warps()};
    }
    WEFT_FN Turns of_takers() const {
        return {(blockIdx.x - tellers - senders) * warps() + threadIdx.x / warp_lanes,
                (gridDim.x - tellers - senders) * warps()};
    }
};

// Where this rank stands, and whether the group is broken: read by one thread for its CTA. Whoever
// passes the barrier has the numbers, so a CTA that counts itself behind it needs them no more.
struct Standing {
    Progress progress;
    u32 failed;

    template <LowShape S>
    WEFT_FN static const Standing& read(const Block& team, LowShare<S>& own, Standing& shared) {
        if (team.lane() == 0) shared = {own.progress, own.header.turn.failed};
        __syncthreads();
        return shared;
    }
};

// Counts CTAs that have read where this rank stands; true for the thread that counts the last,
// which may then advance it. By one thread of each CTA.
WEFT_FN bool counts_last(Header& header) {
    if (add_relaxed(&header.arrived, 1) != gridDim.x - 1) return false;
    header.arrived = 0;
    return true;
}

constexpr u64 largest(u64 a, u64 b) { return a > b ? a : b; }

// By the first CTA of every operation, before it waits for anything.
template <LowShape S>
WEFT_FN void grant_all(const Block& team, const Site& site, const Progress& progress) {
    if (team.lane() < S.ranks) grant<S>(site, progress, (site.rank + team.lane()) % S.ranks);
}

template <LowShape S>
WEFT_FN bool await_grants(const Block& team, const Site& site, const Progress& progress,
                          Phase phase) {
    bool granted = true;
    if (team.lane() < S.ranks) granted = await_grant<S>(site, progress, phase, team.lane());
    return team.all(granted);
}

}  // namespace weft
