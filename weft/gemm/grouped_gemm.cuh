// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM on Hopper's tensor cores: FP8 with scales, FP8 rows by MXFP4 weights, BF16 or
// FP16. A tile has as many rows as its expert, rounded up to a multiple of 16, so weights are read
// once.
//
// Grid: persistent clusters of two CTAs. The CTAs of a cluster share a tile's rows: each loads half
// of them for both (TMA multicast) or, in kernels of MXFP4 weights with tiles of up to 32 rows, all
// of them for itself, and its own 128 columns of weights, or 256 in wide tiles (FP8, up to 128
// rows). In split tiles (FP8, up to 256 rows), each has half of the rows and loads half of the
// weights for both. One warpgroup loads ahead of the two math warpgroups, across tile boundaries,
// so loads continue during epilogues. Two or three CTAs share an SM if tiles of MXFP4 weights are
// low.
//
// With PDL, prefetch_weights allows loading weights before griddepcontrol.wait: all stages have
// their weights when the first rows may be read.
//
//   warp 0, one thread   weights and rows by TMA      loader.cuh, load_tiles
//   warps 1 to 3         scales of FP8 rows (1)       loader.cuh, load_scales
//   warpgroups 1 and 2   mainloop and epilogue        compute.cuh, compute_tiles
//
// (1) Warps 2 and 3 only with higher tiles: GemmShape::scale_warps.
//
// tile_scheduler.cuh assigns tiles to clusters, in kernels with split tiles by tickets that are
// drawn from a counter; pipeline.cuh defines the shared memory.
#pragma once
#include <weft/device/team.cuh>
#include <weft/gemm/compute.cuh>
#include <weft/gemm/loader.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>
#include <weft/gemm/tile_scheduler.cuh>
#include <weft/gemm/wgmma.cuh>

namespace weft {

// Registers per thread with one, two or three CTAs per SM.
constexpr u32 loading_registers[] = {40, 32, 24};
constexpr u32 math_registers[] = {232, 104, 72};

template <GemmShape S>
WEFT_FN void grouped_gemm(const GemmArgs& a, TicketCounter* ticket_counters) {
    extern __shared__ __align__(1024) u8 memory[];
    u8* const tiles = memory;
    GemmShared<S>& smem = *reinterpret_cast<GemmShared<S>*>(memory + S.stages * S.stage_bytes());
    const Block cta;
    const u32 rank = Cluster{}.rank();

    if (cta.lane() == 0) init_mbarriers(smem);
    if (S.is_mxfp4() && cta.lane() < magnitude_tables)
        smem.magnitudes[cta.lane()] = magnitudes_times(cta.lane());
    if constexpr (!S.prefetch_weights) pdl_wait();
    if (cta.warp() == 0) schedule_tiles(a, smem, cta.warp_lane());
    __syncthreads();
    sync_cluster_relaxed();  // no CTA arrives at the other's mbarriers before they are initialised

    if (cta.lane() < warpgroup_threads) {
        setmaxnreg_dec<loading_registers[S.ctas_per_sm() - 1]>();
        if (cta.lane() == 0)
            load_tiles(a, smem, tiles, rank, ticket_counters);
        else if constexpr (S.has_fp8_rows())
            if (cta.warp() != 0 && cta.warp() <= S.scale_warps()) load_scales(a, smem, rank);
    } else {
        setmaxnreg_inc<math_registers[S.ctas_per_sm() - 1]>();
        compute_tiles(a, smem, tiles, rank);
    }

    sync_cluster_relaxed();  // the other CTA may still arrive at, or load into, this CTA's memory
}

}  // namespace weft
