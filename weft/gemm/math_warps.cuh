// SPDX-License-Identifier: Apache-2.0
// The two math warpgroups: thread indices, barriers and operands.
#pragma once
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>
#include <weft/gemm/wgmma.cuh>

namespace weft {

constexpr u32 math_warps_per_group = warpgroup_threads / warp_lanes;

// Named barriers; 0 is __syncthreads.
constexpr u32 math_barrier = 1;
constexpr u32 gate_barrier = 2;       // + warp of its warpgroup: 2 to 5
constexpr u32 warpgroup_barrier = 6;  // + warpgroup: 6 and 7

WEFT_FN void sync_math_warps() { named_barrier(math_barrier, math_threads); }
WEFT_FN u32 math_thread() { return threadIdx.x - warpgroup_threads; }
WEFT_FN u32 math_warpgroup() { return math_thread() / warpgroup_threads; }

// Returns a value that is equal in all lanes such that the compiler keeps it in a uniform register.
WEFT_FN u32 warp_uniform(u32 value) { return __shfl_sync(all_lanes, value, 0); }

// The first of this warp's 16 rows of a normal tile.
WEFT_FN u32 normal_row() { return math_thread() / warp_lanes * 16; }

// The operands in the first stage, as tiles for wgmma (except `unit`), and the indices of a
// thread's scales.
template <GemmShape S> struct Operands {
    u32 swap_a, swap_b;      // swapped tile: the warpgroup's half of the weights, and all rows
    u32 normal_a, normal_b;  // normal tile: the warpgroup's half of the rows, and all weights
    u32 split_a;  // split or wide: the warpgroup's half of the rows, after both blocks of weights
    u32 swap_scales, normal_scales[2];
    const u8* unit;  // MXFP4: the warpgroup's unit

    WEFT_FN explicit Operands(u8* tiles) {
        const u32 group = warp_uniform(math_warpgroup()), lane = threadIdx.x % 32;
        const u32 at = u32(__cvta_generic_to_shared(tiles));
        swap_a = smem_tile(at + group * (weight_tile_bytes / 2));
        swap_b = smem_tile(at + S.weight_bytes());
        normal_a = smem_tile(at + weight_tile_bytes + group * (normal_m / 2) * block_k_bytes);
        normal_b = smem_tile(at);
        split_a = normal_a + weight_tile_bytes / 16;
        swap_scales = (S.is_fp8() && S.gated() ? group * S.cta_m() : 0) + lane % 4 * 4;
        normal_scales[0] = scale_slot(normal_row() + lane / 4);
        normal_scales[1] = scale_slot(normal_row() + lane / 4 + 8);
        unit = tiles + group * unit_bytes;
    }
};

// The offset of a stage's tiles from those of the first stage, in units of 16 bytes.
template <GemmShape S> WEFT_FN u32 descriptor_offset(u32 stage) {
    return stage * (S.stage_bytes() / 16);
}

}  // namespace weft
