// The sums of a tile, step after step, in one of two ways.
//
// Low: weights are the first operand, rows the second, which may be narrow: as many as there are,
// to a multiple of 16. Each warpgroup has half of the columns. A thread holds, for rows
// 8 j + 2 (lane % 4) + {0, 1}, two columns: sums 4 j and 4 j + 1 of column lane / 4 of its warp's
// sixteen, 4 j + 2 and 4 j + 3 of the column eight further on. It needs a quarter of all scales.
//
// Tall, for the rows of a full block: rows are the first operand, 64 for each warpgroup. A thread
// holds rows lane / 4 and eight further on of its warp's sixteen; of the first, columns
// 8 j + 2 (lane % 4) + {0, 1} in sums 4 j and 4 j + 1, of the second in 4 j + 2 and 4 j + 3. It
// needs two scales: what shared memory has to give is left to the tensor cores.
//
// Twins: two tall ones, one's rows behind the other's, for each stage of weights: an expert with
// many rows asks L2 for a third less.
#pragma once
#include <weft/gemm/tiles.cuh>

namespace weft {

constexpr u32 multipliers = 2 * group_threads;
constexpr u32 tall_sums = tile_columns / 2;
constexpr u32 scales_ahead = 3;  // float4s that are read while products are awaited

// Those who multiply wait for each other.
WEFT_FN void meet_multipliers() { meet(1, multipliers); }
WEFT_FN u32 multiplier() { return threadIdx.x - group_threads; }
WEFT_FN u32 multiplier_group() { return multiplier() / group_threads; }

// This warp's first row of a tall tile.
WEFT_FN u32 tall_row() { return multiplier() / warp_lanes * 16; }

// A warp has read all it needs of a stage: both CTAs may load into it again. The neighbour loads
// rows only, which none but finished products have read; scales are this CTA's own.
template <Product P> WEFT_FN void release_stage(ProductShared<P>& s, u32 at, u32 rank) {
    const u32 lane = threadIdx.x % warp_lanes;
    __syncwarp();
    if (lane == 0) s.empty[at].arrive();
    if (lane == 1) arrive_at(rank ^ 1, s.empty[at]);
}

// The operands of the first stage, as wgmma is told of them, and where a thread's scales lie.
template <Product P> struct Operands {
    u64 half, rows;    // low: the group's columns, and all rows
    u64 block, all;    // tall: the group's rows, and all columns
    u32 low, tall[2];  // the thread's scales

    WEFT_FN explicit Operands(u8* stages) {
        // One value for the whole warp, so that the compiler keeps it as one.
        const u32 group = __shfl_sync(all_lanes, multiplier_group(), 0), lane = threadIdx.x % 32;
        const u32 at = u32(__cvta_generic_to_shared(stages));
        half = describe_tile(at + group * (weight_bytes / 2));
        rows = describe_tile(at + weight_bytes);
        block = describe_tile(at + weight_bytes + group * (tall_rows / 2) * tile_bytes);
        all = describe_tile(at);
        low = (P.gated() ? group * P.most_rows : 0) + lane % 4 * 4;
        tall[0] = scale_place(tall_row() + lane / 4);
        tall[1] = scale_place(tall_row() + lane / 4 + 8);
    }
};

// How far the descriptors of a stage are from those of the first: they count in 16 bytes.
template <Product P> WEFT_FN u32 skip_to(u32 stage) { return stage * (P.stage_bytes() / 16); }

// A step of a low tile in the making.
template <Product P, u32 N> struct LowStep {
    static constexpr u32 ahead = N / 16 < scales_ahead ? N / 16 : scales_ahead;
    float part[N / 2];
    float4 first[ahead];
    const float4* scales;

    WEFT_FN void begin(const Operands<P>& from, u32 stage) {
        begin_step<P.operand, N>(part, from.half + skip_to<P>(stage), from.rows + skip_to<P>(stage),
                                 false);
    }
    WEFT_FN void read(const Operands<P>& from, const ProductShared<P>& s, u32 stage) {
        scales = reinterpret_cast<const float4*>(s.scales[stage].rows[0] + from.low);
#pragma unroll
        for (u32 j = 0; j < ahead; ++j) first[j] = scales[4 * j];
    }
    // `sum += part * scale`, rounded once.
    template <u32 but> WEFT_FN void add(float (&sum)[N / 2]) {
        await_step<but>(part);
#pragma unroll
        for (u32 j = 0; j < N / 16; ++j) {
            const float4 scale = j < ahead ? first[j] : scales[4 * j];
            const float by[4] = {scale.x, scale.y, scale.z, scale.w};
#pragma unroll
            for (u32 i = 0; i < 8; ++i)
                sum[8 * j + i] = __fmaf_rn(part[8 * j + i], by[i / 4 * 2 + i % 2], sum[8 * j + i]);
        }
    }
};

// A step of a tall tile, or of one of twins: 0 or 1.
template <Product P> struct TallStep {
    float part[tall_sums], by[2][2];  // of gates' and of ups' columns, for both rows

    WEFT_FN void begin(const Operands<P>& from, u32 stage, u32 twin = 0) {
        begin_step<P.operand, tile_columns>(
            part, from.block + skip_to<P>(stage) + twin * (tall_rows * tile_bytes / 16),
            from.all + skip_to<P>(stage), false);
    }
    WEFT_FN void read(const Operands<P>& from, const ProductShared<P>& s, u32 stage, u32 twin = 0) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            by[i / 2][i % 2] =
                s.scales[stage].rows[P.gated() ? i / 2 : 0][from.tall[i % 2] + twin * tall_rows];
    }
    template <u32 but> WEFT_FN void add(float (&sum)[tall_sums]) {
        await_step<but>(part);
#pragma unroll
        for (u32 i = 0; i < tall_sums; ++i)
            sum[i] = __fmaf_rn(part[i], by[i / (tall_sums / 2)][i / 2 % 2], sum[i]);
    }
};

template <Product P, u32 N>
WEFT_FN void sum_low(ProductShared<P>& s, Ring<P.stages>& ring, const Operands<P>& from, u32 rank,
                     float (&sum)[N / 2]) {
#pragma unroll 1
    for (u32 k = 0; k < P.steps(); ++k, ring.next()) {
        LowStep<P, N> step;
        s.full[ring.at].await(ring.parity);
        step.begin(from, ring.at);
        step.read(from, s, ring.at);
        step.template add<0>(sum);
        release_stage(s, ring.at, rank);
    }
}

// A step of one, then of the other. Sums leave no registers for two steps' products, so it is the
// other warpgroup whose are made while this one adds.
template <Product P>
WEFT_FN void sum_twins(ProductShared<P>& s, Ring<P.stages>& ring, const Operands<P>& from, u32 rank,
                       float (&sum)[2][tall_sums]) {
#pragma unroll 1
    for (u32 k = 0; k < P.steps(); ++k, ring.next()) {
        s.full[ring.at].await(ring.parity);
#pragma unroll
        for (u32 twin = 0; twin < 2; ++twin) {
            TallStep<P> step;
            step.begin(from, ring.at, twin);
            step.read(from, s, ring.at, twin);
            step.template add<0>(sum[twin]);
        }
        release_stage(s, ring.at, rank);
    }
}

// Two steps at a time: the first is added while the second is made.
template <Product P>
WEFT_FN void sum_tall(ProductShared<P>& s, Ring<P.stages>& ring, const Operands<P>& from, u32 rank,
                      float (&sum)[tall_sums]) {
    u32 k = 0;
#pragma unroll 1
    for (; k + 1 < P.steps(); k += 2, ring.next()) {
        TallStep<P> one, two;
        const u32 stage = ring.at;
        s.full[stage].await(ring.parity);
        one.begin(from, stage);
        ring.next();
        s.full[ring.at].await(ring.parity);
        two.begin(from, ring.at);
        one.read(from, s, stage);
        one.template add<1>(sum);
        release_stage(s, stage, rank);
        two.read(from, s, ring.at);
        two.template add<0>(sum);
        release_stage(s, ring.at, rank);
    }
    if (k == P.steps()) return;
    TallStep<P> last;
    s.full[ring.at].await(ring.parity);
    last.begin(from, ring.at);
    last.read(from, s, ring.at);
    last.template add<0>(sum);
    release_stage(s, ring.at, rank);
    ring.next();
}

}  // namespace weft
