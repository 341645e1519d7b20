// What becomes of a tile's sums: rows stored, rows pushed to their homes, or gated and made FP8.
//
// A thread holds, for rows 8 j + 2 (lane % 4) + {0, 1} of the tile, two columns: sums 4 j and
// 4 j + 1 of column lane / 4 of its warp, 4 j + 2 and 4 j + 3 of the column eight further on. Where
// gating is wanted, weights were loaded so that those are a gate and its up.
#pragma once
#include <weft/kernels/product_tiles.cuh>
#include <weft/kernels/quant.cuh>

namespace weft {

constexpr u32 multipliers = 2 * group_threads;

// Those who multiply wait for each other.
WEFT_FN void meet_multipliers() { meet(1, multipliers); }
WEFT_FN u32 multiplier() { return threadIdx.x - group_threads; }

// Where the row goes that has this thread's number; loaded early, for it takes a trip to memory.
WEFT_FN u64 load_home(const ProductArgs& a, const Tile& tile) {
    const u32 row = multiplier();
    return a.home != nullptr && row < tile.live ? a.home[tile.first + row] : 0;
}

// Sixteen rows at a time through shared memory, then 256 bytes of each row by sixteen threads.
template <Product P, u32 N>
WEFT_FN void finish_rows(const ProductArgs& a, ProductShared<P>& s, const Tile& tile, u32 rank,
                         const float (&sum)[N / 2], u64 home, u32& turn) {
    const u32 self = multiplier(), lane = self % warp_lanes, warp = self / warp_lanes;
    const u32 column = tile.pair * pair_columns + rank * tile_columns;
    if constexpr (P.finish == Finish::push) {
        meet_multipliers();  // nobody reads homes of the tile before
        if (self < N) s.homes[self] = home;
        meet_multipliers();
    }
    const u32 at = (lane / 16 * 8 + lane % 8) * chunk_pitch + (warp * 16 + lane / 8 % 2 * 8) * 2;
    const u32 row = self / 16, place = self % 16 * 16;
#pragma unroll
    for (u32 c = 0; c < N / chunk_rows; ++c, ++turn) {
        const float* const x = &sum[c * chunk_rows / 2];
        u8* const chunk = s.chunk[turn % 2];
        store_transposed(chunk + at, pack_halves(P.number, x[0], x[1]),
                         pack_halves(P.number, x[2], x[3]), pack_halves(P.number, x[4], x[5]),
                         pack_halves(P.number, x[6], x[7]));
        meet_multipliers();
        const u32 r = c * chunk_rows + row;
        if (r >= tile.live) continue;
        const uint4 v = *reinterpret_cast<const uint4*>(chunk + row * chunk_pitch + place);
        u64 to;
        if constexpr (P.finish == Finish::push)
            to = s.homes[r];
        else
            to = reinterpret_cast<u64>(a.out) + u64(tile.first + r) * (P.n * 2);
        if (to != 0) store(reinterpret_cast<uint4*>(to + column * 2 + place), v);
    }
}

// `gate * sigmoid(alpha * gate) * (up + offset)`, held to the limit before; NaN stays NaN.
WEFT_FN float gate_of(const ProductArgs& a, float gate, float up) {
    if (a.limit > 0.0f) {
        gate = gate > a.limit ? a.limit : gate;
        up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
    }
    const float sigmoid = divide_full(1.0f, 1.0f + __expf(-(a.alpha * gate)));
    return gate * sigmoid * (up + a.offset);
}

// The largest |x| of each row over this warp's columns, as bits, for everyone to see.
template <Product P, u32 N>
WEFT_FN void note_amax(ProductShared<P>& s, float (&sum)[N / 2]) {
    const u32 warp = multiplier() / warp_lanes, lane = multiplier() % warp_lanes;
#pragma unroll
    for (u32 j = 0; j < N / 8; ++j)
#pragma unroll
        for (u32 t = 0; t < 2; ++t) {
            const float x = sum[4 * j + t];
            u32 bits = __float_as_uint(x) & 0x7fffffffu;
#pragma unroll
            for (u32 step = 4; step < warp_lanes; step *= 2)
                bits = max(bits, __shfl_xor_sync(all_lanes, bits, step));
            if (lane < 4) s.amax[warp][8 * j + 2 * lane + t] = bits;
        }
}

// Rows' scales from all 128 columns, half of which the neighbour has; their inverses are kept.
// Turns: tile after tile takes the other half of what is exchanged. A neighbour is never two tiles
// ahead, since it needs this tile's amax from here before its next.
template <Product P, u32 N>
WEFT_FN void settle_scales(const ProductArgs& a, ProductShared<P>& s, const Tile& tile, u32 rank,
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
    if (self < N) {
        bits = max(bits, s.amax_there[half][self]);
        const BlockScale scale = block_scale(bits);
        // Times NaN, all numbers of a broken block are NaN.
        s.inverse[self] = bits >= infinity_bits ? scale.scale : scale.inverse;
        if (rank == 0 && self < tile.live)
            a.out_scales[u64(tile.first + self) * (P.n / pair_columns) + tile.pair] = scale.scale;
    }
}

// Gated in place, scaled by what both CTAs have seen, and stored as FP8.
template <Product P, u32 N>
WEFT_FN void finish_gated(const ProductArgs& a, ProductShared<P>& s, const Tile& tile, u32 rank,
                          float (&sum)[N / 2], u32& turn) {
    constexpr u32 half = tile_columns / 2;
    const u32 self = multiplier(), lane = self % warp_lanes, warp = self / warp_lanes;
#pragma unroll
    for (u32 j = 0; j < N / 8; ++j)
#pragma unroll
        for (u32 t = 0; t < 2; ++t) {
            float* const x = &sum[4 * j];
            x[t] = gate_of(a, x[t], x[t + 2]);
        }
    note_amax<P, N>(s, sum);
    meet_multipliers();
    settle_scales<P, N>(a, s, tile, rank, turn);
    meet_multipliers();
    u8* const out = static_cast<u8*>(a.out) + tile.pair * tile_columns + rank * half;
#pragma unroll
    for (u32 first = 0; first < N; first += wide_chunk_rows) {
        constexpr u32 most = N < wide_chunk_rows ? N : wide_chunk_rows;
        u8* const chunk = s.chunk[first / wide_chunk_rows % 2];
#pragma unroll
        for (u32 j = first / 8; j < (first + most) / 8 && j < N / 8; ++j)
#pragma unroll
            for (u32 t = 0; t < 2; ++t) {
                const u32 r = 8 * j + 2 * (lane % 4) + t;
                const float x = sum[4 * j + t];
                chunk[(r - first) * wide_chunk_pitch + warp * 8 + lane / 4] =
                    u8(pack_e4m3(__fmul_rn(x, s.inverse[r]), 0.0f));
            }
        meet_multipliers();
        const u32 row = self / 4, r = first + row;
        if (row < most && r < tile.live)
            *reinterpret_cast<uint4*>(out + u64(tile.first + r) * (P.n / 2) + self % 4 * 16) =
                *reinterpret_cast<const uint4*>(chunk + row * wide_chunk_pitch + self % 4 * 16);
    }
    ++turn;
}

}  // namespace weft
