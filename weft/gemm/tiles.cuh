// The grouped product's tiles: what specialises it, where each tile lies, and what a CTA keeps.
#pragma once
#include <weft/device/tensor_copy.cuh>
#include <weft/gemm/wgmma.cuh>

namespace weft {

enum class Finish : u32 { store, push, gated, gated_fp8 };
enum class Bias : u32 { none, bf16, fp16, fp32 };

constexpr u32 product_threads = 3 * group_threads;  // one warpgroup loads, two multiply
constexpr u32 tile_columns = 128;  // of the product, for a CTA: rows of weights, or of both halves
constexpr u32 gated_columns = tile_columns / 2;  // of a gated result
constexpr u32 pair_columns = 2 * tile_columns;   // for the two CTAs of a cluster
constexpr u32 depth = 128;                       // bytes of k in a step; FP8: a block of scales
constexpr u32 weight_bytes = tile_columns * tile_bytes;
constexpr u32 weight_warps = 2 * group_threads / warp_lanes;  // that multiply

constexpr u32 row_boxes = 4;
constexpr u32 row_step = 16;              // a tile has a multiple of so many rows
constexpr u32 fine_rows = 160;            // above, of twice as many
constexpr u32 tall_rows = 128;            // of a tall tile; others are low. Only FP8 has tall ones
constexpr u32 twin_rows = 2 * tall_rows;  // of two tall ones that share weights
constexpr u32 low_rest = fine_rows - tall_rows;  // what one tile has more than a tall one at most

// What specialises the kernel: `Kind` in gemm/hopper.py writes it.
struct Product {
    u32 experts, n, k;  // weights are [experts, n, k]
    u32 most_rows;      // of a tile
    u32 stages;         // steps of k in flight
    Finish finish;
    Number number;  // of the result; two bytes wide unless it is FP8
    Operand operand;
    Bias bias;
    bool settled;  // counts and weights were there before the kernel in front began
    bool tells;    // push: who waits at home polls the rows themselves

    constexpr bool scaled() const { return operand == Operand::fp8; }
    constexpr u32 pairs() const { return (n + pair_columns - 1) / pair_columns; }
    constexpr u32 steps() const {
        const u32 bytes = k * (scaled() ? 1 : 2);
        return (bytes + depth - 1) / depth;
    }
    constexpr u32 stage_bytes() const { return weight_bytes + most_rows * tile_bytes; }
    constexpr bool quantised() const { return finish == Finish::gated_fp8; }
    constexpr bool gated() const { return quantised() || finish == Finish::gated; }
    // From the next lower height of a tile to one of so many rows: fewer forms compile faster.
    constexpr u32 row_step_at(u32 rows) const {
        return rows <= fine_rows ? row_step : 2 * row_step;
    }
    constexpr bool twins() const { return scaled() && most_rows == twin_rows; }
    // Of the highest tile that is not made of two.
    constexpr u32 single_rows() const { return twins() ? fine_rows : most_rows; }
    // Steps whose scales are loaded at a time: of 256 rows, registers hold no more.
    constexpr u32 scale_ahead() const { return twins() ? 2 : 4; }
    // An expert of more than `most_rows` is cut into tiles of so many, FP8; else into equal ones.
    constexpr u32 full_rows() const {
        return scaled() && !twins() && most_rows > tall_rows ? tall_rows : most_rows;
    }
};

// Mirrored by `ProductArgs` in gemm/hopper_source.py. Strides are in elements.
struct ProductArgs {
    TensorMap weights_map, rows_map[row_boxes];  // boxes of 8, 16, 32 and 64 rows
    const float *row_scales, *weight_scales;
    void* out;
    float* out_scales;
    const u64* home;
    const u32* unless;  // push: not 0, and no row goes anywhere; may be null
    const void* bias;
    const i32 *counts, *starts;
    i64 scale_row, scale_step;
    u32 most, rows;
    float alpha, offset, limit;  // limit: infinite for none
    u32 reserved[5];             // to a multiple of 64 bytes
};

constexpr u32 scale_warps = 3;  // that load scales

// Of each row, its scale times that of the block of weights; gated: times gate's, and times up's.
// Four rows that one thread multiplies with are neighbours: see scale_place.
template <Product P> struct StepScales {
    float rows[P.gated() ? 2 : 1][P.scaled() ? P.most_rows : 1];
};

// A thread holds rows 8 j + 2 q and the next, for each j: those of two j lie side by side.
WEFT_FN u32 scale_place(u32 row) {
    const u32 j = row / 8, q = row % 8 / 2;
    return j / 2 * 16 + q * 4 + j % 2 * 2 + row % 2;
}

constexpr u32 chunk_bytes = 1280;  // of each warp that multiplies, for what it stores

template <Product P> struct ProductShared {
    StepScales<P> scales[P.scaled() ? P.stages : 1];
    alignas(16) u8 chunk[weight_warps * chunk_bytes];
    u64 homes[P.finish == Finish::push ? P.most_rows : 1];
    u32 amax[P.quantised() ? weight_warps : 1][P.quantised() ? P.single_rows() / 2 : 1];  // of |x|
    u32 amax_there[P.quantised() ? 2 : 1][P.quantised() ? P.most_rows : 1];  // the neighbour's
    float inverse[P.quantised() ? P.single_rows() : 1];
    u32 ends[P.experts], order[P.experts], counts[P.experts], firsts[P.experts];
    Arrival full[P.stages], empty[P.stages], amax_told[2];
};

template <Product P> constexpr u32 product_shared_bytes() {
    return P.stages * P.stage_bytes() + sizeof(ProductShared<P>);
}

// One tile of a cluster: rows of one expert by 256 columns of the product (128 of a gated result).
struct Tile {
    u32 expert, pair, first, live, rows;  // rows: live ones and padding
};

WEFT_FN u32 round_up(u32 x, u32 to) { return (x + to - 1) / to * to; }

// For each expert its rows and the first of them. A count or a start that lies outside the rows
// counts as far as it does not.
template <Product P> WEFT_FN void count_rows(const ProductArgs& a, ProductShared<P>& s, u32 lane) {
    for (u32 e = lane; e < P.experts; e += warp_lanes) {
        const volatile i32* const starts = a.starts;
        const i64 first = starts == nullptr ? i64(e) * a.most : starts[e];
        const i64 room = first < 0 ? 0 : max(i64(a.rows) - first, i64(0));
        // Volatile: past this SM's cache, which may hold what they were before.
        const i32 count = *const_cast<const volatile i32*>(a.counts + e);
        s.counts[e] = u32(min(min(max(i64(count), i64(0)), i64(a.most)), room));
        s.firsts[e] = u32(first);
    }
    __syncwarp();
}

// Row blocks of an expert with so many rows.
template <Product P> WEFT_FN u32 blocks_of(u32 count) {
    constexpr u32 spare = P.most_rows - P.full_rows();  // what the last block may have more
    const u32 blocks = (max(count, spare) - spare + P.full_rows() - 1) / P.full_rows();
    return blocks == 0 && count != 0 ? 1 : blocks;
}

// Experts in turn: those with the highest tiles first, so that clusters can share them out evenly;
// more than 64 as they come.
template <Product P> WEFT_FN void order_experts(ProductShared<P>& s, u32 lane) {
    u32* const height = s.ends;  // the mean of an expert's tiles; free until ends are written
    for (u32 e = lane; e < P.experts; e += warp_lanes)
        height[e] = s.counts[e] / max(blocks_of<P>(s.counts[e]), 1u);
    __syncwarp();
    for (u32 e = lane; e < P.experts; e += warp_lanes) {
        u32 place = e;
        if constexpr (P.experts <= 64) {
            place = 0;
#pragma unroll 8
            for (u32 other = 0; other < P.experts; ++other)
                place += height[other] > height[e] || (height[other] == height[e] && other < e);
        }
        s.order[place] = e;
    }
    __syncwarp();
}

// How many row blocks end with each expert, in their order. By one warp, as the two above.
template <Product P> WEFT_FN void count_blocks(ProductShared<P>& s, u32 lane) {
    u32 end = 0;
    for (u32 base = 0; base < P.experts; base += warp_lanes) {
        const u32 place = base + lane;
        u32 blocks = place < P.experts ? blocks_of<P>(s.counts[s.order[place]]) : 0;
#pragma unroll
        for (u32 step = 1; step < warp_lanes; step *= 2) {
            const u32 before = __shfl_up_sync(all_lanes, blocks, step);
            if (lane >= step) blocks += before;
        }
        if (place < P.experts) s.ends[place] = end + blocks;
        end += __shfl_sync(all_lanes, blocks, warp_lanes - 1);
    }
}

// This cluster's tiles, one after the other. Every second round of clusters goes backwards: who had
// the highest tile of one has the lowest of the next. Row blocks that share weights are neighbours;
// all of an expert but the last are equally high.
template <Product P> struct Walk {
    const ProductShared<P>& s;
    u32 place = 0, round = 0;

    WEFT_FN bool next(Tile& tile) {
        constexpr u32 pairs = P.pairs();
        const u32 clusters = gridDim.x / 2, self = blockIdx.x / 2;
        const u32 number = round * clusters + (round % 2 == 0 ? self : clusters - 1 - self);
        ++round;
        if (number >= s.ends[P.experts - 1] * pairs) return false;
        while (number >= s.ends[place] * pairs) ++place;
        const u32 before = place == 0 ? 0 : s.ends[place - 1], own = s.ends[place] - before;
        const u32 offset = number - before * pairs, block = offset % own;
        tile.expert = s.order[place];
        tile.pair = offset / own;
        const u32 count = s.counts[tile.expert];
        const u32 full = P.scaled() ? P.full_rows() : round_up((count + own - 1) / own, row_step);
        u32 above = block * full, end = block + 1 == own ? count : above + full;
        if constexpr (P.twins()) {
            // A rest that is hardly worth reading weights for is made with half of the twins
            // before.
            const bool low = own > 1 && count - (own - 1) * full <= low_rest;
            if (low && block + 1 == own) above -= tall_rows;
            if (low && block + 2 == own) end -= tall_rows;
        }
        tile.first = s.firsts[tile.expert] + above;
        tile.live = end - above;
        tile.rows = round_up(tile.live, P.row_step_at(tile.live));
        return true;
    }
};

// A place in the ring of stages, and how often it was passed.
template <u32 stages> struct Ring {
    u32 at = 0, parity = 0;

    WEFT_FN void next() {
        if (++at == stages) {
            at = 0;
            parity ^= 1;
        }
    }
};

}  // namespace weft
