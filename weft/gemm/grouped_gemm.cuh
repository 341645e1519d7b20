// The grouped product on Hopper's tensor cores: FP8 with scales, BF16 or FP16. A tile has as many
// rows as its expert, to a multiple of 16, so weights are read once.
//
// Two CTAs of a cluster share a tile's rows: each loads half of them for both, and its own 128
// columns of weights. One warpgroup loads, steps ahead of two that multiply, over the borders of
// tiles too: memory never waits for the end of a tile. Nor for that of the kernel in front, where
// counts and weights were there before: the ring is full of weights when the first rows may come.
#pragma once
#include <weft/gemm/mainloop_bf16.cuh>

namespace weft {

// What the kernel in front has written is there from here on; the one behind may come.
WEFT_FN void follow_predecessor() {
    wait_for_predecessor();
    admit_successor();
}

// A stage's weights of one step, and how much will come there with its rows.
template <Product P>
WEFT_FN void load_weights(const ProductArgs& a, ProductShared<P>& s, u8* stages, u32 at,
                          const Tile& tile, u32 rank, u32 k) {
    const u64 hint = tile.live == s.counts[tile.expert] ? wanted_once : wanted_again;
    u8* const to = stages + at * P.stage_bytes();
    Arrival& full = s.full[at];
    full.expect(weight_bytes + tile.rows * tile_bytes);
    if constexpr (P.gated() && !P.scaled())
        load_box5(to, a.weights_map, k * depth,
                  (tile.pair * tile_columns + rank * gated_columns) / 8, tile.expert, full, hint);
    else if constexpr (P.gated())
        load_box4(to, a.weights_map, k * depth, tile.pair * tile_columns + rank * gated_columns,
                  tile.expert, full, hint);
    else
        load_box(to, a.weights_map, k * depth,
                 tile.expert * P.n + tile.pair * pair_columns + rank * tile_columns, full, hint);
}

// Of a step's rows this CTA's half, for both.
template <Product P>
WEFT_FN void load_rows(const ProductArgs& a, ProductShared<P>& s, u8* stages, u32 at,
                       const Tile& tile, u32 rank, u32 k) {
    u8* const to = stages + at * P.stage_bytes() + weight_bytes;
    u32 r = rank * (tile.rows / 2), left = tile.rows / 2;
#pragma unroll
    for (u32 box = row_boxes; box-- > 0;)
        for (const u32 high = 8 << box; left >= high; left -= high, r += high)
            load_box_for(3, to + r * tile_bytes, a.rows_map[box], k * depth, tile.first + r,
                         s.full[at], wanted_again);
}

// Fills stages with weights while the kernel in front still runs; returns how many.
template <Product P>
WEFT_FN u32 load_early(const ProductArgs& a, ProductShared<P>& s, u8* stages, u32 rank) {
    Walk<P> walk{s};
    Tile tile;
    u32 filled = 0;
    while (filled < P.stages && walk.next(tile))
        for (u32 k = 0; k < P.steps() && filled < P.stages; ++k, ++filled)
            load_weights(a, s, stages, filled, tile, rank, k);
    return filled;
}

// One thread: weights and rows of every step, into the ring.
template <Product P>
WEFT_FN void load_tiles(const ProductArgs& a, ProductShared<P>& s, u8* stages, u32 rank) {
    u32 early = 0;
    if constexpr (P.settled) {
        early = load_early(a, s, stages, rank);
        follow_predecessor();
    }
    Walk<P> walk{s};
    Ring<P.stages> ring;
    Tile tile;
    fence_for_bulk();  // the rows were stored, not copied
    while (walk.next(tile))
        for (u32 k = 0; k < P.steps(); ++k, ring.next()) {
            if (early != 0) {
                --early;
            } else {
                s.empty[ring.at].await(ring.parity ^ 1);
                load_weights(a, s, stages, ring.at, tile, rank, k);
            }
            load_rows(a, s, stages, ring.at, tile, rank, k);
        }
    // The neighbour's last arrivals are here: it would not wait for them, and this CTA's end would
    // take the barriers away under them.
    for (u32 i = 0; i < P.stages; ++i, ring.next()) s.empty[ring.at].await(ring.parity ^ 1);
}

template <u32 n> struct alignas(n * sizeof(float)) Ahead {
    float of[n];
};

// The scales of n steps from `at` on. Vectors where the layout has them side by side.
template <u32 n>
WEFT_FN void load_ahead(float (&to)[n], const float* at, i64 step, u32 left, bool vectors) {
    if (vectors) {
        const Ahead<n> v = *reinterpret_cast<const Ahead<n>*>(at);
#pragma unroll
        for (u32 i = 0; i < n; ++i) to[i] = v.of[i];
    } else {
#pragma unroll
        for (u32 i = 0; i < n; ++i) to[i] = i < left ? at[i * step] : 0.0f;
    }
}

// Scales of some steps: of this lane's rows, and of the blocks of weights.
template <Product P> struct Scales {
    static constexpr u32 lanes = scale_warps * warp_lanes, each = (P.most_rows + lanes - 1) / lanes;
    static constexpr u32 kinds = P.gated() ? 2 : 1, blocks = P.steps(), ahead = P.scale_ahead();
    float row[each][ahead], weights[kinds][ahead];

    WEFT_FN static u32 of(u32 i) { return i * lanes + threadIdx.x - warp_lanes; }

    // Rows of padding have those of the last live row.
    WEFT_FN void load(const ProductArgs& a, const Tile& tile, u32 rank, u32 k) {
        constexpr bool whole = blocks % ahead == 0;
        const bool aligned = reinterpret_cast<u64>(a.row_scales) % 16 == 0 && a.scale_row % 4 == 0;
        const u32 block =
            tile.expert * (P.n / depth) + (P.gated() ? tile.pair : tile.pair * 2 + rank);
        const float* const at = a.weight_scales + u64(block) * blocks + k;
#pragma unroll
        for (u32 i = 0; i < kinds; ++i)
            load_ahead(weights[i], at + i * (P.n / 2 / depth * blocks), 1, blocks - k,
                       whole && reinterpret_cast<u64>(a.weight_scales) % 16 == 0);
#pragma unroll
        for (u32 i = 0; i < each; ++i) {
            const u32 r = tile.first + min(of(i), tile.live - 1);
            load_ahead(row[i], a.row_scales + i64(r) * a.scale_row + k * a.scale_step, a.scale_step,
                       blocks - k, whole && a.scale_step == 1 && aligned);
        }
    }
    WEFT_FN void store(StepScales<P>& to, u32 rows, u32 n) const {
#pragma unroll
        for (u32 i = 0; i < each; ++i)
            if (of(i) < rows)
#pragma unroll
                for (u32 w = 0; w < kinds; ++w)
                    to.rows[w][scale_place(of(i))] = __fmul_rn(row[i][n], weights[w][n]);
    }
};

// Three warps: the scales of every step.
template <Product P> WEFT_FN void load_scales(const ProductArgs& a, ProductShared<P>& s, u32 rank) {
    if constexpr (P.settled) follow_predecessor();
    Walk<P> walk{s};
    Ring<P.stages> ring;
    Tile tile;
    while (walk.next(tile))
        for (u32 k = 0; k < P.steps(); k += P.scale_ahead()) {
            Scales<P> scales;
            scales.load(a, tile, rank, k);
#pragma unroll
            for (u32 n = 0; n < P.scale_ahead(); ++n) {
                if (k + n >= P.steps()) break;
                s.empty[ring.at].await(ring.parity ^ 1);
                scales.store(s.scales[ring.at], tile.rows, n);
                __syncwarp();
                if (threadIdx.x % warp_lanes == 0) s.full[ring.at].arrive();
                ring.next();
            }
        }
}

// The next lower form of a low tile. Those of 128 rows of FP8 are tall.
template <Product P> constexpr u32 lower(u32 rows) {
    const u32 next = rows - P.row_step_at(rows);
    return P.scaled() && next == tall_rows ? next - row_step : next;
}

// A tile of N low rows; those of fewer go to the next lower form.
template <Product P, u32 N>
WEFT_FN void make_low(const ProductArgs& a, ProductShared<P>& s, const Operands<P>& from,
                      Ring<P.stages>& ring, const Tile& tile, u32 rank, u32 turn) {
    if constexpr (N > row_step) {
        if (tile.rows < N) {
            make_low<P, lower<P>(N)>(a, s, from, ring, tile, rank, turn);
            return;
        }
    }
    float sum[N / 2] = {};
    const u64 home = load_home<P>(a, tile);
    if constexpr (P.scaled()) {
        sum_low<P, N>(s, ring, from, rank, sum);
    } else {
        const Biases<P> biases(a, tile, rank);
        sum_halves<P, N>(s, ring, from, rank, sum);
        biases.add_to(sum);
    }
    if constexpr (P.quantised())
        finish_low_gated<P, N>(a, s, tile, rank, sum, turn);
    else if constexpr (P.gated())
        finish_halves_gated<P, N>(a, s, tile, rank, sum);
    else
        finish_low<P, N>(a, s, tile, rank, sum, home);
}

// One tall tile, or two that share weights.
template <Product P, u32 tiles>
WEFT_FN void make_tall(const ProductArgs& a, ProductShared<P>& s, const Operands<P>& from,
                       Ring<P.stages>& ring, const Tile& tile, u32 rank, u32 turn) {
    float sum[tiles][tall_sums] = {};
    const u64 home = load_home<P>(a, tile);
    if constexpr (tiles == 1)
        sum_tall<P>(s, ring, from, rank, sum[0]);
    else
        sum_twins<P>(s, ring, from, rank, sum);
    if constexpr (P.gated()) {
        finish_tall_gated<P, tiles>(a, s, tile, rank, sum, turn);
    } else {
        share_homes(s, tile, home);
#pragma unroll
        for (u32 t = 0; t < tiles; ++t) finish_tall<P>(a, s, tile, rank, sum[t], t * tall_rows);
    }
}

template <Product P>
WEFT_FN void multiply_tiles(const ProductArgs& a, ProductShared<P>& s, u8* stages, u32 rank) {
    if constexpr (P.settled) follow_predecessor();
    const Operands<P> from(stages);
    Walk<P> walk{s};
    Ring<P.stages> ring;
    Tile tile;
    u32 turn = 0;
    for (; walk.next(tile); ++turn) {
        if constexpr (P.twins()) {
            if (tile.rows > P.single_rows()) {
                make_tall<P, 2>(a, s, from, ring, tile, rank, turn);
                continue;
            }
        }
        if constexpr (P.scaled() && P.most_rows >= tall_rows) {
            if (tile.rows == tall_rows) {
                make_tall<P, 1>(a, s, from, ring, tile, rank, turn);
                continue;
            }
        }
        constexpr bool tall = P.scaled() && P.most_rows == tall_rows;
        constexpr u32 highest = tall ? lower<P>(tall_rows) : P.single_rows();
        make_low<P, highest>(a, s, from, ring, tile, rank, turn);
    }
}

template <Product P> WEFT_FN void make_arrivals(ProductShared<P>& s) {
    for (u32 i = 0; i < P.stages; ++i) {
        // The tiles' thread, and the scales' warps.
        s.full[i].init(P.scaled() ? 1 + scale_warps : 1);
        s.empty[i].init(2 * weight_warps);  // of both CTAs
    }
    s.amax_told[0].init(1);
    s.amax_told[1].init(1);
    publish_arrivals();
}

template <Product P> WEFT_FN void product(const ProductArgs& a) {
    extern __shared__ __align__(1024) u8 memory[];
    ProductShared<P>& s = *reinterpret_cast<ProductShared<P>*>(memory + P.stages * P.stage_bytes());
    const Block team;
    const u32 rank = Cluster{}.rank();
    if (team.lane() == 0) make_arrivals(s);
    if constexpr (!P.settled) follow_predecessor();
    if (team.warp() == 0) {
        count_rows(a, s, team.warp_lane());
        order_experts(s, team.warp_lane());
        count_blocks(s, team.warp_lane());
    }
    __syncthreads();
    meet_cluster();  // no CTA arrives at a neighbour's barriers before they are made
    if (team.lane() < group_threads) {
        give_registers<40>();
        if (team.lane() == 0)
            load_tiles(a, s, memory, rank);
        else if constexpr (P.scaled())
            if (team.warp() != 0) load_scales(a, s, rank);
    } else {
        take_registers<232>();
        multiply_tiles(a, s, memory, rank);
    }
    meet_cluster();  // a neighbour that is still at work arrives here, and loads for both
}

}  // namespace weft
