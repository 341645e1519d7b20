// SPDX-License-Identifier: Apache-2.0
// The gated epilogue of BF16 and FP16, and the gating function.
#pragma once
#include <weft/device/copy.cuh>
#include <weft/gemm/epilogue.cuh>
#include <weft/gemm/math_warps.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>
#include <weft/gemm/tile_scheduler.cuh>
#include <weft/gemm/wgmma.cuh>

namespace weft {

constexpr u32 gated_staging_rows = 32, gated_staging_pitch = gated_block_n * 2 + 16;
static_assert(gated_staging_rows * gated_staging_pitch <= staging_buffer_bytes);

constexpr float log2_e = 1.44269504f;

// tanh with a relative error of at most 2^-20: (1 - t) / (1 + t) with t = exp(-2 |x|), or a series
// near 0, where 1 - t would lose precision.
WEFT_FN float tanh_fast(float x) {
    const float square = x * x, t = exp2_fast(fabsf(x) * (-2.0f * log2_e));
    float series = __fmaf_rn(square, -17.0f / 315.0f, 2.0f / 15.0f);
    series = __fmaf_rn(square, __fmaf_rn(square, series, -1.0f / 3.0f), 1.0f) * x;
    return fabsf(x) < 0.25f ? series : copysignf((1.0f - t) * reciprocal(1.0f + t), x);
}

// Returns `g * sigmoid(alpha * gate) * (u + offset)` of the clamped gate and up; NaN stays NaN.
// g and u are gate and up or, with SiTU, `beta * tanh(gate / beta)` and
// `linear_beta * tanh(up / linear_beta)`.
template <GemmShape S> WEFT_FN float gate_of(const GemmArgs& a, float gate, float up) {
    gate = min_nan(gate, a.limit);
    up = max_nan(min_nan(up, a.limit), -a.limit);
    const float sigmoid = reciprocal(1.0f + exp2_fast(-(a.alpha * gate) * log2_e));
    if constexpr (S.situ) {
        gate = a.beta * tanh_fast(gate * (1.0f / a.beta));
        const float squashed = tanh_fast(up * (1.0f / a.linear_beta));
        return gate * sigmoid * __fmaf_rn(a.linear_beta, squashed, a.offset);
    }
    return gate * sigmoid * (up + a.offset);
}

// Gates and stores a tile, 32 rows at a time through staging memory. A thread has gate and up of
// its column (mainloop_16bit.cuh). Eight threads store 128 bytes of each row.
template <GemmShape S, u32 N>
WEFT_FN void store_gated_16bit(const GemmArgs& a, GemmShared<S>& smem, const Tile& tile, u32 rank,
                               const float (&sum)[N / 2]) {
    const u32 self = math_thread(), lane = self % warp_lanes, warp = self / warp_lanes;
    const u32 row = self / 8, offset = self % 8 * 16;
    const u32 column = tile.n_block * block_n + rank * gated_block_n + offset / 2;
    sync_math_warps();  // the previous tile's staging memory is free
#pragma unroll
    for (u32 c = 0; c < (N + gated_staging_rows - 1) / gated_staging_rows; ++c) {
        u8* const staging = smem.staging + c % 2 * staging_buffer_bytes;
        u32 pair[4] = {};
#pragma unroll
        for (u32 i = 0; i < 4 && 4 * c + i < N / 8; ++i) {
            const float* const x = &sum[4 * (4 * c + i)];
            pair[i] =
                pack_halves(S.out_dtype, gate_of<S>(a, x[0], x[2]), gate_of<S>(a, x[1], x[3]));
        }
        stmatrix_x4_trans(staging + lane * gated_staging_pitch + warp * 16, pair[0], pair[1],
                          pair[2], pair[3]);
        sync_math_warps();
        const u32 r = c * gated_staging_rows + row;
        if (r < tile.valid_m && column < S.n / 2) {
            const u64 to = u64(tile.first_row + r) * (S.n / 2) + column;
            store(reinterpret_cast<uint4*>(static_cast<u8*>(a.out) + to * 2),
                  *reinterpret_cast<const uint4*>(staging + row * gated_staging_pitch + offset));
        }
    }
}

}  // namespace weft
