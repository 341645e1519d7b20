// The end of a tile that is stored as it is: sums become numbers, and go where their rows belong.
#pragma once
#include <weft/device/quantize_warp.cuh>
#include <weft/gemm/mainloop.cuh>

namespace weft {

constexpr u32 chunk_rows = 16, chunk_pitch = pair_columns + 16;  // bytes; rows of two-byte numbers
constexpr u32 half_chunk = weight_warps * chunk_bytes / 2;       // there are two
constexpr u32 half_row = tile_columns, half_pitch = half_row + 16;  // bytes; two make a row
static_assert(chunk_rows * chunk_pitch <= half_chunk);
static_assert(8 * half_pitch <= chunk_bytes);

// Where the row goes that has this thread's number; loaded early, for it takes a trip to memory.
template <Product P> WEFT_FN u64 load_home(const ProductArgs& a, const Tile& tile) {
    const u32 row = multiplier();
    if (P.finish != Finish::push || row >= tile.live) return 0;
    const u64 home = a.home[tile.first + row];
    return a.unless != nullptr && *a.unless != 0 ? 0 : home;
}

// Sixteen bytes of a row that is done. A row that tells of itself has no word of all ones: numbers
// are packed by conversions whose only NaN is 0x7fff.
template <Product P> WEFT_FN void put(u64 to, const u8* from) {
    uint4* const at = reinterpret_cast<uint4*>(to);
    if constexpr (P.tells)
        post_vector(at, *reinterpret_cast<const uint4*>(from));
    else
        store(at, *reinterpret_cast<const uint4*>(from));
}

// Every thread that stores may look up every row's home. Chunks of the tile before are free, too.
template <Product P> WEFT_FN void share_homes(ProductShared<P>& s, const Tile& tile, u64 home) {
    meet_multipliers();
    if constexpr (P.finish == Finish::push) {
        if (multiplier() < tile.rows) s.homes[multiplier()] = home;
        meet_multipliers();
    }
}

// Where this CTA's columns of a row begin; 0 for nowhere.
template <Product P>
WEFT_FN u64 place_of(const ProductArgs& a, const ProductShared<P>& s, const Tile& tile, u32 rank,
                     u32 row) {
    const u32 column = tile.pair * pair_columns + rank * tile_columns;
    if constexpr (P.finish == Finish::push)
        return s.homes[row] == 0 ? 0 : s.homes[row] + column * 2;
    else
        return reinterpret_cast<u64>(a.out) + (u64(tile.first + row) * P.n + column) * 2;
}

// Sixteen low rows at a time through shared memory, then 256 bytes of each by sixteen threads.
template <Product P, u32 N>
WEFT_FN void finish_low(const ProductArgs& a, ProductShared<P>& s, const Tile& tile, u32 rank,
                        const float (&sum)[N / 2], u64 home) {
    const u32 self = multiplier(), lane = self % warp_lanes, warp = self / warp_lanes;
    const u32 at = (lane / 16 * 8 + lane % 8) * chunk_pitch + (warp * 16 + lane / 8 % 2 * 8) * 2;
    const u32 row = self / 16, place = self % 16 * 16;
    const u32 column = tile.pair * pair_columns + rank * tile_columns + place / 2;
    const bool made = P.n % pair_columns == 0 || column < P.n;  // or it belongs to nobody
    share_homes(s, tile, home);
#pragma unroll
    for (u32 c = 0; c < N / chunk_rows; ++c) {
        const float* const x = &sum[c * chunk_rows / 2];
        u8* const chunk = s.chunk + c % 2 * half_chunk;
        store_transposed(chunk + at, pack_halves(P.number, x[0], x[1]),
                         pack_halves(P.number, x[2], x[3]), pack_halves(P.number, x[4], x[5]),
                         pack_halves(P.number, x[6], x[7]));
        meet_multipliers();
        const u32 r = c * chunk_rows + row;
        const u64 to = r < tile.live && made ? place_of(a, s, tile, rank, r) : 0;
        if (to != 0) put<P>(to + place, chunk + row * chunk_pitch + place);
    }
}

// Eight tall rows by 64 columns at a time through the warp's own memory, then 128 bytes of each by
// eight lanes. above: rows of the tile before these.
template <Product P>
WEFT_FN void finish_tall(const ProductArgs& a, ProductShared<P>& s, const Tile& tile, u32 rank,
                         const float (&sum)[tall_sums], u32 above) {
    const u32 lane = multiplier() % warp_lanes, place = lane % 8 * 16;
    u8* const chunk = s.chunk + multiplier() / warp_lanes * chunk_bytes;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 lower = i / 2, right = i % 2, row = above + tall_row() + lower * 8;
        const float* const x = &sum[right * (tall_sums / 2) + lower * 2];
#pragma unroll
        for (u32 j = 0; j < 2; ++j)
            store_blocks(chunk + lane % 8 * half_pitch + j * 64 + lane / 8 * 16,
                         pack_halves(P.number, x[16 * j], x[16 * j + 1]),
                         pack_halves(P.number, x[16 * j + 4], x[16 * j + 5]),
                         pack_halves(P.number, x[16 * j + 8], x[16 * j + 9]),
                         pack_halves(P.number, x[16 * j + 12], x[16 * j + 13]));
        __syncwarp();
#pragma unroll
        for (u32 r = lane / 8; r < 8; r += 4) {
            const u64 to = row + r < tile.live ? place_of(a, s, tile, rank, row + r) : 0;
            if (to != 0) put<P>(to + right * half_row + place, chunk + r * half_pitch + place);
        }
        __syncwarp();
    }
}

}  // namespace weft
