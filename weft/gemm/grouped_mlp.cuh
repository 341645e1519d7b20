// SPDX-License-Identifier: Apache-2.0
// Both grouped GEMMs of experts in one kernel: the up projection, which gates and quantises, and
// the down projection of its results. The tiles of both are drawn from one counter, so no SM is
// idle between the GEMMs, whose last tiles rarely end together.
//
// The roles are those of grouped_gemm.cuh, except that warp 3 publishes up tiles (publish.cuh).
#pragma once
#include <weft/gemm/grouped_gemm.cuh>

namespace weft {

// The scheduler of the second GEMM after that of the first, which has drawn a tile of the second.
template <GemmShape Down, GemmShape Up>
WEFT_FN TileScheduler<Down> continue_with(GemmShared<Down>& smem, const TileScheduler<Up>& up) {
    return {smem, Down.first_position(), up.round, up.tile_idx, true};
}

// Loads the tiles of both GEMMs, and resets the state when all clusters have; run by one thread.
template <GemmShape Up, GemmShape Down>
WEFT_FN void load_mlp_tiles(const GemmArgs& up_args, const GemmArgs& down_args,
                            GemmShared<Up>& smem, GemmShared<Down>& down_smem, u8* tiles, u32 rank,
                            MlpState<Up.experts>& state) {
    PipelineState<Up.stages> pipeline;
    TileScheduler<Up> up{smem};
    Tickets<Up> tickets{&state.tickets};
    tickets.draw(smem, rank);
    tickets.send(smem, rank, 0);
    fence_for_bulk();  // the previous kernel wrote the rows with generic-proxy stores
    load_gemm<Up>(up_args, smem, tiles, rank, up, pipeline, tickets, 0);
    auto down = continue_with<Down>(down_smem, up);
    Tickets<Down> down_tickets{&state.tickets, tickets.drawn};
    load_gemm<Down>(down_args, down_smem, tiles, rank, down, pipeline, down_tickets, 0,
                    state.num_up_tiles);
    await_empty_stages(smem, pipeline);
    // All down tiles of the cluster are loaded and multiplied, so it waits for no up tile any more.
    if (rank != 0 || add_acq_rel(&state.tickets.finished, 1) + 1 != gridDim.x / 2) return;
    state.tickets = {};
    for (u32 e = 0; e < Up.experts; ++e) state.num_up_tiles[e] = 0;
}

template <GemmShape Up, GemmShape Down>
WEFT_FN void load_mlp_scales(const GemmArgs& up_args, const GemmArgs& down_args,
                             GemmShared<Up>& smem, GemmShared<Down>& down_smem, u32 rank,
                             MlpState<Up.experts>& state) {
    PipelineState<Up.stages> pipeline;
    TileScheduler<Up> up{smem};
    load_gemm_scales<Up>(up_args, smem, rank, up, pipeline);
    auto down = continue_with<Down>(down_smem, up);
    load_gemm_scales<Down>(down_args, down_smem, rank, down, pipeline, state.num_up_tiles);
}

template <GemmShape Up, GemmShape Down>
WEFT_FN void compute_mlp_tiles(const GemmArgs& up_args, const GemmArgs& down_args,
                               GemmShared<Up>& smem, GemmShared<Down>& down_smem, u8* tiles,
                               u32 rank) {
    PipelineState<Up.stages> pipeline;
    TileScheduler<Up> up{smem};
    compute_gemm<Up>(up_args, smem, tiles, up, pipeline, rank);
    auto down = continue_with<Down>(down_smem, up);
    compute_gemm<Down>(down_args, down_smem, tiles, down, pipeline, rank);
}

// Counts and starts are those of up_args; down_args has the same.
template <GemmShape Up, GemmShape Down>
WEFT_FN void grouped_mlp(const GemmArgs& up_args, const GemmArgs& down_args,
                         MlpState<Up.experts>& state) {
    static_assert(Up.part == Part::up && Down.part == Part::down && Up.has_wide_n());
    static_assert(Up.experts == Down.experts && Up.block_m == Down.block_m);
    static_assert(Up.has_whole_rings() && Down.has_whole_rings());  // both begin at stage 0
    // Both GEMMs use one shared memory, of one layout.
    static_assert(Up.stages == Down.stages && Up.stage_bytes() == Down.stage_bytes());
    static_assert(sizeof(GemmShared<Up>) == sizeof(GemmShared<Down>));
    extern __shared__ __align__(1024) u8 memory[];
    u8* const tiles = memory;
    u8* const behind_tiles = memory + Up.stages * Up.stage_bytes();
    auto& smem = *reinterpret_cast<GemmShared<Up>*>(behind_tiles);
    auto& down_smem = *reinterpret_cast<GemmShared<Down>*>(behind_tiles);
    const Block cta;
    const u32 rank = Cluster{}.rank();

    if (cta.lane() == 0) init_mbarriers(smem);
    pdl_wait();
    if (cta.warp() == 0) {
        const u32 end = schedule_tiles(up_args, smem, cta.warp_lane());
        count_tiles(down_smem, cta.warp_lane(), end);
    }
    __syncthreads();
    sync_cluster_relaxed();  // no CTA arrives at the other's mbarriers before they are initialised

    if (cta.lane() < warpgroup_threads) {
        setmaxnreg_dec<loading_registers[0]>();
        if (cta.lane() == 0)
            load_mlp_tiles(up_args, down_args, smem, down_smem, tiles, rank, state);
        else if (cta.warp() == Up.scale_warps() + 1 && cta.warp_lane() == 0)
            publish_up_tiles(smem, state.num_up_tiles);
        else if (cta.warp() != 0 && cta.warp() <= Up.scale_warps())
            load_mlp_scales(up_args, down_args, smem, down_smem, rank, state);
    } else {
        setmaxnreg_inc<math_registers[0]>();
        compute_mlp_tiles(up_args, down_args, smem, down_smem, tiles, rank);
    }

    sync_cluster_relaxed();  // the other CTA may still arrive at, or load into, this CTA's memory
}

}  // namespace weft
