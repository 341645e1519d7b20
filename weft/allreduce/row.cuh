// SPDX-License-Identifier: Apache-2.0
// One 16-byte vector of a row in the fused all-reduce: its source, its sum over the ranks, and the
// statistics of its row. A thread holds one vector and a warp 32 neighbouring ones, in every launch
// shape, so that the tree of the norm never changes.
#pragma once
#include <weft/allreduce/layout.cuh>
#include <weft/allreduce/rmsnorm.cuh>
#include <weft/device/quantize_warp.cuh>
#include <weft/device/sentinel_vector.cuh>

namespace weft {

template <Reduction R> WEFT_FN uint4* vector_of(const void* rows, u32 token, u32 v) {
    return static_cast<uint4*>(const_cast<void*>(rows)) + u64(token) * R.vectors() + v;
}

// An element of a tensor that may be fp32 or of the row's dtype.
template <Reduction R> WEFT_FN float factor(const void* from, u64 at, bool is_fp32) {
    if (is_fp32 || R.dtype == DType::fp32) return static_cast<const float*>(from)[at];
    return low_half(R.dtype, static_cast<const u16*>(from)[at]);
}

// This rank's row as the weighted sum of experts' rows. reports: whether out-of-range indices are
// reported.
template <Reduction R>
WEFT_FN uint4 finalize_vector(const ReduceArgs& a, u32 token, u32 v, bool reports) {
    float sum[R.width()] = {}, x[R.width()];
    for (u32 k = 0; k < a.top_k; ++k) {
        const u64 entry = u64(token) * a.top_k + k;
        const u32 row = source_row<R>(a, a.index[entry], token, k, reports && v == 0);
        if (row == a.row_limit) continue;
        const float scale = a.scales ? factor<R>(a.scales, entry, a.scales_are_fp32) : 1.0f;
        widen_vector<R.dtype>(x, load_input(vector_of<R>(a.rows, row, v)));
#pragma unroll
        for (u32 i = 0; i < R.width(); ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(x[i], scale));
    }
#pragma unroll
    for (u32 i = 0; i < R.width(); ++i) sum[i] = __fmul_rn(sum[i], a.routed_scaling_factor);
    if (a.shared != nullptr) add_vector<R.dtype>(sum, load_input(vector_of<R>(a.shared, token, v)));
    return round_vector<R.dtype>(sum);
}

// moe: rows are computed from experts' rows. It is a separate entry, because it costs registers.
template <Reduction R, bool moe>
WEFT_FN uint4 load_own(const ReduceArgs& a, u32 token, u32 v, bool reports = true) {
    if constexpr (moe) return finalize_vector<R>(a, token, v, reports);
    return load_input(vector_of<R>(a.x, token, v));
}

// The inputs of the epilogue other than the row. They are loaded early, so that a wait hides the
// latency.
struct NormWeight {
    uint4 low, high;  // the weights of the vector's columns
    float inverse;    // of the scale, with Coding::fixed
};

template <Reduction R> WEFT_FN NormWeight load_norm_weight(const ReduceArgs& a, u32 v) {
    NormWeight norm_weight{};
    if (a.weight == nullptr) return norm_weight;
    const uint4* weight = static_cast<const uint4*>(a.weight);
    if (R.dtype == DType::fp32 || !a.weight_is_fp32) {
        norm_weight.low = load_input(weight + v);
    } else {
        norm_weight.low = load_input(weight + 2 * v);
        norm_weight.high = load_input(weight + 2 * v + 1);
    }
    if (a.coding == Coding::fixed) norm_weight.inverse = __fdiv_rn(1.0f, *a.scale);
    return norm_weight;
}

// x *= weight_bias + weight
template <Reduction R>
WEFT_FN void apply_norm_weight(float (&x)[R.width()], const ReduceArgs& a,
                               const NormWeight& norm_weight) {
    float weight[R.width()];
    if (R.dtype == DType::fp32 || !a.weight_is_fp32) {
        widen_vector<R.dtype>(weight, norm_weight.low);
    } else {
        const uint4 v[2] = {norm_weight.low, norm_weight.high};
#pragma unroll
        for (u32 i = 0; i < R.width(); ++i) {
            const u32 word[4] = {v[i / 4].x, v[i / 4].y, v[i / 4].z, v[i / 4].w};
            weight[i] = __uint_as_float(word[i % 4]);
        }
    }
#pragma unroll
    for (u32 i = 0; i < R.width(); ++i) x[i] = __fmul_rn(x[i], __fadd_rn(a.weight_bias, weight[i]));
}

// The vector that a sum uses for a rank that has exited.
template <DType D> WEFT_FN uint4 neutral_vector() {
    constexpr u32 word = neutral_word<D>;
    return make_uint4(word, word, word, word);
}

// The sum of all ranks' vectors in rank order, in fp32, rounded once.
template <Reduction R> WEFT_FN uint4 sum_in_order(const uint4 (&row)[R.ranks]) {
    float sum[R.width()];
    widen_vector<R.dtype>(sum, row[0]);
#pragma unroll
    for (u32 rank = 1; rank < R.ranks; ++rank) add_vector<R.dtype>(sum, row[rank]);
    // A sum turns every NaN into the canonical NaN of GPUs; with one rank there is no addition.
    if constexpr (R.ranks == 1)
        for (u32 i = 0; i < R.width(); ++i)
            if (sum[i] != sum[i]) sum[i] = __uint_as_float(0x7fffffffu);
    return round_vector<R.dtype>(sum);
}

template <Reduction R> WEFT_FN uint4 add_rounded(uint4 sum, uint4 residual) {
    float x[R.width()];
    widen_vector<R.dtype>(x, sum);
    add_vector<R.dtype>(x, residual);
    return round_vector<R.dtype>(x);
}

// The statistics of a row; warps exchange partials of them.
struct RowStats {
    float rstd;
    u32 peak;  // bits of the largest |row * weight|; Coding::token needs it
};

WEFT_FN float butterfly(float sum) {
#pragma unroll
    for (u32 step = 16; step != 0; step /= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(all_lanes, sum, step));
    return sum;
}

// The sum of squares and the peak of 32 vectors, in every lane; lanes beyond the row contribute
// zeros.
template <Reduction R>
WEFT_FN u64 partial_of(const ReduceArgs& a, uint4 row, const NormWeight& norm_weight) {
    float x[R.width()];
    widen_vector<R.dtype>(x, row);
    const float squares = butterfly(square_sum(x));
    u32 peak = 0;
    if (a.coding == Coding::token) {
        apply_norm_weight<R>(x, a, norm_weight);
#pragma unroll
        for (u32 i = 0; i < R.width(); ++i) peak = max(peak, __float_as_uint(x[i]) & 0x7fffffffu);
        peak = __reduce_max_sync(all_lanes, peak);
    }
    return u64(peak) << 32 | __float_as_uint(squares);
}

// The partials of a row, double-buffered: those of one row may still be read while those of the
// next one arrive.
template <Reduction R> struct PartialBuffer {
    u64 partial[2][R.partials()];
};

// Sends one warp's partial to all CTAs of its cluster.
template <Reduction R>
WEFT_FN void send_partial(const Block& team, const Cluster& cluster, u64* at, u64 partial) {
    const u32 neighbours = cluster.size();
    if (neighbours == 1) {
        if (team.warp_lane() == 0) *at = partial;
    } else if (team.warp_lane() < neighbours) {
        cluster.store_at(team.warp_lane(), at, partial);
    }
}

template <Reduction R>
WEFT_FN RowStats gather_row_stats(const Block& team, const ReduceArgs& a,
                                  const u64 (&partial)[R.partials()]) {
    float total = 0.0f;
    u32 peak = 0;
    for (u32 i = team.warp_lane(); i < R.partials(); i += warp_lanes) {
        total = __fadd_rn(total, __uint_as_float(u32(partial[i])));
        peak = max(peak, u32(partial[i] >> 32));
    }
    return {inverse_rms(butterfly(total), R.hidden, a.eps), __reduce_max_sync(all_lanes, peak)};
}

}  // namespace weft
