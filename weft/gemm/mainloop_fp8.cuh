// SPDX-License-Identifier: Apache-2.0
// FP8 mainloops: each k block's product is scaled and added to the tile's sums in fp32.
//
// Swapped (A and B swapped): weights are wgmma's A operand, rows its B operand, which may be
// narrow: N is the number of rows, rounded up to a multiple of 16. Each warpgroup has half of the
// columns. For rows 8 j + 2 (lane % 4) + {0, 1}, a thread holds two of its warp's sixteen columns:
// column lane / 4 in sums 4 j and 4 j + 1, column lane / 4 + 8 in sums 4 j + 2 and 4 j + 3. It
// needs a quarter of all scales.
//
// Normal, for tiles of normal_m rows: rows are the A operand, 64 per warpgroup. Of its warp's
// sixteen rows, a thread holds row lane / 4, with columns 8 j + 2 (lane % 4) + {0, 1} in sums 4 j
// and 4 j + 1, and row lane / 4 + 8, with the same columns in sums 4 j + 2 and 4 j + 3. It needs
// two scales, which leaves the bandwidth of shared memory to the tensor cores.
//
// Split, for tiles of 256 rows by 256 weight rows: each CTA of the cluster has 128 rows and all
// weights, of which each CTA loads half for both. A thread has the sums of two blocks of 128 weight
// rows, each as in a normal tile. A warp has all columns of its rows, so quantisation needs no
// exchange. A wide tile of up to 128 rows by 512 weight rows is the same to a CTA: it has all rows
// and 256 weight rows.
#pragma once
#include <weft/gemm/math_warps.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>
#include <weft/gemm/wgmma.cuh>

namespace weft {

constexpr u32 normal_sums = block_n / 2;  // per thread of a normal tile
constexpr u32 scales_read_ahead = 3;      // float4s that a thread reads while wgmma runs

// One k block of a swapped tile of N rows.
template <GemmShape S, u32 N, u32 most_ahead = scales_read_ahead> struct SwapAbKBlock {
    static constexpr u32 vectors = (N + 15) / 16;  // of four scales
    static constexpr u32 ahead = vectors < most_ahead ? vectors : most_ahead;
    float acc[N / 2];
    float4 first[ahead];
    const float4* scales;

    WEFT_FN void issue(u32 weights, u32 rows) {
        issue_k_block<S.operand, N>(acc, weights, rows, false);
    }
    // first_row: the block's first row in the tile.
    WEFT_FN void read_scales(const Operands<S>& operands, const GemmShared<S>& smem, u32 stage,
                             u32 first_row = 0) {
        scales = reinterpret_cast<const float4*>(smem.scales[stage].rows[0] + first_row +
                                                 operands.swap_scales);
#pragma unroll
        for (u32 j = 0; j < ahead; ++j) first[j] = scales[4 * j];
    }
    // Computes `sum += acc * scale`, rounded once; sum is `[N / 2]`.
    template <u32 pending> WEFT_FN void promote(float* sum) {
        wait_accumulator<pending>(acc);
#pragma unroll
        for (u32 j = 0; j < vectors; ++j) {
            const float4 scale = j < ahead ? first[j] : scales[4 * j];
            const float by[4] = {scale.x, scale.y, scale.z, scale.w};
#pragma unroll
            for (u32 i = 0; i < 8 && 8 * j + i < N / 2; ++i)
                sum[8 * j + i] = __fmaf_rn(acc[8 * j + i], by[i / 4 * 2 + i % 2], sum[8 * j + i]);
        }
    }
};

// The scales of a thread's two rows of a normal tile, for gate and for up columns.
template <GemmShape S> struct NormalScales {
    float by[2][2];

    WEFT_FN void read(const Operands<S>& operands, const GemmShared<S>& smem, u32 stage) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            by[i / 2][i % 2] =
                smem.scales[stage].rows[S.gated() ? i / 2 : 0][operands.normal_scales[i % 2]];
    }
    // Reads the scales for one block of weights of a split tile.
    WEFT_FN void read_split(const Operands<S>& operands, const GemmShared<S>& smem, u32 stage,
                            u32 block) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i)
            by[0][i] = by[1][i] = smem.scales[stage].rows[block][operands.normal_scales[i]];
    }
};

// One k block of 64 rows by one block of weights.
template <GemmShape S> struct NormalKBlock {
    float acc[normal_sums];

    WEFT_FN void issue(u32 rows, u32 weights) {
        issue_k_block<S.operand, block_n>(acc, rows, weights, false);
    }
    template <u32 pending>
    WEFT_FN void promote(float (&sum)[normal_sums], const NormalScales<S>& scales) {
        wait_accumulator<pending>(acc);
        add_to(sum, scales);
    }
    WEFT_FN void add_to(float (&sum)[normal_sums], const NormalScales<S>& scales) const {
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
        block.issue(operands.swap_a + descriptor_offset<S>(pipeline.stage),
                    operands.swap_b + descriptor_offset<S>(pipeline.stage));
        block.read_scales(operands, smem, pipeline.stage);
        block.template promote<0>(sum);
        release_stage(smem, pipeline.stage, rank);
    }
}

// Takes two k blocks at a time: adds the first while the tensor cores multiply the second.
template <GemmShape S>
WEFT_FN void mainloop_normal(GemmShared<S>& smem, PipelineState<S.stages>& pipeline,
                             const Operands<S>& operands, u32 rank, float (&sum)[normal_sums]) {
    const auto issue = [&](NormalKBlock<S>& block) {
        const u32 offset = descriptor_offset<S>(pipeline.stage);
        smem.full[pipeline.stage].wait(pipeline.parity);
        block.issue(operands.normal_a + offset, operands.normal_b + offset);
    };
    NormalScales<S> scales;
    u32 k = 0;
#pragma unroll 1
    for (; k + 1 < S.k_blocks(); k += 2, pipeline.advance()) {
        NormalKBlock<S> one, two;
        const u32 stage = pipeline.stage;
        issue(one);
        pipeline.advance();
        issue(two);
        scales.read(operands, smem, stage);
        one.template promote<1>(sum, scales);
        release_stage(smem, stage, rank);
        scales.read(operands, smem, pipeline.stage);
        two.template promote<0>(sum, scales);
        release_stage(smem, pipeline.stage, rank);
    }
    if (k == S.k_blocks()) return;
    NormalKBlock<S> last;
    issue(last);
    scales.read(operands, smem, pipeline.stage);
    last.template promote<0>(sum, scales);
    release_stage(smem, pipeline.stage, rank);
    pipeline.advance();
}

// The first stage of a tile: a constant if all tiles pass through whole rings.
template <GemmShape S> WEFT_FN u32 first_stage(const PipelineState<S.stages>& pipeline) {
    return S.has_whole_rings() ? 0 : pipeline.stage;
}

// Calls visit(stage, parity) for every k block of a tile. The loop is unrolled over the ring, so
// that addresses of stages are constants.
template <GemmShape S, class Visit>
WEFT_FN void for_stages(PipelineState<S.stages>& pipeline, const Visit& visit) {
    constexpr bool whole_rings = S.has_whole_rings();
    u32 first = first_stage<S>(pipeline), parity = pipeline.parity;
#pragma unroll 1
    for (u32 k = 0; k < S.k_blocks(); first = 0, parity ^= 1) {
#pragma unroll
        for (u32 stage = 0; stage < S.stages; ++stage) {
            if (!whole_rings && (stage < first || k == S.k_blocks())) continue;
            ++k;
            visit(stage, parity);
        }
    }
    pipeline.advance_by(S.k_blocks());
}

// The sums leave no registers for two products in flight, so the tensor cores work for the other
// warpgroup while this one adds. To give the tensor cores the next product soon, the loop is
// unrolled and tests the next stage's mbarrier before the last additions: 5 % less time (H200, 1024
// rows an expert, 2026-11-28). A warpgroup with only padding rows multiplies nothing.
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
    const u32 rows = warp_uniform(operands.split_a), weights = warp_uniform(operands.normal_b);
    bool complete = smem.full[first_stage<S>(pipeline)].is_complete(pipeline.parity);
    for_stages<S>(pipeline, [&](u32 stage, u32 parity) {
        NormalKBlock<S> product;
        NormalScales<S> scales[2];
        const u32 offset = descriptor_offset<S>(stage), next = (stage + 1) % S.stages;
        if (!complete) smem.full[stage].wait(parity);
        product.issue(rows + offset, weights + offset);
#pragma unroll
        for (u32 block = 0; block < 2; ++block)
            scales[block].read_split(operands, smem, stage, block);
        product.template promote<0>(sum[0], scales[0]);
        product.issue(rows + offset, weights + offset + weight_tile_bytes / 16);
        wait_accumulator<0>(product.acc);
        release_stage(smem, stage, rank);
        complete = smem.full[next].is_complete(next == 0 ? parity ^ 1 : parity);
        product.add_to(sum[1], scales[1]);
    });
}

}  // namespace weft
