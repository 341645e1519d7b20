// SPDX-License-Identifier: Apache-2.0
// The mainloop of FP8 rows and MXFP4 weights. All tiles are swapped, with up to 160 rows;
// mainloop_fp8.cuh documents which sums a thread holds and how k blocks are scaled.
#pragma once
#include <weft/gemm/epilogue.cuh>
#include <weft/gemm/expand.cuh>
#include <weft/gemm/mainloop_fp8.cuh>
#include <weft/gemm/math_warps.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>
#include <weft/gemm/tile_scheduler.cuh>
#include <weft/gemm/wgmma.cuh>

namespace weft {

// The weights' common power of two and the bias of a thread's two columns. Both are loaded before
// the mainloop, which hides the latency. With gating, one warpgroup has gates, the other ups.
template <GemmShape S> struct Mxfp4Columns {
    float scale[2] = {}, bias[2] = {};

    WEFT_FN Mxfp4Columns(const GemmArgs& a, const Tile& tile, u32 rank) {
        const u32 self = math_thread() % warpgroup_threads, group = math_warpgroup();
        const u32 in_unit = self / warp_lanes * 16 + self % warp_lanes / 4;
        const u32 first = S.gated()
                              ? tile.n_block * block_n + rank * gated_block_n + group * (S.n / 2)
                              : tile.n_block * cluster_n + rank * block_n + group * unit_n;
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const u32 column = first + in_unit + 8 * i;
            if (column >= S.n) continue;  // not stored
            scale[i] = a.weight_scales[u64(tile.expert) * S.n + column];
            if constexpr (S.bias != Bias::none)
                bias[i] = BiasColumns<S>::load(a, tile.expert, column);
        }
    }
    // The scale is a power of two, so only the addition of the bias rounds.
    template <u32 sums> WEFT_FN void apply_to(float (&sum)[sums]) const {
#pragma unroll
        for (u32 i = 0; i < sums; ++i)
            sum[i] = S.bias == Bias::none ? __fmul_rn(sum[i], scale[i / 2 % 2])
                                          : __fmaf_rn(sum[i], scale[i / 2 % 2], bias[i / 2 % 2]);
    }
};

// Multiplies a k block. A CTA alone on its SM expands 32 columns of k while the tensor cores
// multiply the previous ones. If CTAs share an SM, the tensor cores work for one while the others
// expand. With more than 64 rows, a thread of such a CTA has too few registers for all products
// besides its sums, so the last 48 rows are multiplied after the others.
template <GemmShape S, u32 N>
WEFT_FN void multiply_packed(GemmShared<S>& smem, u32 stage, const Operands<S>& operands,
                             const PackedWeights& packed, u32 rows, float (&sum)[N / 2],
                             auto&& meanwhile) {
    constexpr bool alone = S.ctas_per_sm() == 1;
    constexpr u32 first_rows = alone || N <= 64 ? N : N - 48;
    constexpr u32 ahead = !alone ? (N <= 64 ? 2 : 1) : N <= normal_m ? scales_read_ahead : 1;
    u32 a[block_k_bytes / 32][4];
    {
        SwapAbKBlock<S, first_rows, ahead> block;
#pragma unroll
        for (u32 i = 0; i < block_k_bytes / 32; ++i) {
            packed.expand(a[i], i, smem.magnitudes);
            if constexpr (alone) {
                wgmma_fence();
                wgmma<S.row_operand(), first_rows>(block.acc, a[i], smem_descriptor(rows + i * 2),
                                                   i != 0);
            }
        }
        if constexpr (alone)
            wgmma_commit();
        else
            issue_k_block<S.row_operand(), first_rows>(block.acc, a, rows);
        block.read_scales(operands, smem, stage);
        meanwhile();
        block.template promote<0>(sum);
    }
    if constexpr (first_rows < N) {
        SwapAbKBlock<S, N - first_rows, 1> block;
        issue_k_block<S.row_operand(), N - first_rows>(block.acc, a,
                                                       rows + first_rows * (block_k_bytes / 16));
        block.read_scales(operands, smem, stage, first_rows);
        block.template promote<0>(sum + first_rows / 2);
    }
    hold_registers(a);
}

// A CTA alone on its SM reads the next k block's packed weights while it multiplies one.
template <GemmShape S, u32 N>
WEFT_FN void mainloop_mxfp4_rolled(GemmShared<S>& smem, PipelineState<S.stages>& pipeline,
                                   const Operands<S>& operands, u32 rank, float (&sum)[N / 2]) {
    static_assert(S.stages >= 2);  // one stage is read while the next is loaded
    constexpr bool ahead = S.ctas_per_sm() == 1;
    const u32 rows = warp_uniform(operands.swap_b);  // in the first stage
    PackedWeights packed, next;
    const auto read = [&] {
        smem.full[pipeline.stage].wait(pipeline.parity);
        next.read(operands.unit + pipeline.stage * S.stage_bytes());
    };
    if constexpr (ahead) read();
#pragma unroll 1
    for (u32 k = 0; k < S.k_blocks(); ++k) {
        if constexpr (!ahead) read();
        packed = next;
        const u32 stage = pipeline.stage;
        pipeline.advance();
        multiply_packed<S, N>(smem, stage, operands, packed, rows + descriptor_offset<S>(stage),
                              sum, [&] {
                                  if (ahead && k + 1 < S.k_blocks()) read();
                              });
        release_stage(smem, stage, rank);
    }
}

// The same, unrolled: 104 instructions per k block of eight rows instead of 132, of which expansion
// takes 74. Unrolling alone takes 3 to 4 % less time (H200, 1 to 2 rows an expert, 2026-11-29).
template <GemmShape S, u32 N>
WEFT_FN void mainloop_mxfp4_unrolled(GemmShared<S>& smem, PipelineState<S.stages>& pipeline,
                                     const Operands<S>& operands, u32 rank, float (&sum)[N / 2]) {
    const u32 rows = warp_uniform(operands.swap_b);  // in the first stage
    for_stages<S>(pipeline, [&](u32 stage, u32 parity) {
        PackedWeights packed;
        smem.full[stage].wait(parity);
        packed.read(operands.unit + stage * S.stage_bytes());
        multiply_packed<S, N>(smem, stage, operands, packed, rows + descriptor_offset<S>(stage),
                              sum, [] {});
        release_stage(smem, stage, rank);
    });
}

// valid_m: rows of the tile. Up to eight are multiplied without the other eight, of which the sums
// stay 0. In kernels of higher tiles the unrolled loop would spill registers.
template <GemmShape S, u32 N>
WEFT_FN void mainloop_mxfp4(GemmShared<S>& smem, PipelineState<S.stages>& pipeline,
                            const Operands<S>& operands, u32 rank, u32 valid_m,
                            float (&sum)[N / 2]) {
    if constexpr (S.block_m > 64) {
        mainloop_mxfp4_rolled<S, N>(smem, pipeline, operands, rank, sum);
    } else {
        if constexpr (N == block_m_granularity) {
            if (valid_m <= N / 2) {
                mainloop_mxfp4_unrolled<S, N / 2>(smem, pipeline, operands, rank,
                                                  reinterpret_cast<float (&)[N / 4]>(sum));
                return;
            }
        }
        mainloop_mxfp4_unrolled<S, N>(smem, pipeline, operands, rank, sum);
    }
}

}  // namespace weft
