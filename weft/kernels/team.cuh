// The threads of one CTA acting as one team.
#pragma once
#include <weft/protocol/phases.cuh>

namespace weft {

constexpr u32 warp_lanes = 32;
constexpr u32 all_lanes = 0xffffffffu;

// Programmatic dependent launch. A kernel launched with it may start while its predecessor still
// runs: nothing in memory may be touched before this wait, epochs least of all.
WEFT_FN void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// From here on the successor may take its place on the SMs; it waits there for this kernel's end.
WEFT_FN void admit_successor() { asm volatile("griddepcontrol.launch_dependents;"); }

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

    WEFT_FN void meet() const { __syncthreads(); }

    // Every lane's verdict, after a barrier.
    WEFT_FN bool all(bool mine) const { return __syncthreads_and(mine); }

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
