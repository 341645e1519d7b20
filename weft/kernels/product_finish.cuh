// The end of a tile: its sums become numbers, and go where they belong.
//
// A thread holds, for rows 8 j + 2 (lane % 4) + {0, 1} of the tile, two columns: sums 4 j and
// 4 j + 1 of column lane / 4 of its warp, 4 j + 2 and 4 j + 3 of the column eight further on.
#pragma once
#include <weft/kernels/product_tiles.cuh>
#include <weft/kernels/quant.cuh>

namespace weft {

constexpr u32 multipliers = 2 * group_threads;
constexpr u32 chunk_rows = 16, chunk_pitch = pair_columns + 16;  // bytes; rows of two-byte numbers
constexpr u32 half_chunk = weight_warps * chunk_bytes / 2;       // there are two
static_assert(chunk_rows * chunk_pitch <= half_chunk);

// Those who multiply wait for each other.
WEFT_FN void meet_multipliers() { meet(1, multipliers); }
WEFT_FN u32 multiplier() { return threadIdx.x - group_threads; }

// A warp has read all it needs of a stage: both CTAs may load into it again. The neighbour loads
// rows only, which none but finished products have read; scales are this CTA's own.
template <Product P> WEFT_FN void release_stage(ProductShared<P>& s, u32 at, u32 rank) {
    const u32 lane = threadIdx.x % warp_lanes;
    __syncwarp();
    if (lane == 0) s.empty[at].arrive();
    if (lane == 1) arrive_at(rank ^ 1, s.empty[at]);
}

// Where the row goes that has this thread's number; loaded early, for it takes a trip to memory.
template <Product P> WEFT_FN u64 load_home(const ProductArgs& a, const Tile& tile) {
    const u32 row = multiplier();
    return P.finish == Finish::push && row < tile.live ? a.home[tile.first + row] : 0;
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

// Sixteen rows at a time through shared memory, then 256 bytes of each row by sixteen threads.
template <Product P, u32 N>
WEFT_FN void finish_rows(const ProductArgs& a, ProductShared<P>& s, const Tile& tile, u32 rank,
                         const float (&sum)[N / 2], u64 home) {
    const u32 self = multiplier(), lane = self % warp_lanes, warp = self / warp_lanes;
    const u32 at = (lane / 16 * 8 + lane % 8) * chunk_pitch + (warp * 16 + lane / 8 % 2 * 8) * 2;
    const u32 row = self / 16, place = self % 16 * 16;
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
        const u64 to = r < tile.live ? place_of(a, s, tile, rank, r) : 0;
        if (to != 0)
            store(reinterpret_cast<uint4*>(to + place),
                  *reinterpret_cast<const uint4*>(chunk + row * chunk_pitch + place));
    }
}

}  // namespace weft
