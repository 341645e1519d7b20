// FP8 mainloops: each k block's product is scaled and added to the tile's sums in fp32.
//
// Swapped (A and B swapped): weights are wgmma's A operand, rows its B operand, which may be
// narrow: N is the number of rows, to a multiple of 16. Each warpgroup has half of the columns. A
// thread holds, for rows 8 j + 2 (lane % 4) + {0, 1}, two columns: sums 4 j and 4 j + 1 of column
// lane / 4 of its warp's sixteen, 4 j + 2 and 4 j + 3 of the column eight further on. It needs a
// quarter of all scales.
//
// Normal, for tiles of normal_m rows: rows are the A operand, 64 for each warpgroup. A thread holds
// rows lane / 4 and eight further on of its warp's sixteen; of the first, columns
// 8 j + 2 (lane % 4) + {0, 1} in sums 4 j and 4 j + 1, of the second in 4 j + 2 and 4 j + 3. It
// needs two scales, which leaves the bandwidth of shared memory to the tensor cores.
//
// Dual M: two normal M-tiles, one below the other, for each stage of weights. An expert with many
// rows then asks L2 for a third less.
#pragma once
#include <weft/gemm/math_warps.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>
#include <weft/gemm/wgmma.cuh>

namespace weft {

constexpr u32 normal_sums = block_n / 2;  // of a thread of a normal tile
constexpr u32 scales_read_ahead = 3;      // float4s that are read while wgmma runs

// One k block of a swapped tile of N rows.
template <GemmShape S, u32 N, u32 most_ahead = scales_read_ahead> struct SwapAbKBlock {
    static constexpr u32 ahead = N / 16 < most_ahead ? N / 16 : most_ahead;
    float acc[N / 2];
    float4 first[ahead];
    const float4* scales;

    WEFT_FN void issue(const Operands<S>& operands, u32 stage) {
        issue_k_block<S.operand, N>(acc, operands.swap_a + descriptor_offset<S>(stage),
                                    operands.swap_b + descriptor_offset<S>(stage), false);
    }
    WEFT_FN void read_scales(const Operands<S>& operands, const GemmShared<S>& smem, u32 stage) {
        scales = reinterpret_cast<const float4*>(smem.scales[stage].rows[0] + operands.swap_scales);
#pragma unroll
        for (u32 j = 0; j < ahead; ++j) first[j] = scales[4 * j];
    }
    // `sum += acc * scale`, rounded once.
    template <u32 pending> WEFT_FN void promote(float (&sum)[N / 2]) {
        wait_accumulator<pending>(acc);
#pragma unroll
        for (u32 j = 0; j < N / 16; ++j) {
            const float4 scale = j < ahead ? first[j] : scales[4 * j];
            const float by[4] = {scale.x, scale.y, scale.z, scale.w};
#pragma unroll
            for (u32 i = 0; i < 8; ++i)
                sum[8 * j + i] = __fmaf_rn(acc[8 * j + i], by[i / 4 * 2 + i % 2], sum[8 * j + i]);
        }
    }
};

// One k block of a normal tile, or of one of the two M-tiles of a dual tile.
template <GemmShape S> struct NormalKBlock {
    float acc[normal_sums], by[2][2];  // scales of gate's and of up's columns, for both rows

    WEFT_FN void issue(const Operands<S>& operands, u32 stage, u32 m_tile = 0) {
        issue_k_block<S.operand, block_n>(acc,
                                          operands.normal_a + descriptor_offset<S>(stage) +
                                              m_tile * (normal_m * block_k_bytes / 16),
                                          operands.normal_b + descriptor_offset<S>(stage), false);
    }
    WEFT_FN void read_scales(const Operands<S>& operands, const GemmShared<S>& smem, u32 stage,
                             u32 m_tile = 0) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            by[i / 2][i % 2] =
                smem.scales[stage]
                    .rows[S.gated() ? i / 2 : 0][operands.normal_scales[i % 2] + m_tile * normal_m];
    }
    template <u32 pending> WEFT_FN void promote(float (&sum)[normal_sums]) {
        wait_accumulator<pending>(acc);
#pragma unroll
        for (u32 i = 0; i < normal_sums; ++i)
            sum[i] = __fmaf_rn(acc[i], by[i / (normal_sums / 2)][i / 2 % 2], sum[i]);
    }
};

template <GemmShape S, u32 N>
WEFT_FN void mainloop_swap_ab(GemmShared<S>& smem, PipelineState<S.stages>& pipeline,
                              const Operands<S>& operands, u32 rank, float (&sum)[N / 2]) {
#pragma unroll 1
    for (u32 k = 0; k < S.k_blocks(); ++k, pipeline.advance()) {
        SwapAbKBlock<S, N> block;
        smem.full[pipeline.stage].wait(pipeline.parity);
        block.issue(operands, pipeline.stage);
        block.read_scales(operands, smem, pipeline.stage);
        block.template promote<0>(sum);
        release_stage(smem, pipeline.stage, rank);
    }
}

// Two k blocks at a time: the first is added while the second is multiplied.
template <GemmShape S>
WEFT_FN void mainloop_normal(GemmShared<S>& smem, PipelineState<S.stages>& pipeline,
                             const Operands<S>& operands, u32 rank, float (&sum)[normal_sums]) {
    u32 k = 0;
#pragma unroll 1
    for (; k + 1 < S.k_blocks(); k += 2, pipeline.advance()) {
        NormalKBlock<S> one, two;
        const u32 stage = pipeline.stage;
        smem.full[stage].wait(pipeline.parity);
        one.issue(operands, stage);
        pipeline.advance();
        smem.full[pipeline.stage].wait(pipeline.parity);
        two.issue(operands, pipeline.stage);
        one.read_scales(operands, smem, stage);
        one.template promote<1>(sum);
        release_stage(smem, stage, rank);
        two.read_scales(operands, smem, pipeline.stage);
        two.template promote<0>(sum);
        release_stage(smem, pipeline.stage, rank);
    }
    if (k == S.k_blocks()) return;
    NormalKBlock<S> last;
    smem.full[pipeline.stage].wait(pipeline.parity);
    last.issue(operands, pipeline.stage);
    last.read_scales(operands, smem, pipeline.stage);
    last.template promote<0>(sum);
    release_stage(smem, pipeline.stage, rank);
    pipeline.advance();
}

// A k block of one M-tile, then of the other. The sums leave no registers for two k blocks in
// flight, so the tensor cores work for the other warpgroup while this one adds.
template <GemmShape S>
WEFT_FN void mainloop_dual_m(GemmShared<S>& smem, PipelineState<S.stages>& pipeline,
                             const Operands<S>& operands, u32 rank, float (&sum)[2][normal_sums]) {
#pragma unroll 1
    for (u32 k = 0; k < S.k_blocks(); ++k, pipeline.advance()) {
        smem.full[pipeline.stage].wait(pipeline.parity);
#pragma unroll
        for (u32 m_tile = 0; m_tile < 2; ++m_tile) {
            NormalKBlock<S> block;
            block.issue(operands, pipeline.stage, m_tile);
            block.read_scales(operands, smem, pipeline.stage, m_tile);
            block.template promote<0>(sum[m_tile]);
        }
        release_stage(smem, pipeline.stage, rank);
    }
}

}  // namespace weft
