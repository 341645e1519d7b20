// The end of a tile of gates and ups: one warpgroup has the gates, the other the ups of the same
// columns, thread for thread. Each gives the other half of its rows, gates the rest, and stores it
// as FP8.
//
// After that a thread has, for rows 16 i + 8 (its group) + 2 (lane % 4) + {0, 1} of the tile,
// columns lane / 4 and eight further on of its warp's sixteen, as `gated` 4 i + {0, 1} and
// 4 i + {2, 3}. Rows of a group are counted from 0 on: 8 i + 2 (lane % 4) + {0, 1}.
#pragma once
#include <weft/kernels/product_finish.cuh>

namespace weft {

constexpr u32 group_warps = group_threads / warp_lanes;
constexpr u32 gated_columns = tile_columns / 2;                   // of a CTA
constexpr u32 gated_rows = 64, gated_pitch = gated_columns + 16;  // of a group's chunk of FP8
static_assert(gated_rows * gated_pitch <= half_chunk);
static_assert(group_warps * 4 * warp_lanes * sizeof(float4) <= 2 * half_chunk);

WEFT_FN u32 row_of_group(u32 group, u32 own) { return own / 8 * 16 + group * 8 + own % 8; }

// `gate * sigmoid(alpha * gate) * (up + offset)`, held to the limit before; NaN stays NaN.
WEFT_FN float gate_of(const ProductArgs& a, float gate, float up) {
    if (a.limit > 0.0f) {
        gate = gate > a.limit ? a.limit : gate;
        up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
    }
    const float sigmoid = divide_full(1.0f, 1.0f + __expf(-(a.alpha * gate)));
    return gate * sigmoid * (up + a.offset);
}

// Gates all rows: two warps that have gates and ups of the same columns meet for every sixteen
// rows. Turns take two places, so the next is written while the last is read.
template <Product P, u32 N>
WEFT_FN void gate_rows(const ProductArgs& a, ProductShared<P>& s, const float (&sum)[N / 2],
                       float (&gated)[N / 4]) {
    const u32 lane = multiplier() % warp_lanes, warp = multiplier() / warp_lanes % group_warps;
    const bool up = multiplier() >= group_threads;
    float4* const place = reinterpret_cast<float4*>(s.chunk) + warp * 4 * warp_lanes + lane;
#pragma unroll
    for (u32 i = 0; i < N / 16; ++i) {
        const float *const upper = &sum[8 * i], *const lower = &sum[8 * i + 4];
        const float4 given = up ? float4{upper[0], upper[1], upper[2], upper[3]}
                                : float4{lower[0], lower[1], lower[2], lower[3]};
        float4* const turn = place + i % 2 * 2 * warp_lanes;
        turn[up * warp_lanes] = given;
        meet(2 + warp, 2 * warp_lanes);
        const float4 got = turn[!up * warp_lanes];
        const float other[4] = {got.x, got.y, got.z, got.w};
#pragma unroll
        for (u32 c = 0; c < 4; ++c)
            gated[4 * i + c] = gate_of(a, up ? other[c] : upper[c], up ? lower[c] : other[c]);
    }
}

// The largest |x| of each row over this warp's columns, as bits, for everyone to see.
template <Product P, u32 N>
WEFT_FN void note_amax(ProductShared<P>& s, const float (&gated)[N / 4]) {
    const u32 warp = multiplier() / warp_lanes, lane = multiplier() % warp_lanes;
#pragma unroll
    for (u32 i = 0; i < N / 16; ++i)
#pragma unroll
        for (u32 t = 0; t < 2; ++t) {
            u32 bits = max(__float_as_uint(gated[4 * i + t]) & 0x7fffffffu,
                           __float_as_uint(gated[4 * i + 2 + t]) & 0x7fffffffu);
#pragma unroll
            for (u32 step = 4; step < warp_lanes; step *= 2)
                bits = max(bits, __shfl_xor_sync(all_lanes, bits, step));
            if (lane < 4) s.amax[warp][8 * i + 2 * lane + t] = bits;
        }
}

// What a row's numbers are multiplied with before they become FP8; times NaN, all of a broken block
// are NaN. One thread of one CTA keeps the scale.
template <Product P>
WEFT_FN float settle_scale(const ProductArgs& a, const Tile& tile, u32 row, u32 bits, bool keep) {
    const BlockScale scale = block_scale(bits);
    if (keep && row < tile.live)
        a.out_scales[u64(tile.first + row) * (P.n / pair_columns) + tile.pair] = scale.scale;
    return bits >= infinity_bits ? scale.scale : scale.inverse;
}

// Rows' scales from all 128 columns, half of which the neighbour has; their inverses are kept.
// Tile after tile takes the other half of what is exchanged: a neighbour is never two tiles ahead,
// since it needs this tile's amax from here before its next.
template <Product P, u32 N>
WEFT_FN void exchange_amax(const ProductArgs& a, ProductShared<P>& s, const Tile& tile, u32 rank,
                           u32 turn) {
    const u32 row = multiplier(), half = turn % 2;
    u32 bits = 0;
    if (row < N) {
        const u32 first = row / 8 % 2 * group_warps;
#pragma unroll
        for (u32 w = 0; w < group_warps; ++w)
            bits = max(bits, s.amax[first + w][row / 16 * 8 + row % 8]);
        send_word(rank ^ 1, &s.amax_there[half][row], bits, s.amax_told[half]);
    }
    if (row == 0) s.amax_told[half].expect(N * sizeof(u32));
    s.amax_told[half].await(turn / 2 % 2);
    if (row < N)
        s.inverse[row] =
            settle_scale<P>(a, tile, row, max(bits, s.amax_there[half][row]), rank == 0);
}

// Where this CTA's columns of a gated row begin.
template <Product P>
WEFT_FN u8* gated_place(const ProductArgs& a, const Tile& tile, u32 rank, u32 row) {
    return static_cast<u8*>(a.out) + u64(tile.first + row) * (P.n / 2) + tile.pair * tile_columns +
           rank * gated_columns;
}

// A group's rows as FP8 through its own half of the chunk, then 64 bytes of each by four lanes.
template <Product P, u32 N>
WEFT_FN void store_gated(const ProductArgs& a, ProductShared<P>& s, const Tile& tile, u32 rank,
                         const float (&gated)[N / 4]) {
    const u32 self = multiplier() % group_threads, group = multiplier() / group_threads;
    const u32 lane = self % warp_lanes, column = self / warp_lanes * 16 + lane / 4;
    u8* const chunk = s.chunk + group * half_chunk;
#pragma unroll
    for (u32 first = 0; first < N / 2; first += gated_rows) {
        if (first != 0) meet(6 + group, group_threads);
#pragma unroll
        for (u32 i = first / 8; i < (first + gated_rows) / 8 && i < N / 16; ++i)
#pragma unroll
            for (u32 c = 0; c < 4; ++c) {
                const u32 own = 8 * i + 2 * (lane % 4) + c % 2;
                const float by = s.inverse[row_of_group(group, own)];
                chunk[(own - first) * gated_pitch + column + c / 2 * 8] =
                    u8(pack_e4m3(__fmul_rn(gated[4 * i + c], by), 0.0f));
            }
        meet(6 + group, group_threads);
#pragma unroll
        for (u32 own = first + self / 4; own < first + gated_rows; own += group_threads / 4) {
            const u32 row = row_of_group(group, own), place = self % 4 * 16;
            if (own < N / 2 && row < tile.live)
                *reinterpret_cast<uint4*>(gated_place<P>(a, tile, rank, row) + place) =
                    *reinterpret_cast<const uint4*>(chunk + (own - first) * gated_pitch + place);
        }
    }
}

// Gated, scaled by what both CTAs have seen, and stored as FP8.
template <Product P, u32 N>
WEFT_FN void finish_gated(const ProductArgs& a, ProductShared<P>& s, const Tile& tile, u32 rank,
                          const float (&sum)[N / 2], u32 turn) {
    float gated[N / 4];
    meet_multipliers();  // chunks of the tile before are free
    gate_rows<P, N>(a, s, sum, gated);
    note_amax<P, N>(s, gated);
    meet_multipliers();
    exchange_amax<P, N>(a, s, tile, rank, turn);
    meet_multipliers();
    store_gated<P, N>(a, s, tile, rank, gated);
}

}  // namespace weft
