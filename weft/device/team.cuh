// SPDX-License-Identifier: Apache-2.0
// The threads of one CTA as one team.
#pragma once
#include <weft/device/wait.cuh>

namespace weft {

constexpr u32 warp_lanes = 32;
constexpr u32 all_lanes = 0xffffffffu;

// Programmatic dependent launch. A kernel launched with it may start while its predecessor still
// runs: before this wait it must not access memory, in particular no epoch.
WEFT_FN void griddep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The successor's CTAs may be scheduled from now on; their griddep_wait waits for the end of this
// kernel.
WEFT_FN void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// The CTAs of one cluster; without clusters in the launch each CTA is a cluster of one. No CTA may
// write into a neighbour's shared memory before the first barrier of the cluster, nor exit before
// the last one.
struct Cluster {
    WEFT_FN u32 size() const {
        u32 n;
        asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
        return n;
    }
    WEFT_FN u32 rank() const {
        u32 n;
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(n));
        return n;
    }
    // Order: every thread that has waited may read what a thread stored into shared memory before
    // it arrived.
    WEFT_FN void arrive() const { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
    WEFT_FN void wait() const { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
    // Stores to the same address of a neighbour's shared memory.
    WEFT_FN void store_at(u32 neighbour, u64* at, u64 value) const {
        asm volatile(
            "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
            "st.shared::cluster.u64 [there], %2;}" ::"r"(u32(__cvta_generic_to_shared(at))),
            "r"(neighbour), "l"(value)
            : "memory");
    }
};

// The lowest rank of a set that is not empty.
WEFT_FN u32 first_of(u32 set) { return __ffs(int(set)) - 1; }
template <u32 words> WEFT_FN u32 first_of(const RankWords<words>& set) {
    u32 first = 0;
    for (u32 i = words; i-- > 0;)
        if (set.word[i] != 0) first = 32 * i + first_of(set.word[i]);
    return first;
}

// The union of all lanes' sets, in every lane.
WEFT_FN RankSet union_of_lanes(RankSet set) {
    for (u32 i = 0; i < rank_words; ++i)
        word_of(set, i) = __reduce_or_sync(all_lanes, word_of(set, i));
    return set;
}

struct Block {
    WEFT_FN u32 lane() const { return threadIdx.x; }
    WEFT_FN u32 lanes() const { return blockDim.x; }
    WEFT_FN u32 warp() const { return threadIdx.x / warp_lanes; }
    WEFT_FN u32 warp_lane() const { return threadIdx.x % warp_lanes; }
    WEFT_FN u32 teams() const { return gridDim.x * gridDim.y; }
    WEFT_FN bool first() const { return blockIdx.x == 0 && blockIdx.y == 0; }

    // The lanes that publish belong to the first warp.
    WEFT_FN void meet_publishers() const {
        if (warp() == 0) __syncwarp();
    }

    // Reductions over all lanes, after a barrier.
    WEFT_FN bool all(bool mine) const { return __syncthreads_and(mine); }

    WEFT_FN bool any(bool mine) const { return __syncthreads_or(mine); }

    // True in every lane of the last team to arrive.
    // Order: the barrier gathers this team's writes to lane 0, whose add releases them and acquires
    // the earlier teams'. So a release by the last team publishes what all teams wrote (models/ptx
    // A4, A12).
    WEFT_FN bool is_last_cta(u32* arrived) const {
        __syncthreads();
        if (teams() == 1) return true;
        bool last = false;
        if (lane() == 0) {
            last = add_acq_rel(arrived, 1) == teams() - 1;
            if (last) *arrived = 0;
        }
        return __syncthreads_or(last);
    }
};

}  // namespace weft
