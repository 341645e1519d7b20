// SPDX-License-Identifier: Apache-2.0
// Rows of the fused all-reduce on a CPU: their source, their sums, and their outputs.
#pragma once
#include <vector>

#include <weft/allreduce/layout.cuh>
#include <weft/allreduce/rmsnorm.cuh>
#include <weft/device/cpu.hpp>

namespace weft {

template <DType D> float factor(const void* from, u64 at, bool is_fp32) {
    return is_fp32 ? static_cast<const float*>(from)[at]
                   : widen<D>(static_cast<const Bits<D>*>(from)[at]);
}

// This rank's row of a token: the input, or the weighted sum of experts' rows.
template <Reduction R> void load_row(const ReduceArgs& a, u32 token, u8* to) {
    using Element = Bits<R.dtype>;
    const u64 first = u64(token) * R.hidden;
    if (a.x != nullptr) {
        std::memcpy(to, static_cast<const Element*>(a.x) + first, R.row_bytes());
        return;
    }
    std::vector<float> sum(R.hidden, 0.0f);
    for (u32 k = 0; k < a.top_k; ++k) {
        const u64 entry = u64(token) * a.top_k + k;
        const u32 row = source_row<R>(a, a.index[entry], token, k, true);
        if (row == a.row_limit) continue;
        const float scale = a.scales ? factor<R.dtype>(a.scales, entry, a.scales_are_fp32) : 1.0f;
        const Element* from = static_cast<const Element*>(a.rows) + u64(row) * R.hidden;
        for (u32 i = 0; i < R.hidden; ++i) sum[i] = sum[i] + widen<R.dtype>(from[i]) * scale;
    }
    for (float& x : sum) x = x * a.routed_scaling_factor;
    const Element* shared = static_cast<const Element*>(a.shared) + first;
    Element* row = reinterpret_cast<Element*>(to);
    for (u32 i = 0; i < R.hidden; ++i)
        row[i] = narrow<R.dtype>(a.shared ? sum[i] + widen<R.dtype>(shared[i]) : sum[i]);
}

// One row of a call.
template <Reduction R> struct Row {
    std::vector<u8> bytes = std::vector<u8>(R.row_bytes());
    u8* data() { return bytes.data(); }
    Bits<R.dtype>* numbers() { return reinterpret_cast<Bits<R.dtype>*>(bytes.data()); }
    float operator[](u32 i) const {
        return widen<R.dtype>(reinterpret_cast<const Bits<R.dtype>*>(bytes.data())[i]);
    }
};

// The sum of all ranks' rows in rank order, in fp32, rounded once.
template <Reduction R> void sum_rows(const std::vector<Row<R>>& rows, Row<R>& to) {
    for (u32 i = 0; i < R.hidden; ++i) {
        float sum = rows[0][i];
        for (u32 rank = 1; rank < R.ranks; ++rank) sum = sum + rows[rank][i];
        to.numbers()[i] = narrow<R.dtype>(sum);
    }
}

template <Reduction R> void add_residual(const ReduceArgs& a, u32 token, Row<R>& row) {
    if (a.residual == nullptr) return;
    const auto* from = static_cast<const Bits<R.dtype>*>(a.residual) + u64(token) * R.hidden;
    for (u32 i = 0; i < R.hidden; ++i)
        row.numbers()[i] = narrow<R.dtype>(row[i] + widen<R.dtype>(from[i]));
}

inline float butterfly(float (&lane)[32]) {
    for (u32 step = 16; step != 0; step /= 2)
        for (u32 l = 0; l < step; ++l) lane[l] = lane[l] + lane[l + step];
    return lane[0];
}

template <Reduction R> float weighted(const ReduceArgs& a, const Row<R>& row, u32 i) {
    return row[i] * (a.weight_bias + factor<R.dtype>(a.weight, i, a.weight_is_fp32));
}

// 1 / rms of a row, and its largest |row * weight|.
struct RowStats {
    float rstd;
    u32 peak;
};

template <Reduction R> RowStats measure(const ReduceArgs& a, const Row<R>& row) {
    float lane[32], total[32] = {};
    for (u32 w = 0; w < R.partials(); ++w) {
        for (u32 l = 0; l < 32; ++l) {
            float x[R.width()];
            const u32 v = w * 32 + l;
            for (u32 i = 0; i < R.width(); ++i) x[i] = v < R.vectors() ? row[v * R.width() + i] : 0;
            lane[l] = square_sum(x);
        }
        total[w % 32] = total[w % 32] + butterfly(lane);
    }
    u32 peak = 0;
    for (u32 i = 0; i < R.hidden; ++i) {
        const u32 size = std::bit_cast<u32>(weighted<R>(a, row, i)) & 0x7fffffffu;
        peak = size > peak ? size : peak;
    }
    return {inverse_rms(butterfly(total), R.hidden, a.eps), peak};
}

template <Reduction R> void store_row(void* to, u32 token, Row<R>& row) {
    if (to != nullptr)
        std::memcpy(static_cast<u8*>(to) + u64(token) * R.row_bytes(), row.data(), R.row_bytes());
}

// The FP8 of one block of normed values, with its scale.
template <Reduction R>
void quantize_group(const ReduceArgs& a, u32 token, u32 group, const float (&x)[scale_columns]) {
    u8* to = static_cast<u8*>(a.quant_out) + u64(token) * R.hidden + group * scale_columns;
    const u32 amax = amax_bits_of(x);
    if (a.coding == Coding::group) {
        const BlockScale scale = block_scale(amax);
        static_cast<float*>(a.scale_out)[u64(token) * (R.hidden / scale_columns) + group] =
            scale.scale;
        return store_block(x, scale.inverse, amax >= infinity_bits, to);
    }
    const u32 exponent = group_exponent(amax);
    u8* bytes = static_cast<u8*>(a.scale_out) + 4 * (u64(group / 4) * a.scale_stride + token);
    bytes[group % 4] = u8(exponent);
    if (group == R.hidden / scale_columns - 1)
        for (u32 i = group % 4 + 1; i < 4; ++i) bytes[i] = 0;
    store_block(x, mx_inverse(exponent), amax >= infinity_bits, to);
}

template <Reduction R>
void quantize_normed(const ReduceArgs& a, u32 token, Row<R>& norm, u32 peak) {
    if (a.coding == Coding::group || a.coding == Coding::group_ue8m0) {
        for (u32 group = 0; group < R.hidden / scale_columns; ++group) {
            float x[scale_columns];
            for (u32 i = 0; i < scale_columns; ++i) x[i] = norm[group * scale_columns + i];
            quantize_group<R>(a, token, group, x);
        }
        return;
    }
    u8* to = static_cast<u8*>(a.quant_out) + u64(token) * R.hidden;
    const BlockScale scale = row_scale(peak);
    if (a.coding == Coding::token) static_cast<float*>(a.scale_out)[token] = scale.scale;
    for (u32 i = 0; i < R.hidden; ++i)
        to[i] = a.coding == Coding::fixed ? to_e4m3(norm[i] * (1.0f / *a.scale))
                : peak >= infinity_bits   ? 0x7f
                                          : to_e4m3(norm[i] / scale.scale);
}

// The epilogue, which is elementwise given the row's statistics.
template <Reduction R> void finish_row(const ReduceArgs& a, u32 token, Row<R>& row, RowStats m) {
    if (a.weight == nullptr) return;
    Row<R> norm;
    for (u32 i = 0; i < R.hidden; ++i)
        norm.numbers()[i] = narrow<R.dtype>(weighted<R>(a, row, i) * m.rstd);
    store_row<R>(a.norm_out, token, norm);
    const float peak = widen<R.dtype>(narrow<R.dtype>(std::bit_cast<float>(m.peak) * m.rstd));
    if (a.coding != Coding::none)
        quantize_normed<R>(a, token, norm, std::bit_cast<u32>(peak) & 0x7fffffffu);
}

// Computes all outputs of a token from its rounded sum.
template <Reduction R> void finish_sum(const ReduceArgs& a, u32 token, Row<R>& row) {
    store_row<R>(a.out, token, row);
    add_residual<R>(a, token, row);
    store_row<R>(a.residual_out, token, row);
    if (a.weight != nullptr) finish_row<R>(a, token, row, measure<R>(a, row));
}

}  // namespace weft
