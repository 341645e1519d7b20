// Tiles of up to 96 rows. Weights are the first operand, rows the second, which may be narrow: a
// tile has as many rows as its expert, to a multiple of 16.
//
// A thread holds, for rows 8 j + 2 (lane % 4) + {0, 1} of the tile, two columns: sums 4 j and
// 4 j + 1 of column lane / 4 of its warp, 4 j + 2 and 4 j + 3 of the column eight further on. Where
// gating is wanted, weights were loaded so that those are a gate and its up.
#pragma once
#include <weft/kernels/product_finish.cuh>

namespace weft {

constexpr u32 chunk_rows = 16, chunk_pitch = pair_columns + 16;  // bytes; rows of two-byte numbers
constexpr u32 wide_chunk_rows = 64, wide_chunk_pitch = tile_columns / 2 + 16;  // and of FP8
constexpr u32 narrow_chunk = weight_warps * chunk_bytes / 2;                   // there are two
static_assert(chunk_rows * chunk_pitch <= narrow_chunk);
static_assert(wide_chunk_rows * wide_chunk_pitch <= narrow_chunk);

// `sum += part * (scale of row * scale of weights)`, rounded once each. To multiply twice is
// cheaper than to load two scales a row: shared memory is busiest.
template <Product P, u32 N>
WEFT_FN void add_narrow(float (&sum)[N / 2], const float (&part)[N / 2],
                        const StepScales<P>& scales) {
    const float4* const rows = reinterpret_cast<const float4*>(scales.rows) + threadIdx.x % 4;
    const float first = scales.weights[0], second = scales.weights[P.gated() ? 1 : 0];
#pragma unroll
    for (u32 j = 0; j < N / 16; ++j) {
        const float4 row = rows[4 * j];
        const float by[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const float scale = __fmul_rn(by[i / 4 * 2 + i % 2], i % 4 < 2 ? first : second);
            sum[8 * j + i] = __fmaf_rn(part[8 * j + i], scale, sum[8 * j + i]);
        }
    }
}

// Sixteen rows at a time through shared memory, then 256 bytes of each row by sixteen threads.
template <Product P, u32 N>
WEFT_FN void finish_narrow_rows(const ProductArgs& a, ProductShared<P>& s, const Tile& tile,
                                u32 rank, const float (&sum)[N / 2], u64 home) {
    const u32 self = multiplier(), lane = self % warp_lanes, warp = self / warp_lanes;
    const u32 at = (lane / 16 * 8 + lane % 8) * chunk_pitch + (warp * 16 + lane / 8 % 2 * 8) * 2;
    const u32 row = self / 16, place = self % 16 * 16;
    share_homes(s, tile, home);
#pragma unroll
    for (u32 c = 0; c < N / chunk_rows; ++c) {
        const float* const x = &sum[c * chunk_rows / 2];
        u8* const chunk = s.chunk + c % 2 * narrow_chunk;
        store_transposed(chunk + at, pack_halves(P.number, x[0], x[1]),
                         pack_halves(P.number, x[2], x[3]), pack_halves(P.number, x[4], x[5]),
                         pack_halves(P.number, x[6], x[7]));
        meet_multipliers();
        const u32 r = c * chunk_rows + row;
        const u64 to = r < tile.live ? place_of(a, s, tile, rank, r) : 0;
        if (to != 0)
            store(reinterpret_cast<uint4*>(to + place),
                  *reinterpret_cast<const uint4*>(chunk + row * chunk_pitch + place));
    }
}

// The largest |x| of each row over this warp's columns, as bits, for everyone to see.
template <Product P, u32 N> WEFT_FN void note_amax(ProductShared<P>& s, const float (&sum)[N / 2]) {
    const u32 warp = multiplier() / warp_lanes, lane = multiplier() % warp_lanes;
#pragma unroll
    for (u32 j = 0; j < N / 8; ++j)
#pragma unroll
        for (u32 t = 0; t < 2; ++t) {
            u32 bits = __float_as_uint(sum[4 * j + t]) & 0x7fffffffu;
#pragma unroll
            for (u32 step = 4; step < warp_lanes; step *= 2)
                bits = max(bits, __shfl_xor_sync(all_lanes, bits, step));
            if (lane < 4) s.amax[warp][8 * j + 2 * lane + t] = bits;
        }
}

// Rows' scales from all 128 columns, half of which the neighbour has; their inverses are kept.
// Tile after tile takes the other half of what is exchanged: a neighbour is never two tiles ahead,
// since it needs this tile's amax from here before its next.
template <Product P, u32 N>
WEFT_FN void exchange_amax(const ProductArgs& a, ProductShared<P>& s, const Tile& tile, u32 rank,
                           u32 turn) {
    const u32 self = multiplier(), half = turn % 2;
    u32 bits = 0;
    if (self < N) {
#pragma unroll
        for (u32 w = 0; w < weight_warps; ++w) bits = max(bits, s.amax[w][self]);
        send_word(rank ^ 1, &s.amax_there[half][self], bits, s.amax_told[half]);
    }
    if (self == 0) s.amax_told[half].expect(N * sizeof(u32));
    s.amax_told[half].await(turn / 2 % 2);
    if (self < N)
        s.inverse[self] =
            settle_scale<P>(a, tile, self, max(bits, s.amax_there[half][self]), rank == 0);
}

// Gated in place, scaled by what both CTAs have seen, and stored as FP8.
template <Product P, u32 N>
WEFT_FN void finish_narrow_gated(const ProductArgs& a, ProductShared<P>& s, const Tile& tile,
                                 u32 rank, float (&sum)[N / 2], u32 turn) {
    const u32 self = multiplier(), lane = self % warp_lanes, warp = self / warp_lanes;
#pragma unroll
    for (u32 j = 0; j < N / 8; ++j)
#pragma unroll
        for (u32 t = 0; t < 2; ++t) sum[4 * j + t] = gate_of(a, sum[4 * j + t], sum[4 * j + 2 + t]);
    note_amax<P, N>(s, sum);
    meet_multipliers();
    exchange_amax<P, N>(a, s, tile, rank, turn);
    meet_multipliers();
#pragma unroll
    for (u32 first = 0; first < N; first += wide_chunk_rows) {
        u8* const chunk = s.chunk + first / wide_chunk_rows % 2 * narrow_chunk;
#pragma unroll
        for (u32 j = first / 8; j < (first + wide_chunk_rows) / 8 && j < N / 8; ++j)
#pragma unroll
            for (u32 t = 0; t < 2; ++t) {
                const u32 r = 8 * j + 2 * (lane % 4) + t;
                chunk[(r - first) * wide_chunk_pitch + warp * 8 + lane / 4] =
                    u8(pack_e4m3(__fmul_rn(sum[4 * j + t], s.inverse[r]), 0.0f));
            }
        meet_multipliers();
        const u32 r = first + self / 4, place = self % 4 * 16;
        if (r < tile.live)
            *reinterpret_cast<uint4*>(gated_place<P>(a, tile, rank, r) + place) =
                *reinterpret_cast<const uint4*>(chunk + self / 4 * wide_chunk_pitch + place);
    }
}

// A tile of N rows; those of fewer go to the next narrower form.
template <Product P, u32 N>
WEFT_FN void make_narrow(const ProductArgs& a, ProductShared<P>& s, u8* stages,
                         Ring<P.stages>& ring, const Tile& tile, u32 rank, u32 turn) {
    if constexpr (N > row_step) {
        if (tile.rows < N) {
            make_narrow<P, N - row_step>(a, s, stages, ring, tile, rank, turn);
            return;
        }
    }
    float sum[N / 2];
#pragma unroll
    for (u32 i = 0; i < N / 2; ++i) sum[i] = 0.0f;
    const u64 home = load_home<P>(a, tile);
    const u32 group = multiplier() / group_threads;
#pragma unroll 1
    for (u32 k = 0; k < P.steps(); ++k, ring.next()) {
        float part[N / 2];
        const u32 stage = u32(__cvta_generic_to_shared(stages)) + ring.at * P.stage_bytes();
        s.full[ring.at].await(ring.parity);
        multiply_step<N>(part, stage + group * (weight_bytes / 2), stage + weight_bytes);
        add_narrow<P, N>(sum, part, s.scales[ring.at]);
        release_stage(s, ring.at, rank);
    }
    if constexpr (P.gated())
        finish_narrow_gated<P, N>(a, s, tile, rank, sum, turn);
    else
        finish_narrow_rows<P, N>(a, s, tile, rank, sum, home);
}

}  // namespace weft
