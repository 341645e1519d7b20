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

// Multiplies a k block where two CTAs share an SM. Of more than 64 rows, for which a thread has no
// registers beside its sums, the last 48 come after the others.
template <GemmShape S, u32 N, u32 first_row = 0>
WEFT_FN void multiply_in_parts(GemmShared<S>& smem, u32 stage, const Operands<S>& operands,
                               const WeightFragments& weights, float (&sum)[N / 2]) {
    constexpr u32 left = N - first_row, rows = N > 64 && first_row == 0 ? N - 48 : left;
    SwapAbKBlock<S, rows, (N <= 64 ? 2 : 1)> block;
    issue_k_block<S.row_operand(), rows>(
        block.acc, weights.a,
        operands.swap_b + descriptor_offset<S>(stage) + first_row * (block_k_bytes / 16));
    block.read_scales(operands, smem, stage, first_row);
    block.template promote<0>(sum + first_row / 2);
    if constexpr (rows < left)
        multiply_in_parts<S, N, first_row + rows>(smem, stage, operands, weights, sum);
}

// Alone on its SM, a warp expands the next k block's weights while the tensor cores multiply one.
// Two CTAs on an SM have registers for the weights of one k block each: while one expands, the
// tensor cores work for the other.
template <GemmShape S, u32 N>
WEFT_FN void mainloop_mxfp4(GemmShared<S>& smem, PipelineState<S.stages>& pipeline,
                            const Operands<S>& operands, u32 rank, float (&sum)[N / 2]) {
    static_assert(S.stages >= 2);  // one is read while the next is awaited
    constexpr u32 ahead = N <= normal_m ? scales_read_ahead : 1;  // what registers are left for
    WeightFragments weights;
    const auto load = [&](WeightFragments& to) {
        smem.full[pipeline.stage].wait(pipeline.parity);
        to.load(operands.unit + pipeline.stage * S.stage_bytes(),
                reinterpret_cast<const u8*>(smem.magnitudes));
    };
    const auto multiply = [&](auto&& meanwhile) {
        const u32 stage = pipeline.stage;
        SwapAbKBlock<S, N, ahead> block;
        issue_k_block<S.row_operand(), N>(block.acc, weights.a,
                                          operands.swap_b + descriptor_offset<S>(stage));
        block.read_scales(operands, smem, stage);
        pipeline.advance();
        meanwhile();
        block.template promote<0>(sum);
        hold_registers(weights.a);
        release_stage(smem, stage, rank);
    };
    if constexpr (S.ctas_per_sm() == 2) {
#pragma unroll 1
        for (u32 k = 0; k < S.k_blocks(); ++k, pipeline.advance()) {
            load(weights);
            multiply_in_parts<S, N>(smem, pipeline.stage, operands, weights, sum);
            hold_registers(weights.a);
            release_stage(smem, pipeline.stage, rank);
        }
    } else {
        load(weights);
#pragma unroll 2
        for (u32 k = 1; k < S.k_blocks(); ++k) {
            WeightFragments next;
            multiply([&] { load(next); });
            weights = next;
        }
        multiply([] {});
    }
}

}  // namespace weft
