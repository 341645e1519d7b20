// SPDX-License-Identifier: Apache-2.0
// Epilogues that store sums without gating, after an activation or not: to the result or (push) to
// each row's own address.
#pragma once
#include <weft/device/copy.cuh>
#include <weft/gemm/mainloop_fp8.cuh>
#include <weft/gemm/math_warps.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>
#include <weft/gemm/tile_scheduler.cuh>

namespace weft {

// Sums pass through staging memory, so that rows are stored in vectors of 16 bytes. Pitches are in
// bytes; a padding of 16 bytes per row avoids bank conflicts.
constexpr u32 staging_buffer_bytes = math_warps * staging_bytes / 2;  // one of two, for all warps
constexpr u32 swap_staging_rows = 16, swap_staging_pitch = block_n * 2 + 16;
constexpr u32 half_row_bytes = block_n / 2 * 2, half_row_pitch = half_row_bytes + 16;
static_assert(swap_staging_rows * swap_staging_pitch <= staging_buffer_bytes);
static_assert(8 * half_row_pitch <= staging_bytes);

// The bias of a thread's two columns of a 16-bit tile. It is loaded before the mainloop, which
// hides the latency.
template <GemmShape S> struct BiasColumns {
    float bias[2] = {};

    WEFT_FN static float load(const GemmArgs& a, u32 expert, u32 column) {
        if (column >= S.n) return 0.0f;
        const u64 at = u64(expert) * S.n + column;
        if constexpr (S.bias == Bias::fp32) return static_cast<const float*>(a.bias)[at];
        constexpr DType dtype = S.bias == Bias::bf16 ? DType::bf16 : DType::fp16;
        return low_half(dtype, static_cast<const u16*>(a.bias)[at]);
    }
    WEFT_FN BiasColumns(const GemmArgs& a, const Tile& tile, u32 rank) {
        if constexpr (S.bias != Bias::none) {
            const u32 warp = math_thread() / warp_lanes, lane = math_thread() % warp_lanes;
            constexpr u32 width = S.gated() ? 8 : 16;  // columns of the result per warp
            const u32 first = (tile.n_block * 2 + rank) * (width * math_warps);
            const u32 column = first + warp * width + lane / 4;
            bias[0] = load(a, tile.expert, column);
            bias[1] = load(a, tile.expert, column + (S.gated() ? S.n / 2 : 8));
        }
    }
    template <u32 sums> WEFT_FN void add_to(float (&sum)[sums]) const {
        if constexpr (S.bias != Bias::none)
#pragma unroll
            for (u32 i = 0; i < sums; ++i) sum[i] += bias[i / 2 % 2];
    }
};

// Applies the activation to a thread's sums; NaN stays NaN.
template <GemmShape S, u32 sums> WEFT_FN void activate(float (&sum)[sums]) {
    if constexpr (S.relu2)
#pragma unroll
        for (u32 i = 0; i < sums; ++i) {
            const float positive = max_nan(sum[i], 0.0f);
            sum[i] = __fmul_rn(positive, positive);
        }
}

// Loads the destination of the row with this thread's index. It is called before the mainloop,
// which hides the latency.
template <GemmShape S> WEFT_FN u64 load_dst_addr(const GemmArgs& a, const Tile& tile) {
    const u32 row = math_thread();
    if (S.epilogue != Epilogue::push || row >= tile.valid_m) return 0;
    const u64 dst_addr = a.dst_addr[tile.first_row + row];
    return a.abort_flag != nullptr && *a.abort_flag != 0 ? 0 : dst_addr;
}

// Shares every row's destination with all math threads. After the barrier, the staging memory of
// the previous tile is free.
template <GemmShape S>
WEFT_FN void share_dst_addrs(GemmShared<S>& smem, const Tile& tile, u64 dst_addr) {
    sync_math_warps();
    if constexpr (S.epilogue == Epilogue::push) {
        if (math_thread() < tile.m) smem.dst_addrs[math_thread()] = dst_addr;
        sync_math_warps();
    }
}

// Stores sixteen bytes of a result row. With flag-in-data, no word may be the sentinel (all ones);
// the values come from conversions whose only NaN is 0x7fff.
template <GemmShape S> WEFT_FN void store_vector(u64 to, const u8* from) {
    uint4* const at = reinterpret_cast<uint4*>(to);
    if constexpr (S.flag_in_data)
        post_vector(at, *reinterpret_cast<const uint4*>(from));
    else
        store(at, *reinterpret_cast<const uint4*>(from));
}

// Returns the address of a row's columns for one of the tile's two blocks of weights; 0 for a row
// without a destination.
template <GemmShape S>
WEFT_FN u64 row_address(const GemmArgs& a, const GemmShared<S>& smem, const Tile& tile, u32 block,
                        u32 row) {
    const u32 column = tile.n_block * cluster_n + block * block_n;
    if constexpr (S.epilogue == Epilogue::push)
        return smem.dst_addrs[row] == 0 ? 0 : smem.dst_addrs[row] + column * 2;
    else
        return reinterpret_cast<u64>(a.out) + (u64(tile.first_row + row) * S.n + column) * 2;
}

// Stores a swapped tile, sixteen rows at a time through staging memory. Sixteen threads store 256
// bytes of each row.
template <GemmShape S, u32 N>
WEFT_FN void store_swap_ab(const GemmArgs& a, GemmShared<S>& smem, const Tile& tile, u32 rank,
                           const float (&sum)[N / 2], u64 dst_addr) {
    const u32 self = math_thread(), lane = self % warp_lanes, warp = self / warp_lanes;
    const u32 at =
        (lane / 16 * 8 + lane % 8) * swap_staging_pitch + (warp * 16 + lane / 8 % 2 * 8) * 2;
    const u32 row = self / 16, offset = self % 16 * 16;
    const u32 column = tile.n_block * cluster_n + rank * block_n + offset / 2;
    const bool exists = S.n % cluster_n == 0 || column < S.n;
    share_dst_addrs(smem, tile, dst_addr);
#pragma unroll
    for (u32 c = 0; c < N / swap_staging_rows; ++c) {
        const float* const x = &sum[c * swap_staging_rows / 2];
        u8* const staging = smem.staging + c % 2 * staging_buffer_bytes;
        stmatrix_x4_trans(staging + at, pack_halves(S.out_dtype, x[0], x[1]),
                          pack_halves(S.out_dtype, x[2], x[3]),
                          pack_halves(S.out_dtype, x[4], x[5]),
                          pack_halves(S.out_dtype, x[6], x[7]));
        sync_math_warps();
        const u32 r = c * swap_staging_rows + row;
        const u64 to = r < tile.valid_m && exists ? row_address(a, smem, tile, rank, r) : 0;
        if (to != 0) store_vector<S>(to + offset, staging + row * swap_staging_pitch + offset);
    }
}

// Stores 128 rows by one block of weights, eight rows by 64 columns at a time through the warp's
// own staging memory. Eight lanes store 128 bytes of each row. first_row: this CTA's first row in
// the tile.
template <GemmShape S>
WEFT_FN void store_normal(const GemmArgs& a, GemmShared<S>& smem, const Tile& tile, u32 block,
                          const float (&sum)[normal_sums], u32 first_row) {
    const u32 lane = math_thread() % warp_lanes, offset = lane % 8 * 16;
    u8* const staging = smem.staging + math_thread() / warp_lanes * staging_bytes;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 lower = i / 2, right = i % 2, row = first_row + normal_row() + lower * 8;
        const float* const x = &sum[right * (normal_sums / 2) + lower * 2];
#pragma unroll
        for (u32 j = 0; j < 2; ++j)
            stmatrix_x4(staging + lane % 8 * half_row_pitch + j * 64 + lane / 8 * 16,
                        pack_halves(S.out_dtype, x[16 * j], x[16 * j + 1]),
                        pack_halves(S.out_dtype, x[16 * j + 4], x[16 * j + 5]),
                        pack_halves(S.out_dtype, x[16 * j + 8], x[16 * j + 9]),
                        pack_halves(S.out_dtype, x[16 * j + 12], x[16 * j + 13]));
        __syncwarp();
#pragma unroll
        for (u32 r = lane / 8; r < 8; r += 4) {
            const u64 to = row + r < tile.valid_m ? row_address(a, smem, tile, block, row + r) : 0;
            if (to != 0)
                store_vector<S>(to + right * half_row_bytes + offset,
                                staging + r * half_row_pitch + offset);
        }
        __syncwarp();
    }
}

}  // namespace weft
