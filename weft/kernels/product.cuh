// The grouped product on Hopper's tensor cores, FP8 with scales: weights are the first operand, so
// a tile has as many rows as its expert, to a multiple of 16 or 32, and weights are read once.
//
// Two CTAs of a cluster share a tile's rows: each loads half of them for both, and its own 128
// columns of weights. One warpgroup loads, steps ahead of two that multiply, over the borders of
// tiles too: memory never waits for the end of a tile.
#pragma once
#include <weft/kernels/product_finish.cuh>

namespace weft {

// One thread: weights and rows of every step, into the ring.
template <Product P>
WEFT_FN void load_tiles(const ProductArgs& a, ProductShared<P>& s, u8* stages, u32 rank) {
    Walk<P> walk{s};
    Ring<P.stages> ring;
    Tile tile;
    fence_for_bulk();  // the rows were stored, not copied
    for (u32 number = blockIdx.x / 2; walk.find(number, tile); number += gridDim.x / 2) {
        const u64 hint = tile.live == s.counts[tile.expert] ? wanted_once : wanted_again;
        const u32 half = tile.rows / 2;
        for (u32 k = 0; k < P.steps(); ++k, ring.next()) {
            u8* const weights = stages + ring.at * P.stage_bytes();
            u8* const rows = weights + weight_bytes;
            Arrival& full = s.full[ring.at];
            s.empty[ring.at].await(ring.parity ^ 1);
            full.expect(weight_bytes + tile.rows * tile_bytes);
            if constexpr (P.gated())
                load_box5(weights, a.weights_map, k * depth, tile.pair * 16 + rank * 8, tile.expert,
                          full, hint);
            else
                load_box(weights, a.weights_map, k * depth,
                         tile.expert * P.n + tile.pair * pair_columns + rank * tile_columns, full,
                         hint);
            u32 r = rank * half, left = half;
#pragma unroll
            for (u32 box = row_boxes; box-- > 0;)
                for (const u32 high = 8 << box; left >= high; left -= high, r += high)
                    load_box_for(3, rows + r * tile_bytes, a.rows_map[box], k * depth,
                                 tile.first + r, full, wanted_again);
        }
    }
}

// One warp: the scales of every step. Rows of padding have those of the last live row.
template <Product P>
WEFT_FN void load_scales(const ProductArgs& a, ProductShared<P>& s, u32 rank, u32 lane) {
    constexpr u32 each = (P.most_rows + warp_lanes - 1) / warp_lanes, blocks = P.k / depth;
    Walk<P> walk{s};
    Ring<P.stages> ring;
    Tile tile;
    for (u32 number = blockIdx.x / 2; walk.find(number, tile); number += gridDim.x / 2) {
        const float* at[each];
#pragma unroll
        for (u32 i = 0; i < each; ++i)
            at[i] = a.row_scales +
                    i64(tile.first + min(i * warp_lanes + lane, tile.live - 1)) * a.scale_row;
        // A gated tile takes 64 columns of each half: gate's block by lane 0, up's by lane 1.
        const u32 block = P.gated() ? tile.pair + lane * (P.n / 2 / depth) : tile.pair * 2 + rank;
        const float* weights =
            a.weight_scales + (u64(tile.expert) * (P.n / depth) + block) * blocks;
        for (u32 k = 0; k < P.steps(); ++k, ring.next()) {
            s.empty[ring.at].await(ring.parity ^ 1);
            StepScales<P>& scales = s.scales[ring.at];
#pragma unroll
            for (u32 i = 0; i < each; ++i) {
                if (i * warp_lanes + lane < tile.rows)
                    copy_word(&scales.rows[i * warp_lanes + lane], at[i]);
                at[i] += a.scale_step;
            }
            if (lane < (P.gated() ? 2 : 1)) copy_word(&scales.weights[lane], weights + k);
            arrive_when_copied(s.full[ring.at]);
        }
    }
}

// A warp has read all it needs of a stage: both CTAs may load into it again. The neighbour loads
// rows only, which none but finished products have read; scales are this CTA's own.
template <Product P> WEFT_FN void release_stage(ProductShared<P>& s, u32 at, u32 rank, u32 lane) {
    __syncwarp();
    if (lane == 0) s.empty[at].arrive();
    if (lane == 1) arrive_at(rank ^ 1, s.empty[at]);
}

// The tensor cores begin one part of a step: 64 columns of this warpgroup by `width` rows.
template <u32 width> WEFT_FN void begin_part(float (&part)[width / 2], u32 stage, u32 p) {
    const u32 group = threadIdx.x / group_threads - 1;
    const u64 weights = describe_tile(stage + group * (weight_bytes / 2));
    const u64 rows = describe_tile(stage + weight_bytes + p * width * tile_bytes);
    begin_products();
#pragma unroll
    for (u32 i = 0; i < depth / 32; ++i) multiply<width>(part, weights + i * 2, rows + i * 2, i != 0);
    commit_products();
}

// `sum += part * (scale of row * scale of weights)`, rounded once each; rows are the columns here.
// All but the latest `open` groups of products are waited for first.
template <Product P, u32 width, u32 open, u32 N>
WEFT_FN void add_part(float (&sum)[N], float (&part)[width / 2], const StepScales<P>& scales, u32 p) {
    const float2* const own =
        reinterpret_cast<const float2*>(scales.rows + p * width) + threadIdx.x % 4;
    const float first = scales.weights[0], second = scales.weights[P.gated() ? 1 : 0];
    float2 row[width / 8];
#pragma unroll
    for (u32 j = 0; j < width / 8; ++j) row[j] = own[4 * j];
    await_products<open>();
    settle_products(part);
#pragma unroll
    for (u32 j = 0; j < width / 8; ++j) {
        const float x = __fmul_rn(row[j].x, first), y = __fmul_rn(row[j].y, first);
        const float u = P.gated() ? __fmul_rn(row[j].x, second) : x;
        const float v = P.gated() ? __fmul_rn(row[j].y, second) : y;
        float* const to = &sum[p * (width / 2) + 4 * j];
        to[0] = __fmaf_rn(part[4 * j], x, to[0]);
        to[1] = __fmaf_rn(part[4 * j + 1], y, to[1]);
        to[2] = __fmaf_rn(part[4 * j + 2], u, to[2]);
        to[3] = __fmaf_rn(part[4 * j + 3], v, to[3]);
    }
}

// A tile of N rows, from the ring to its sums. Of several parts, one is on the tensor cores while
// another is added. None is left there from one step to the next: ptxas would then wait for each.
template <Product P, u32 N>
WEFT_FN void multiply_tile(ProductShared<P>& s, u8* stages, Ring<P.stages>& ring, u32 rank,
                           float (&sum)[N / 2]) {
    constexpr u32 parts = parts_of(N), width = part_rows(N);
    const u32 lane = threadIdx.x % warp_lanes, base = u32(__cvta_generic_to_shared(stages));
#pragma unroll
    for (u32 i = 0; i < N / 2; ++i) sum[i] = 0.0f;
#pragma unroll 1
    for (u32 k = 0; k < P.steps(); ++k, ring.next()) {
        const u32 stage = base + ring.at * P.stage_bytes();
        const StepScales<P>& scales = s.scales[ring.at];
        float part[parts == 1 ? 1 : 2][width / 2];
        s.full[ring.at].await(ring.parity);
        begin_part<width>(part[0], stage, 0);
#pragma unroll
        for (u32 p = 1; p < parts; ++p) {
            begin_part<width>(part[p % 2], stage, p);
            add_part<P, width, 1>(sum, part[(p - 1) % 2], scales, p - 1);
        }
        add_part<P, width, 0>(sum, part[(parts - 1) % 2], scales, parts - 1);
        release_stage(s, ring.at, rank, lane);
    }
}

// Tiles of N rows; those of fewer go to the next narrower form.
template <Product P, u32 N>
WEFT_FN void make_tile(const ProductArgs& a, ProductShared<P>& s, u8* stages, Ring<P.stages>& ring,
                       const Tile& tile, u32 rank, u32& turn) {
    if constexpr (N > P.step) {
        if (tile.rows < N) {
            make_tile<P, N - P.step>(a, s, stages, ring, tile, rank, turn);
            return;
        }
    }
    float sum[N / 2];
    const u64 home = load_home(a, tile);
    multiply_tile<P, N>(s, stages, ring, rank, sum);
    if constexpr (P.gated())
        finish_gated<P, N>(a, s, tile, rank, sum, turn);
    else
        finish_rows<P, N>(a, s, tile, rank, sum, home, turn);
}

template <Product P> WEFT_FN void multiply_tiles(const ProductArgs& a, ProductShared<P>& s,
                                                 u8* stages, u32 rank) {
    Walk<P> walk{s};
    Ring<P.stages> ring;
    Tile tile;
    u32 turn = 0;
    for (u32 number = blockIdx.x / 2; walk.find(number, tile); number += gridDim.x / 2)
        make_tile<P, P.most_rows>(a, s, stages, ring, tile, rank, turn);
}

template <Product P> WEFT_FN void make_arrivals(ProductShared<P>& s) {
    for (u32 i = 0; i < P.stages; ++i) {
        s.full[i].init(1 + warp_lanes);      // the tiles' thread, and the scales' warp
        s.empty[i].init(2 * weight_warps);   // of both CTAs
    }
    s.amax_told[0].init(1);
    s.amax_told[1].init(1);
    publish_arrivals();
}

template <Product P> WEFT_FN void product(const ProductArgs& a) {
    extern __shared__ __align__(1024) u8 memory[];
    ProductShared<P>& s = *reinterpret_cast<ProductShared<P>*>(memory + P.stages * P.stage_bytes());
    const Block team;
    const Cluster cluster;
    const u32 rank = cluster.rank();
    if (team.lane() == 0) make_arrivals(s);
    wait_for_predecessor();
    admit_successor();
    if (team.warp() == 0) survey(a, s, team.warp_lane());
    __syncthreads();
    cluster.meet_only();  // no CTA arrives at a neighbour's barriers before they are made
    if (team.lane() < group_threads) {
        give_registers<40>();
        if (team.lane() == 0)
            load_tiles(a, s, memory, rank);
        else if (team.warp() == 1)
            load_scales(a, s, rank, team.warp_lane());
    } else {
        take_registers<232>();
        multiply_tiles(a, s, memory, rank);
    }
    cluster.meet_only();  // a neighbour that is still at work arrives here, and loads for both
}

}  // namespace weft
