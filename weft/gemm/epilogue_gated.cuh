// The end of a tile of gates and ups, which becomes FP8.
//
// Tall, a thread has both of a column. Low, one warpgroup has the gates, the other the ups of the
// same columns, thread for thread: each gives the other half of its rows and gates the rest. A
// thread then has, for rows 16 i + 8 (its group) + 2 (lane % 4) + {0, 1} of the tile, columns
// lane / 4 and eight further on of its warp's sixteen, as `gated` 4 i + {0, 1} and 4 i + {2, 3}.
// Rows of a group are counted from 0 on: 8 i + 2 (lane % 4) + {0, 1}.
#pragma once
#include <weft/gemm/epilogue.cuh>

namespace weft {

constexpr u32 group_warps = group_threads / warp_lanes;
constexpr u32 gated_rows = 64, gated_pitch = gated_columns + 16;  // of a group's chunk of FP8
static_assert(gated_rows * gated_pitch <= half_chunk && 16 * gated_pitch <= chunk_bytes);
static_assert(group_warps * 4 * warp_lanes * sizeof(float4) <= 2 * half_chunk);

WEFT_FN u32 row_of_group(u32 group, u32 own) { return own / 8 * 16 + group * 8 + own % 8; }

// `gate * sigmoid(alpha * gate) * (up + offset)`, held to the limit before; NaN stays NaN.
WEFT_FN float gate_of(const ProductArgs& a, float gate, float up) {
    gate = gate > a.limit ? a.limit : gate;
    up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
    const float sigmoid = divide_full(1.0f, 1.0f + __expf(-(a.alpha * gate)));
    return gate * sigmoid * (up + a.offset);
}

// Gates the low rows: two warps that have gates and ups of the same columns meet for every sixteen
// rows. Turns take two places, so the next is written while the last is read.
template <Product P, u32 N>
WEFT_FN void gate_low(const ProductArgs& a, ProductShared<P>& s, const float (&sum)[N / 2],
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

// Gates the tall rows, and finds the largest |x| of this thread's two, as bits.
WEFT_FN void gate_tall(const ProductArgs& a, const float (&sum)[tall_sums],
                       float (&gated)[tall_sums / 2], u32 (&bits)[2]) {
    bits[0] = bits[1] = 0;
#pragma unroll
    for (u32 i = 0; i < tall_sums / 2; ++i) {
        gated[i] = gate_of(a, sum[i], sum[tall_sums / 2 + i]);
        bits[i / 2 % 2] = max(bits[i / 2 % 2], __float_as_uint(gated[i]) & 0x7fffffffu);
    }
#pragma unroll
    for (u32 step = 1; step < 4; step *= 2)
#pragma unroll
        for (u32 i = 0; i < 2; ++i)
            bits[i] = max(bits[i], __shfl_xor_sync(all_lanes, bits[i], step));
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

// Where this CTA's columns of a gated row begin.
template <Product P>
WEFT_FN u8* gated_place(const ProductArgs& a, const Tile& tile, u32 rank, u32 row) {
    return static_cast<u8*>(a.out) + u64(tile.first + row) * (P.n / 2) + tile.pair * tile_columns +
           rank * gated_columns;
}

// What both CTAs have seen of a tile's rows. Tile after tile takes the other half of what is
// exchanged: a neighbour is never two tiles ahead, since it needs this tile's amax from here before
// its next.
template <Product P> struct Exchange {
    ProductShared<P>& s;
    u32 rank, turn;

    WEFT_FN void expect(u32 rows) {
        if (multiplier() == 0) s.amax_told[turn % 2].expect(rows * sizeof(u32));
    }
    WEFT_FN void tell(u32 row, u32 bits) {
        send_word(rank ^ 1, &s.amax_there[turn % 2][row], bits, s.amax_told[turn % 2]);
    }
    WEFT_FN void await() { s.amax_told[turn % 2].await(turn / 2 % 2); }
    WEFT_FN u32 with(u32 row, u32 bits) { return max(bits, s.amax_there[turn % 2][row]); }
};

// The largest |x| of the low row that has this thread's number, over this CTA's columns.
template <Product P> WEFT_FN u32 largest_of(const ProductShared<P>& s, u32 row) {
    const u32 first = row / 8 % 2 * group_warps;
    u32 bits = 0;
#pragma unroll
    for (u32 w = 0; w < group_warps; ++w)
        bits = max(bits, s.amax[first + w][row / 16 * 8 + row % 8]);
    return bits;
}

// A group's rows as FP8 through its own half of the chunk, then 64 bytes of each by four lanes.
template <Product P, u32 N>
WEFT_FN void store_low_gated(const ProductArgs& a, ProductShared<P>& s, const Tile& tile, u32 rank,
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

// Sixteen tall rows as FP8 through the warp's own memory, then 64 bytes of each by four lanes.
template <Product P>
WEFT_FN void store_tall_gated(const ProductArgs& a, ProductShared<P>& s, const Tile& tile, u32 rank,
                              const float (&gated)[tall_sums / 2], const float (&inverse)[2],
                              u32 above) {
    const u32 lane = multiplier() % warp_lanes, place = lane % 4 * 16, first = above + tall_row();
    u8* const chunk = s.chunk + multiplier() / warp_lanes * chunk_bytes;
#pragma unroll
    for (u32 j = 0; j < tall_sums / 8; ++j)
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const float* const x = &gated[4 * j + 2 * i];
            *reinterpret_cast<u16*>(chunk + (lane / 4 + 8 * i) * gated_pitch + 8 * j +
                                    lane % 4 * 2) =
                u16(pack_e4m3(__fmul_rn(x[0], inverse[i]), __fmul_rn(x[1], inverse[i])));
        }
    __syncwarp();
#pragma unroll
    for (u32 r = lane / 4; r < 16; r += 8)
        if (first + r < tile.live)
            *reinterpret_cast<uint4*>(gated_place<P>(a, tile, rank, first + r) + place) =
                *reinterpret_cast<const uint4*>(chunk + r * gated_pitch + place);
}

// Gated, scaled by what both CTAs have seen, and stored as FP8.
template <Product P, u32 N>
WEFT_FN void finish_low_gated(const ProductArgs& a, ProductShared<P>& s, const Tile& tile, u32 rank,
                              const float (&sum)[N / 2], u32 turn) {
    const u32 row = multiplier();
    Exchange<P> exchange{s, rank, turn};
    float gated[N / 4];
    meet_multipliers();  // chunks and the other turn of the tile before are free
    exchange.expect(tile.rows);
    gate_low<P, N>(a, s, sum, gated);
    note_amax<P, N>(s, gated);
    meet_multipliers();
    const u32 bits = row < N ? largest_of(s, row) : 0;
    if (row < N) exchange.tell(row, bits);
    exchange.await();
    if (row < N)
        s.inverse[row] = settle_scale<P>(a, tile, row, exchange.with(row, bits), rank == 0);
    meet_multipliers();
    store_low_gated<P, N>(a, s, tile, rank, gated);
}

// One tall tile, or two, one's rows above the other's.
template <Product P, u32 tiles>
WEFT_FN void finish_tall_gated(const ProductArgs& a, ProductShared<P>& s, const Tile& tile,
                               u32 rank, const float (&sum)[tiles][tall_sums], u32 turn) {
    const u32 lane = multiplier() % warp_lanes, first = tall_row() + lane / 4;
    Exchange<P> exchange{s, rank, turn};
    float gated[tiles][tall_sums / 2], inverse[2];
    u32 bits[tiles][2];
    meet_multipliers();  // chunks and the other turn of the tile before are free
    exchange.expect(tiles * tall_rows);
#pragma unroll
    for (u32 t = 0; t < tiles; ++t) {
        gate_tall(a, sum[t], gated[t], bits[t]);
        if (lane % 4 == 0)
            for (u32 i = 0; i < 2; ++i) exchange.tell(t * tall_rows + first + 8 * i, bits[t][i]);
    }
    exchange.await();
#pragma unroll
    for (u32 t = 0; t < tiles; ++t) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const u32 row = t * tall_rows + first + 8 * i;
            inverse[i] = settle_scale<P>(a, tile, row, exchange.with(row, bits[t][i]),
                                         rank == 0 && lane % 4 == 0);
        }
        if (t != 0) __syncwarp();  // the chunk of the tile before was read
        store_tall_gated(a, s, tile, rank, gated[t], inverse, t * tall_rows);
    }
}

}  // namespace weft
