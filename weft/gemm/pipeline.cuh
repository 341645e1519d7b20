// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA: mbarriers and scales of the pipeline stages, and buffers of the
// epilogues. The stages' tiles precede it, aligned to 1024 bytes.
#pragma once
#include <weft/device/tma.cuh>
#include <weft/gemm/expand.cuh>
#include <weft/gemm/shape.cuh>

namespace weft {

// The scales of one k block: each row's scale times that of its block of weights; with MXFP4
// weights only the row's. A CTA has two blocks of weights if they are gate and up, and in split and
// wide tiles. Rows are in the order of scale_slot.
template <GemmShape S> struct alignas(16) StageScales {
    float rows[S.scales_of_row()][S.has_fp8_rows() ? S.cta_m() : 1];
};

// The index of a row's scale. A thread of a swapped tile holds rows 8 j + 2 q and 8 j + 2 q + 1 for
// each j. The scales for two neighbouring j are adjacent, so that one load reads four scales.
WEFT_FN u32 scale_slot(u32 row) {
    const u32 j = row / 8, q = row % 8 / 2;
    return j / 2 * 16 + q * 4 + j % 2 * 2 + row % 2;
}

constexpr u32 staging_bytes = 1280;  // per math warp, for the epilogue's results

template <GemmShape S> struct GemmShared {
    // MXFP4: one table per exponent. Together they fill all banks once, so reads of different
    // tables have no bank conflicts.
    alignas(S.is_mxfp4() ? 128 : 16) Magnitudes magnitudes[S.is_mxfp4() ? magnitude_tables : 1];
    StageScales<S> scales[S.has_fp8_rows() ? S.stages : 1];
    alignas(16) u8 staging[math_warps * staging_bytes];
    u64 dst_addrs[S.epilogue == Epilogue::push || S.in_mlp() ? S.block_m : 1];
    // The largest |x| of each row, as bits: per warp, and from the other CTA.
    u32 amax[S.exchanges_amax() ? math_warps : 1][S.exchanges_amax() ? S.cta_m() / 2 : 1];
    u32 peer_amax[S.exchanges_amax() ? 2 : 1][S.exchanges_amax() ? S.cta_m() : 1];
    float inverse_scales[S.stores_fp8() || S.in_mlp() ? S.cta_m() : 1];
    u32 tile_ends[S.in_mlp() ? 2 * S.experts : S.experts];  // see tile_scheduler.cuh
    u32 expert_order[S.experts];
    u32 stored_expert;  // see publish.cuh
    u32 counts[S.experts], first_rows[S.experts];
    u32 tickets[S.ticket_ring()];
    Mbarrier full[S.stages], empty[S.stages], peer_amax_full[2], ticket_full[S.ticket_ring()];
    Mbarrier stored, published;
};

template <GemmShape S> constexpr u32 gemm_shared_bytes() {
    return S.stages * S.stage_bytes() + sizeof(GemmShared<S>);
}

// A position in the ring of stages, and the parity of its current phase.
template <u32 stages> struct PipelineState {
    u32 stage = 0, parity = 0;

    WEFT_FN void advance() {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
    WEFT_FN void advance_by(u32 steps) {
        const u32 end = stage + steps;
        stage = end % stages;
        parity ^= end / stages % 2;
    }
};

template <GemmShape S> WEFT_FN void init_mbarriers(GemmShared<S>& smem) {
    for (u32 i = 0; i < S.stages; ++i) {
        // `full`: the TMA thread and the scale warps. `empty`: the math warps, of both CTAs if they
        // share rows.
        smem.full[i].init(S.has_fp8_rows() ? 1 + S.scale_warps() : 1);
        smem.empty[i].init((S.shares_rows() ? 2 : 1) * math_warps);
    }
    smem.stored.init(math_warps);
    smem.published.init(1);
    smem.peer_amax_full[0].init(1);
    smem.peer_amax_full[1].init(1);
    for (u32 i = 0; i < S.ticket_ring(); ++i) smem.ticket_full[i].init(1);
    fence_mbarrier_init();
}

// Signals the CTAs that load into a stage that this math warp has read it. The other CTA's loads
// overwrite only operands of completed wgmmas. Only this CTA overwrites its scales and, in a split
// tile, its rows.
template <GemmShape S> WEFT_FN void release_stage(GemmShared<S>& smem, u32 stage, u32 rank) {
    const u32 lane = threadIdx.x % warp_lanes;
    __syncwarp();
    if (lane == 0) smem.empty[stage].arrive();
    if (S.shares_rows() && lane == 1) arrive_remote(rank ^ 1, smem.empty[stage]);
}

// With PDL: waits until the previous kernel's writes are visible, and lets the next kernel start.
WEFT_FN void pdl_wait() {
    griddep_wait();
    launch_dependents();
}

}  // namespace weft
