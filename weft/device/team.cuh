// The threads of one CTA acting as one team.
#pragma once
#include <weft/device/wait.cuh>

namespace weft {

constexpr u32 warp_lanes = 32;
constexpr u32 all_lanes = 0xffffffffu;

// Programmatic dependent launch. A kernel launched with it may start while its predecessor still
// runs: nothing in memory may be touched before this wait, epochs least of all.
WEFT_FN void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// From here on the successor may take its place on the SMs; it waits there for this kernel's end.
WEFT_FN void admit_successor() { asm volatile("griddepcontrol.launch_dependents;"); }

// The CTAs of one cluster; a launch without clusters has clusters of one. Nobody may write into the
// shared memory of a neighbour before all have met once, nor leave before all have met for the last
// time.
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
    // Order: what a thread stored into shared memory before it arrived may be read by every thread
    // that has waited.
    WEFT_FN void arrive() const { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
    WEFT_FN void wait() const { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
    // Stores into the same place of a neighbour's shared memory.
    WEFT_FN void store_at(u32 neighbour, u64* at, u64 value) const {
        asm volatile(
            "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
            "st.shared::cluster.u64 [there], %2;}" ::"r"(u32(__cvta_generic_to_shared(at))),
            "r"(neighbour), "l"(value)
            : "memory");
    }
};

struct Block {
    WEFT_FN u32 lane() const { return threadIdx.x; }
    WEFT_FN u32 lanes() const { return blockDim.x; }
    WEFT_FN u32 warp() const { return threadIdx.x / warp_lanes; }
    WEFT_FN u32 warp_lane() const { return threadIdx.x % warp_lanes; }
    WEFT_FN u32 teams() const { return gridDim.x * gridDim.y; }
    WEFT_FN bool first() const { return blockIdx.x == 0 && blockIdx.y == 0; }

    // The lanes that publish are those of the first warp.
    WEFT_FN void meet_publishers() const {
        if (warp() == 0) __syncwarp();
    }

    // All lanes' verdicts, after a barrier.
    WEFT_FN bool all(bool mine) const { return __syncthreads_and(mine); }

    WEFT_FN bool any(bool mine) const { return __syncthreads_or(mine); }

    // True in every lane of the last team to come here.
    // Order: the barrier gathers this team's writes to lane 0, whose add releases them and acquires
    // the earlier teams'; so a release by the last team publishes what all teams wrote (models/ptx
    // A4, A12).
    WEFT_FN bool last_of(u32* arrived) const {
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
