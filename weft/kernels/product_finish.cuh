// What narrow and tall tiles have in common when their sums are finished.
#pragma once
#include <weft/kernels/product_tiles.cuh>
#include <weft/kernels/quant.cuh>

namespace weft {

constexpr u32 multipliers = 2 * group_threads;

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

// `gate * sigmoid(alpha * gate) * (up + offset)`, held to the limit before; NaN stays NaN.
WEFT_FN float gate_of(const ProductArgs& a, float gate, float up) {
    if (a.limit > 0.0f) {
        gate = gate > a.limit ? a.limit : gate;
        up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
    }
    const float sigmoid = divide_full(1.0f, 1.0f + __expf(-(a.alpha * gate)));
    return gate * sigmoid * (up + a.offset);
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
           rank * (tile_columns / 2);
}

}  // namespace weft
