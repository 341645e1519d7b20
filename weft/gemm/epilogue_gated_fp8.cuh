// SPDX-License-Identifier: Apache-2.0
// The FP8 epilogue that gates and quantises. A row's 128 gated columns share one scale. In a split
// tile, one warp has all of them. In other tiles each CTA has half of them, so the CTAs exchange
// the largest |x| of each row.
//
// In normal and split tiles, a thread has gate and up of a column. In swapped tiles, one warpgroup
// has the gates and the other the ups of the same columns, with the same assignment to threads.
// Each sends half of its rows to the other and gates the rest. A thread then has rows
// 16 i + 8 warpgroup + 2 (lane % 4) + {0, 1} of the tile, and of its warp's sixteen columns lane /
// 4 (as `gated` 4 i + {0, 1}) and lane / 4 + 8 (as `gated` 4 i + {2, 3}). Within a warpgroup, these
// rows have the indices 8 i + 2 (lane % 4) + {0, 1}.
#pragma once
#include <weft/device/quantize_warp.cuh>
#include <weft/device/tma.cuh>
#include <weft/gemm/epilogue.cuh>
#include <weft/gemm/epilogue_gated.cuh>
#include <weft/gemm/mainloop_fp8.cuh>
#include <weft/gemm/math_warps.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>
#include <weft/gemm/tile_scheduler.cuh>

namespace weft {

// FP8 rows in staging memory: 64 rows per warpgroup, or 16 per warp.
constexpr u32 fp8_staging_rows = 64, fp8_staging_pitch = gated_block_n + 16;
static_assert(fp8_staging_rows * fp8_staging_pitch <= staging_buffer_bytes);
static_assert(16 * fp8_staging_pitch <= staging_bytes);
// Sums for the other warpgroup: two buffers of two float4 per lane.
static_assert(math_warps_per_group * 4 * warp_lanes * sizeof(float4) <= 2 * staging_buffer_bytes);

// Converts a row index within a warpgroup to one within the tile.
WEFT_FN u32 row_in_tile(u32 group, u32 own) { return own / 8 * 16 + group * 8 + own % 8; }

// Exchange of the largest |x| of a tile's rows between the CTAs. Two alternating buffers are
// enough: the other CTA cannot be two exchanges ahead, because it needs this CTA's values first.
template <GemmShape S> struct AmaxExchange {
    GemmShared<S>& smem;
    u32 rank, turn;

    WEFT_FN void expect(u32 rows) {
        if (math_thread() == 0) smem.peer_amax_full[turn % 2].arrive_expect_tx(rows * sizeof(u32));
    }
    WEFT_FN void send(u32 row, u32 bits) {
        store_remote(rank ^ 1, &smem.peer_amax[turn % 2][row], bits, smem.peer_amax_full[turn % 2]);
    }
    WEFT_FN void wait() { smem.peer_amax_full[turn % 2].wait(turn / 2 % 2); }
    WEFT_FN u32 merged(u32 row, u32 bits) { return max(bits, smem.peer_amax[turn % 2][row]); }
};

// Returns the factor of a row's values before the conversion to FP8. For a block with an Inf or a
// NaN it is NaN, so that the whole block becomes NaN. One thread of one CTA stores the scale
// (`keep`). block: of 128 columns, in the row.
template <GemmShape S>
WEFT_FN float inverse_scale(const GemmArgs& a, const Tile& tile, u32 block, u32 row, u32 bits,
                            bool keep) {
    constexpr u32 blocks = (S.gated() ? S.n / 2 : S.n) / scale_block;
    const BlockScale scale = block_scale(bits);
    if (keep && row < tile.valid_m)
        a.out_scales[u64(tile.first_row + row) * blocks + block] = scale.scale;
    return bits >= infinity_bits ? scale.scale : scale.inverse;
}

// Returns the address of a row's columns in one half of a block of 128.
template <GemmShape S>
WEFT_FN u8* fp8_row(const GemmArgs& a, const Tile& tile, u32 block, u32 half, u32 row) {
    constexpr u32 columns = S.gated() ? S.n / 2 : S.n;
    return static_cast<u8*>(a.out) + u64(tile.first_row + row) * columns + block * scale_block +
           half * gated_block_n;
}

// Gates a swapped tile: for every sixteen rows, the two warps with gates and ups of the same
// columns exchange sums. The buffers alternate, so one is written while the other is read.
template <GemmShape S, u32 N>
WEFT_FN void gate_swap_ab(const GemmArgs& a, GemmShared<S>& smem, const float (&sum)[N / 2],
                          float (&gated)[N / 4]) {
    const u32 lane = math_thread() % warp_lanes;
    const u32 warp = math_thread() / warp_lanes % math_warps_per_group;
    const bool up = math_thread() >= warpgroup_threads;
    float4* const buffers = reinterpret_cast<float4*>(smem.staging) + warp * 4 * warp_lanes + lane;
#pragma unroll
    for (u32 i = 0; i < N / 16; ++i) {
        const float *const upper = &sum[8 * i], *const lower = &sum[8 * i + 4];
        const float4 send = up ? float4{upper[0], upper[1], upper[2], upper[3]}
                               : float4{lower[0], lower[1], lower[2], lower[3]};
        float4* const buffer = buffers + i % 2 * 2 * warp_lanes;
        buffer[up * warp_lanes] = send;
        named_barrier(gate_barrier + warp, 2 * warp_lanes);
        const float4 recv = buffer[!up * warp_lanes];
        const float other[4] = {recv.x, recv.y, recv.z, recv.w};
#pragma unroll
        for (u32 c = 0; c < 4; ++c)
            gated[4 * i + c] = gate_of<S>(a, up ? other[c] : upper[c], up ? lower[c] : other[c]);
    }
}

// Writes the largest |x| of each row over this warp's columns to shared memory, as bits.
template <GemmShape S, u32 N>
WEFT_FN void store_warp_amax(GemmShared<S>& smem, const float (&gated)[N / 4]) {
    const u32 warp = math_thread() / warp_lanes, lane = math_thread() % warp_lanes;
#pragma unroll
    for (u32 i = 0; i < N / 16; ++i)
#pragma unroll
        for (u32 t = 0; t < 2; ++t) {
            u32 bits = max(__float_as_uint(gated[4 * i + t]) & 0x7fffffffu,
                           __float_as_uint(gated[4 * i + 2 + t]) & 0x7fffffffu);
#pragma unroll
            for (u32 step = 4; step < warp_lanes; step *= 2)
                bits = max(bits, __shfl_xor_sync(all_lanes, bits, step));
            if (lane < 4) smem.amax[warp][8 * i + 2 * lane + t] = bits;
        }
}

// Returns the largest |x| of one row of a swapped tile over this CTA's columns, as bits.
template <GemmShape S> WEFT_FN u32 row_amax(const GemmShared<S>& smem, u32 row) {
    const u32 first = row / 8 % 2 * math_warps_per_group;
    u32 bits = 0;
#pragma unroll
    for (u32 w = 0; w < math_warps_per_group; ++w)
        bits = max(bits, smem.amax[first + w][row / 16 * 8 + row % 8]);
    return bits;
}

// Stores a warpgroup's rows as FP8 through its own buffer. Four lanes store 64 bytes of each row.
template <GemmShape S, u32 N>
WEFT_FN void store_fp8_swap_ab(const GemmArgs& a, GemmShared<S>& smem, const Tile& tile, u32 rank,
                               const float (&gated)[N / 4]) {
    const u32 self = math_thread() % warpgroup_threads, group = math_warpgroup();
    const u32 lane = self % warp_lanes, column = self / warp_lanes * 16 + lane / 4;
    u8* const staging = smem.staging + group * staging_buffer_bytes;
#pragma unroll
    for (u32 first = 0; first < N / 2; first += fp8_staging_rows) {
        if (first != 0) named_barrier(warpgroup_barrier + group, warpgroup_threads);
#pragma unroll
        for (u32 i = first / 8; i < (first + fp8_staging_rows) / 8 && i < N / 16; ++i)
#pragma unroll
            for (u32 c = 0; c < 4; ++c) {
                const u32 own = 8 * i + 2 * (lane % 4) + c % 2;
                const float by = smem.inverse_scales[row_in_tile(group, own)];
                staging[(own - first) * fp8_staging_pitch + column + c / 2 * 8] =
                    u8(pack_e4m3(__fmul_rn(gated[4 * i + c], by), 0.0f));
            }
        named_barrier(warpgroup_barrier + group, warpgroup_threads);
#pragma unroll
        for (u32 own = first + self / 4; own < first + fp8_staging_rows;
             own += warpgroup_threads / 4) {
            const u32 row = row_in_tile(group, own), offset = self % 4 * 16;
            if (own < N / 2 && row < tile.valid_m)
                *reinterpret_cast<uint4*>(fp8_row<S>(a, tile, tile.n_block, rank, row) + offset) =
                    *reinterpret_cast<const uint4*>(staging + (own - first) * fp8_staging_pitch +
                                                    offset);
        }
    }
}

// Gates a swapped tile, computes the scales together with the other CTA, and stores FP8.
template <GemmShape S, u32 N>
WEFT_FN void store_gated_fp8_swap_ab(const GemmArgs& a, GemmShared<S>& smem, const Tile& tile,
                                     u32 rank, const float (&sum)[N / 2], u32& exchanges) {
    const u32 row = math_thread();
    AmaxExchange<S> exchange{smem, rank, exchanges++};
    float gated[N / 4];
    sync_math_warps();  // the previous tile's staging memory and exchange buffer are free
    exchange.expect(tile.m);
    gate_swap_ab<S, N>(a, smem, sum, gated);
    store_warp_amax<S, N>(smem, gated);
    sync_math_warps();
    const u32 bits = row < N ? row_amax(smem, row) : 0;
    if (row < N) exchange.send(row, bits);
    exchange.wait();
    if (row < N)
        smem.inverse_scales[row] =
            inverse_scale<S>(a, tile, tile.n_block, row, exchange.merged(row, bits), rank == 0);
    sync_math_warps();
    store_fp8_swap_ab<S, N>(a, smem, tile, rank, gated);
}

// Gates this thread's two rows of 64 columns of a normal tile, and updates `amax` with the largest
// |x| of each row. Pairs of sums alternate between row 0 and row 1.
template <GemmShape S>
WEFT_FN void gate_normal(const GemmArgs& a, const float* gates, const float* ups,
                         float (&gated)[normal_sums / 2], float (&amax)[2]) {
#pragma unroll
    for (u32 i = 0; i < normal_sums / 2; ++i) {
        gated[i] = gate_of<S>(a, gates[i], ups[i]);
        amax[i / 2 % 2] = max_nan(amax[i / 2 % 2], fabsf(gated[i]));
    }
}

// Returns the maximum over the four lanes that share a row, as bits.
WEFT_FN u32 row_amax_normal(float amax) {
#pragma unroll
    for (u32 step = 1; step < 4; step *= 2)
        amax = max_nan(amax, __shfl_xor_sync(all_lanes, amax, step));
    return __float_as_uint(amax);
}

// Stores sixteen rows of half of a block's columns as FP8 through the warp's own staging memory.
// Four lanes store 64 bytes of each row. first_row: this CTA's first row in the tile.
template <GemmShape S>
WEFT_FN void store_fp8_normal(const GemmArgs& a, GemmShared<S>& smem, const Tile& tile, u32 block,
                              u32 half, const float* values, const float (&inverse)[2],
                              u32 first_row) {
    const u32 lane = math_thread() % warp_lanes, offset = lane % 4 * 16;
    const u32 first = first_row + normal_row();
    u8* const staging = smem.staging + math_thread() / warp_lanes * staging_bytes;
#pragma unroll
    for (u32 j = 0; j < normal_sums / 8; ++j)
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const float* const x = &values[4 * j + 2 * i];
            *reinterpret_cast<u16*>(staging + (lane / 4 + 8 * i) * fp8_staging_pitch + 8 * j +
                                    lane % 4 * 2) =
                u16(pack_e4m3(__fmul_rn(x[0], inverse[i]), __fmul_rn(x[1], inverse[i])));
        }
    __syncwarp();
#pragma unroll
    for (u32 r = lane / 4; r < 16; r += 8)
        if (first + r < tile.valid_m)
            *reinterpret_cast<uint4*>(fp8_row<S>(a, tile, block, half, first + r) + offset) =
                *reinterpret_cast<const uint4*>(staging + r * fp8_staging_pitch + offset);
}

template <GemmShape S>
WEFT_FN void store_gated_fp8_normal(const GemmArgs& a, GemmShared<S>& smem, const Tile& tile,
                                    u32 rank, const float (&sum)[normal_sums], u32& exchanges) {
    const u32 lane = math_thread() % warp_lanes, first = normal_row() + lane / 4;
    AmaxExchange<S> exchange{smem, rank, exchanges++};
    float gated[normal_sums / 2], amax[2] = {}, inverse[2];
    u32 bits[2];
    sync_math_warps();  // the previous tile's staging memory and exchange buffer are free
    exchange.expect(normal_m);
    gate_normal<S>(a, sum, sum + normal_sums / 2, gated, amax);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        bits[i] = row_amax_normal(amax[i]);
        if (lane % 4 == 0) exchange.send(first + 8 * i, bits[i]);
    }
    exchange.wait();
#pragma unroll
    for (u32 i = 0; i < 2; ++i)
        inverse[i] =
            inverse_scale<S>(a, tile, tile.n_block, first + 8 * i,
                             exchange.merged(first + 8 * i, bits[i]), rank == 0 && lane % 4 == 0);
    store_fp8_normal(a, smem, tile, tile.n_block, rank, gated, inverse, 0);
}

// Gates, quantises and stores a split tile, where a warp has all columns of its rows.
template <GemmShape S>
WEFT_FN void store_gated_fp8_split(const GemmArgs& a, GemmShared<S>& smem, const Tile& tile,
                                   u32 first_row, const float (&sum)[2][normal_sums]) {
    const u32 lane = math_thread() % warp_lanes, first = first_row + normal_row() + lane / 4;
    float gated[2][normal_sums / 2], amax[2] = {}, inverse[2];
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        constexpr u32 columns = normal_sums / 2;
        gate_normal<S>(a, sum[0] + half * columns, sum[1] + half * columns, gated[half], amax);
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i)
        inverse[i] = inverse_scale<S>(a, tile, tile.n_block, first + 8 * i,
                                      row_amax_normal(amax[i]), lane % 4 == 0);
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        if (half != 0) __syncwarp();  // the staging memory of the first half has been read
        store_fp8_normal(a, smem, tile, tile.n_block, half, gated[half], inverse, first_row);
    }
}

}  // namespace weft
