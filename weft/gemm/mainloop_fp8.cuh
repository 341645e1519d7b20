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
// Split: of a tile of 256 rows by 256 weight rows, each CTA of the cluster has 128 rows and all
// weights, which each loads half of for both. A warpgroup has 64 rows, loads them into registers
// once, and multiplies them by 64 weight rows at a time; a thread has sums of two blocks of
// weights, each as of a normal tile. Operands in shared memory alone would be too slow for products
// so narrow: its bandwidth is as much as 64 rows by 64 weight rows take.
#pragma once
#include <weft/gemm/math_warps.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>
#include <weft/gemm/wgmma.cuh>

namespace weft {

constexpr u32 normal_sums = block_n / 2;  // of a thread of a normal tile
constexpr u32 scales_read_ahead = 3;      // float4s that are read while wgmma runs

// One k block of a swapped tile of N rows.
template <GemmShape S, u32 N> struct SwapAbKBlock {
    static constexpr u32 ahead = N / 16 < scales_read_ahead ? N / 16 : scales_read_ahead;
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

// The scales of a thread's two rows for one block of weights: of gate's and of up's columns.
template <GemmShape S> struct NormalScales {
    float by[2][2];

    WEFT_FN void read(const Operands<S>& operands, const GemmShared<S>& smem, u32 stage,
                      u32 block = 0) {
        const StageScales<S>& scales = smem.scales[stage];
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            by[i / 2][i % 2] =
                scales.rows[S.gated() ? i / 2 : block][operands.normal_scales[i % 2]];
    }
};

// One k block of a normal tile.
template <GemmShape S> struct NormalKBlock {
    float acc[normal_sums];

    WEFT_FN void issue(const Operands<S>& operands, u32 stage) {
        issue_k_block<S.operand, block_n>(acc, operands.normal_a + descriptor_offset<S>(stage),
                                          operands.normal_b + descriptor_offset<S>(stage), false);
    }
    template <u32 pending>
    WEFT_FN void promote(float (&sum)[normal_sums], const NormalScales<S>& scales) {
        wait_accumulator<pending>(acc);
#pragma unroll
        for (u32 i = 0; i < normal_sums; ++i)
            sum[i] = __fmaf_rn(acc[i], scales.by[i / (normal_sums / 2)][i / 2 % 2], sum[i]);
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
        NormalScales<S> scales;
        const u32 stage = pipeline.stage;
        smem.full[stage].wait(pipeline.parity);
        one.issue(operands, stage);
        pipeline.advance();
        smem.full[pipeline.stage].wait(pipeline.parity);
        two.issue(operands, pipeline.stage);
        scales.read(operands, smem, stage);
        one.template promote<1>(sum, scales);
        release_stage(smem, stage, rank);
        scales.read(operands, smem, pipeline.stage);
        two.template promote<0>(sum, scales);
        release_stage(smem, pipeline.stage, rank);
    }
    if (k == S.k_blocks()) return;
    NormalKBlock<S> last;
    NormalScales<S> scales;
    smem.full[pipeline.stage].wait(pipeline.parity);
    last.issue(operands, pipeline.stage);
    scales.read(operands, smem, pipeline.stage);
    last.template promote<0>(sum, scales);
    release_stage(smem, pipeline.stage, rank);
    pipeline.advance();
}

// One k block of a split tile: 64 rows by 256 weight rows, in quarters of 64 weight rows. Of a
// block of 128 weight rows, gated, the first 64 are gates and the others ups. Two quarters are in
// flight, so the tensor cores need not wait for one to be added.
template <GemmShape S> struct SplitKBlock {
    static constexpr u32 quarter_n = block_n / 2, quarter_sums = normal_sums / 2;
    u32 rows[block_k_bytes / 32][4];
    float acc[2][quarter_sums];
    NormalScales<S> scales[2];  // of the two blocks of weights

    WEFT_FN void load(const Operands<S>& operands, const GemmShared<S>& smem, u32 stage) {
        const u8* const row = operands.split_a + stage * S.stage_bytes();
#pragma unroll
        for (u32 i = 0; i < block_k_bytes / 32; ++i)
            ldmatrix_x4(rows[i], row + (operands.split_chunk ^ i * 32));
        scales[0].read(operands, smem, stage);
        if constexpr (S.gated())
            scales[1] = scales[0];
        else
            scales[1].read(operands, smem, stage, 1);
    }
    WEFT_FN void issue(u32 weights, u32 quarter) {
        constexpr u32 bytes = quarter_n * block_k_bytes;
        issue_k_block<S.operand, quarter_n>(acc[quarter % 2], rows,
                                            weights + quarter * (bytes / 16));
    }
    template <u32 pending> WEFT_FN void promote(float (&sum)[2][normal_sums], u32 quarter) {
        float (&part)[quarter_sums] = acc[quarter % 2];
        wait_accumulator<pending>(part);
#pragma unroll
        for (u32 i = 0; i < quarter_sums; ++i) {
            float& to = sum[quarter / 2][quarter % 2 * quarter_sums + i];
            to = __fmaf_rn(part[i], scales[quarter / 2].by[quarter % 2][i / 2 % 2], to);
        }
    }
};

// A warpgroup that has rows of padding alone multiplies nothing.
template <GemmShape S>
WEFT_FN void mainloop_split(GemmShared<S>& smem, PipelineState<S.stages>& pipeline,
                            const Operands<S>& operands, u32 rank, bool has_rows,
                            float (&sum)[2][normal_sums]) {
    if (!has_rows) {
        for (u32 k = 0; k < S.k_blocks(); ++k, pipeline.advance()) {
            smem.full[pipeline.stage].wait(pipeline.parity);
            release_stage(smem, pipeline.stage, rank);
        }
        return;
    }
#pragma unroll 1
    for (u32 k = 0; k < S.k_blocks(); ++k, pipeline.advance()) {
        SplitKBlock<S> block;
        const u32 weights = warp_uniform(operands.normal_b + descriptor_offset<S>(pipeline.stage));
        smem.full[pipeline.stage].wait(pipeline.parity);
        block.load(operands, smem, pipeline.stage);
        block.issue(weights, 0);
#pragma unroll
        for (u32 quarter = 0; quarter < 3; ++quarter) {
            block.issue(weights, quarter + 1);
            block.template promote<1>(sum, quarter);
        }
        block.template promote<0>(sum, 3);
        release_stage(smem, pipeline.stage, rank);
    }
}

}  // namespace weft
