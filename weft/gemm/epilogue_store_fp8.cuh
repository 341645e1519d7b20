// SPDX-License-Identifier: Apache-2.0
// The FP8 epilogue that quantises without gating. The 128 columns of a CTA, or of each of its two
// blocks of weights, share one scale per row, so the CTAs exchange nothing.
#pragma once
#include <weft/device/quantize_warp.cuh>
#include <weft/gemm/epilogue.cuh>
#include <weft/gemm/epilogue_gated_fp8.cuh>
#include <weft/gemm/mainloop_fp8.cuh>
#include <weft/gemm/math_warps.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>
#include <weft/gemm/tile_scheduler.cuh>

namespace weft {

constexpr u32 wide_staging_rows = 32, wide_staging_pitch = block_n + 16;
static_assert(wide_staging_rows * wide_staging_pitch <= staging_buffer_bytes);
// The largest |x| of each row per warp, in both staging buffers.
static_assert(math_warps * max_swap_ab_m * sizeof(u32) <= 2 * staging_buffer_bytes);

// Quantises and stores a swapped tile, 32 rows at a time through staging memory. Eight threads
// store 128 bytes of each row.
template <GemmShape S, u32 N>
WEFT_FN void quantize_swap_ab(const GemmArgs& a, GemmShared<S>& smem, const Tile& tile, u32 rank,
                              const float (&sum)[N / 2]) {
    const u32 self = math_thread(), lane = self % warp_lanes, warp = self / warp_lanes;
    const u32 block = tile.n_block * 2 + rank, column = warp * 16 + lane / 4;
    const bool exists = S.n % cluster_n == 0 || block < S.n / block_n;
    u32* const amax = reinterpret_cast<u32*>(smem.staging);  // [math_warps][N]
    sync_math_warps();  // the previous tile's staging memory and scales are free
#pragma unroll
    for (u32 j = 0; j < N / 8; ++j)
#pragma unroll
        for (u32 t = 0; t < 2; ++t) {
            u32 bits = max(__float_as_uint(sum[4 * j + t]) & 0x7fffffffu,
                           __float_as_uint(sum[4 * j + 2 + t]) & 0x7fffffffu);
#pragma unroll
            for (u32 step = 4; step < warp_lanes; step *= 2)
                bits = max(bits, __shfl_xor_sync(all_lanes, bits, step));
            if (lane < 4) amax[warp * N + 8 * j + 2 * lane + t] = bits;
        }
    sync_math_warps();
    if (self < N) {
        u32 bits = 0;
#pragma unroll
        for (u32 w = 0; w < math_warps; ++w) bits = max(bits, amax[w * N + self]);
        smem.inverse_scales[self] = inverse_scale<S>(a, tile, block, self, bits, exists);
    }
    sync_math_warps();
#pragma unroll
    for (u32 c = 0; c < (N + wide_staging_rows - 1) / wide_staging_rows; ++c) {
        const u32 first = c * wide_staging_rows, row = first + self / 8, offset = self % 8 * 16;
        u8* const staging = smem.staging + c % 2 * staging_buffer_bytes;
#pragma unroll
        for (u32 j = first / 8; j < first / 8 + wide_staging_rows / 8 && j < N / 8; ++j)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const u32 own = 8 * j + 2 * (lane % 4) + i % 2;
                staging[(own - first) * wide_staging_pitch + column + i / 2 * 8] =
                    u8(pack_e4m3(__fmul_rn(sum[4 * j + i], smem.inverse_scales[own]), 0.0f));
            }
        sync_math_warps();
        if (row < tile.valid_m && exists)
            *reinterpret_cast<uint4*>(fp8_row<S>(a, tile, block, 0, row) + offset) =
                *reinterpret_cast<const uint4*>(staging + (row - first) * wide_staging_pitch +
                                                offset);
    }
}

// Quantises and stores 128 rows by one block of weights. first_row: this CTA's first row in the
// tile.
template <GemmShape S>
WEFT_FN void quantize_normal(const GemmArgs& a, GemmShared<S>& smem, const Tile& tile, u32 block,
                             const float (&sum)[normal_sums], u32 first_row) {
    const u32 lane = math_thread() % warp_lanes, first = first_row + normal_row() + lane / 4;
    const u32 row_block = tile.n_block * 2 + block;
    float amax[2] = {}, inverse[2];
#pragma unroll
    for (u32 i = 0; i < normal_sums; ++i) amax[i / 2 % 2] = max_nan(amax[i / 2 % 2], fabsf(sum[i]));
#pragma unroll
    for (u32 i = 0; i < 2; ++i)
        inverse[i] = inverse_scale<S>(a, tile, row_block, first + 8 * i, row_amax_normal(amax[i]),
                                      lane % 4 == 0);
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        __syncwarp();  // the warp's staging memory has been read
        store_fp8_normal(a, smem, tile, row_block, half, sum + half * (normal_sums / 2), inverse,
                         first_row);
    }
}

}  // namespace weft
