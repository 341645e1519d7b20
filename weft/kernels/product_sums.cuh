// A tile from its first step to its end. Weights are the first operand, rows the second, whose
// width is any multiple of 8: a tile has as many rows as its expert, to a multiple of 16. Each
// warpgroup has half of a CTA's columns; where gating is wanted, one the gates and one the ups.
#pragma once
#include <weft/kernels/product_gated.cuh>

namespace weft {

constexpr u32 scales_ahead = 3;  // float4s that are read while products are awaited

// The product of one step: `sum += part * scale`, rounded once.
template <Product P, u32 N>
WEFT_FN void add_step(float (&sum)[N / 2], u64 weights, u64 rows, const float* scales) {
    constexpr u32 all = N / 16, ahead = all < scales_ahead ? all : scales_ahead;
    const float4* const at = reinterpret_cast<const float4*>(scales) + threadIdx.x % 4;
    float part[N / 2];
    float4 first[ahead];
    begin_step<N>(part, weights, rows);
#pragma unroll
    for (u32 j = 0; j < ahead; ++j) first[j] = at[4 * j];
    await_step(part);
#pragma unroll
    for (u32 j = 0; j < all; ++j) {
        const float4 scale = j < ahead ? first[j] : at[4 * j];
        const float by[4] = {scale.x, scale.y, scale.z, scale.w};
#pragma unroll
        for (u32 i = 0; i < 8; ++i)
            sum[8 * j + i] = __fmaf_rn(part[8 * j + i], by[i / 4 * 2 + i % 2], sum[8 * j + i]);
    }
}

// A tile of N rows; those of fewer go to the next narrower form.
template <Product P, u32 N>
WEFT_FN void make_tile(const ProductArgs& a, ProductShared<P>& s, u8* stages, Ring<P.stages>& ring,
                       const Tile& tile, u32 rank, u32 turn) {
    if constexpr (N > row_step) {
        if (tile.rows < N) {
            make_tile<P, N - row_step>(a, s, stages, ring, tile, rank, turn);
            return;
        }
    }
    const u32 group = __shfl_sync(all_lanes, multiplier() / group_threads, 0);
    const u32 at = u32(__cvta_generic_to_shared(stages));
    const u64 weights = describe_tile(at + group * (weight_bytes / 2));
    const u64 rows = describe_tile(at + weight_bytes);
    const u64 home = load_home<P>(a, tile);
    float sum[N / 2];
#pragma unroll
    for (u32 i = 0; i < N / 2; ++i) sum[i] = 0.0f;
#pragma unroll 1
    for (u32 k = 0; k < P.steps(); ++k, ring.next()) {
        const u32 skip = ring.at * (P.stage_bytes() / 16);  // descriptors count so
        s.full[ring.at].await(ring.parity);
        add_step<P, N>(sum, weights + skip, rows + skip,
                       s.scales[ring.at].rows[P.gated() ? group : 0]);
        release_stage(s, ring.at, rank);
    }
    if constexpr (P.gated())
        finish_gated<P, N>(a, s, tile, rank, sum, turn);
    else
        finish_rows<P, N>(a, s, tile, rank, sum, home);
}

}  // namespace weft
