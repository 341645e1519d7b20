// The mainloop of FP8 rows and MXFP4 weights. All tiles are swapped, up to 160 rows high: which
// sums a thread holds is said in mainloop_fp8.cuh, and so is the scaling of each k block.
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

// A thread's two columns: the power of two that their weights have in common, and the bias. Loaded
// before the mainloop, for it takes a trip to memory. Gated, one warpgroup has gates, one has ups.
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
    // Exact but for the rounding of the bias: the scale is a power of two.
    template <u32 sums> WEFT_FN void apply_to(float (&sum)[sums]) const {
#pragma unroll
        for (u32 i = 0; i < sums; ++i)
            sum[i] = S.bias == Bias::none ? __fmul_rn(sum[i], scale[i / 2 % 2])
                                          : __fmaf_rn(sum[i], scale[i / 2 % 2], bias[i / 2 % 2]);
    }
};

// Two CTAs on an SM have registers for the weights of one k block each: while one expands, the
// tensor cores work for the other.
//
// Alone on its SM, a warp has three k blocks in work: while the tensor cores multiply one, the next
// one's weights are expanded between the wgmmas, and the packed weights of the one after that are
// awaited and read, so that neither trip to shared memory is waited for. High tiles leave no
// registers for packed weights: theirs are read when they are expanded.
template <GemmShape S, u32 N>
WEFT_FN void mainloop_mxfp4(GemmShared<S>& smem, PipelineState<S.stages>& pipeline,
                            const Operands<S>& operands, u32 rank, float (&sum)[N / 2]) {
    static_assert(S.stages >= 3);  // one is multiplied and one expanded while the next is awaited
    constexpr bool reads_ahead = N <= normal_m;
    // What registers are left for.
    constexpr u32 scales_ahead = S.ctas_per_sm() == 1 && N <= 96 ? scales_read_ahead : 2;
    PipelineState<S.stages> to_read = pipeline;
    PackedWeights packed;
    WeightFragments weights;
    const auto read = [&] {
        smem.full[to_read.stage].wait(to_read.parity);
        packed.read(operands.unit + to_read.stage * S.stage_bytes());
        to_read.advance();
    };
    const auto multiply = [&](auto&& between, auto&& meanwhile) {
        SwapAbKBlock<S, N, scales_ahead> block;
        issue_k_block<S.row_operand(), N>(
            block.acc, weights.a, operands.swap_b + descriptor_offset<S>(pipeline.stage), between);
        block.read_scales(operands, smem, pipeline.stage);
        meanwhile();
        block.template promote<0>(sum);
        hold_registers(weights.a);
        release_stage(smem, pipeline.stage, rank);
        pipeline.advance();
    };
    const auto nothing = [](auto...) {};
    if constexpr (S.ctas_per_sm() == 2) {
#pragma unroll 1
        for (u32 k = 0; k < S.k_blocks(); ++k) {
            read();
            weights.expand(packed);
            multiply(nothing, nothing);
        }
        return;
    }
    read();
    weights.expand(packed);
    if constexpr (reads_ahead && S.k_blocks() > 1) read();
#pragma unroll 2
    for (u32 k = 1; k < S.k_blocks(); ++k) {
        WeightFragments next;
        if constexpr (reads_ahead) {
            multiply([&](u32 i) { next.expand_normal(packed, i); },
                     [&] {
                         next.correct(packed);
                         if (k + 1 < S.k_blocks()) read();
                     });
        } else {
            multiply(nothing, [&] {
                read();
                next.expand(packed);
            });
        }
        weights = next;
    }
    multiply(nothing, nothing);
}

}  // namespace weft
