// SPDX-License-Identifier: Apache-2.0
// The epilogue: the norm and its FP8 quantisation, elementwise functions of a row and its
// statistics. All lanes of a warp must call it, because the lanes of a group share their maximum;
// `valid` is false for lanes without a vector.
#pragma once
#include <weft/allreduce/row.cuh>

namespace weft {

template <u32 n> WEFT_FN void store_e4m3(u8* to, const float (&x)[n], bool broken) {
    u32 word[n / 4];
    e4m3_words(word, x, broken);
    if constexpr (n == 8)
        store(reinterpret_cast<uint2*>(to), make_uint2(word[0], word[1]));
    else
        store(reinterpret_cast<u32*>(to), word[0]);
}

// One power of two per group, packed by four; the last group pads its word with zeros.
template <Reduction R>
WEFT_FN void store_exponent(const ReduceArgs& a, u32 token, u32 group, u32 exponent) {
    u8* bytes = static_cast<u8*>(a.scale_out) + 4 * (u64(group / 4) * a.scale_stride + token);
    bytes[group % 4] = u8(exponent);
    if (group == R.hidden / scale_columns - 1)
        for (u32 i = group % 4 + 1; i < 4; ++i) bytes[i] = 0;
}

template <Reduction R>
WEFT_FN void quantize_groups(const ReduceArgs& a, u32 token, u32 v, bool valid,
                             float (&x)[R.width()]) {
    constexpr u32 lanes = scale_columns / R.width();
    const u32 amax = block_amax_bits<scale_columns>(x), group = v / lanes;
    const bool leads = valid && v % lanes == 0;
    if (a.coding == Coding::group) {
        const BlockScale scale = block_scale(amax);
        scale_by(x, scale.inverse);
        if (leads)
            static_cast<float*>(a.scale_out)[u64(token) * (R.hidden / scale_columns) + group] =
                scale.scale;
    } else {
        const u32 exponent = group_exponent(amax);
        scale_by(x, mx_inverse(exponent));
        if (leads) store_exponent<R>(a, token, group, exponent);
    }
    if (valid)
        store_e4m3(static_cast<u8*>(a.quant_out) + u64(token) * R.hidden + v * R.width(), x,
                   amax >= infinity_bits);
}

template <Reduction R>
WEFT_FN void quantize_vector(const ReduceArgs& a, u32 token, u32 v, bool valid, uint4 norm,
                             const NormWeight& norm_weight, const RowStats& m) {
    float x[R.width()];
    widen_vector<R.dtype>(x, norm);
    if (a.coding == Coding::group || a.coding == Coding::group_ue8m0)
        return quantize_groups<R>(a, token, v, valid, x);
    u32 amax = 0;
    if (a.coding == Coding::fixed) {
        scale_by(x, norm_weight.inverse);
    } else {
        // Rounding is monotonic, so the largest |norm| is the largest |row * weight|, normed.
        float largest[R.width()] = {};
        largest[0] = __fmul_rn(__uint_as_float(m.peak), m.rstd);
        widen_vector<R.dtype>(largest, round_vector<R.dtype>(largest));
        amax = __float_as_uint(largest[0]) & 0x7fffffffu;
        const BlockScale scale = row_scale(amax);
        divide_by(x, scale);
        if (valid && v == 0) static_cast<float*>(a.scale_out)[token] = scale.scale;
    }
    if (valid)
        store_e4m3(static_cast<u8*>(a.quant_out) + u64(token) * R.hidden + v * R.width(), x,
                   amax >= infinity_bits);
}

// norm = (row * (weight_bias + weight)) * rstd, rounded once, and its FP8.
template <Reduction R>
WEFT_FN void finish_vector(const ReduceArgs& a, u32 token, u32 v, bool valid, uint4 row,
                           const NormWeight& norm_weight, const RowStats& m) {
    float x[R.width()];
    widen_vector<R.dtype>(x, row);
    apply_norm_weight<R>(x, a, norm_weight);
    scale_by(x, m.rstd);
    const uint4 norm = round_vector<R.dtype>(x);
    if (valid && a.norm_out != nullptr) store(vector_of<R>(a.norm_out, token, v), norm);
    if (a.coding != Coding::none) quantize_vector<R>(a, token, v, valid, norm, norm_weight, m);
}

}  // namespace weft
