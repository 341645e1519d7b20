// SPDX-License-Identifier: Apache-2.0
// FP8 in registers: each lane holds sixteen columns, so a block of 128 columns takes eight lanes
// and a block of 32 takes two.
#pragma once
#include <weft/device/copy.cuh>
#include <weft/device/quantize.cuh>
#include <weft/device/team.cuh>

namespace weft {

constexpr u32 lane_columns = 16;

// Two values as e4m3, the first in the low byte. Rounds to nearest even and saturates at 448.
WEFT_FN u32 pack_e4m3(float first, float second) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
}

// sum[0 .. 15] += scale * the sixteen e4m3 values of one 16-byte vector.
WEFT_FN void add_e4m3(float (&sum)[lane_columns], uint4 v, float scale) {
    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < lane_columns / 2; ++i) {
        const u16 pair = u16(word[i / 2] >> (i % 2 * 16));
        u32 halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
        sum[2 * i] += __fmul_rn(low_half(DType::fp16, halves), scale);
        sum[2 * i + 1] += __fmul_rn(high_half(DType::fp16, halves), scale);
    }
}

// sum[i] += weight * (scale * the values), each rounded.
WEFT_FN void add_e4m3(float (&sum)[lane_columns], uint4 v, float scale, float weight) {
    float x[lane_columns] = {};
    add_e4m3(x, v, scale);
#pragma unroll
    for (u32 i = 0; i < lane_columns; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, x[i]));
}

// The 16 columns of one lane, from a row of any dtype.
template <DType D> struct Columns {
    static constexpr u32 vectors = D == DType::fp32 ? 4 : 2;
    uint4 v[vectors];

    WEFT_FN void widen(float (&x)[lane_columns]) const {
        constexpr u32 width = elements_in_vector(D);
#pragma unroll
        for (u32 i = 0; i < vectors; ++i)
            widen_vector<D>(reinterpret_cast<float (&)[width]>(x[i * width]), v[i]);
    }
};

// The largest |x| of a block of `columns`, n to a lane, as bits, in every lane of the block.
template <u32 columns, u32 n> WEFT_FN u32 block_amax_bits(const float (&x)[n]) {
    u32 bits = 0;
#pragma unroll
    for (u32 i = 0; i < n; ++i) bits = max(bits, __float_as_uint(x[i]) & 0x7fffffffu);
#pragma unroll
    for (u32 step = 1; step < columns / n; step *= 2)
        bits = max(bits, __shfl_xor_sync(all_lanes, bits, step));
    return bits;
}

template <u32 n> WEFT_FN void scale_by(float (&x)[n], float by) {
#pragma unroll
    for (u32 i = 0; i < n; ++i) x[i] = __fmul_rn(x[i], by);
}

// x / scale with one rounding, by the rounded inverse of the scale (Markstein): a product minus its
// error. The signs keep -0 as -0.
template <u32 n> WEFT_FN void divide_by(float (&x)[n], const BlockScale& by) {
#pragma unroll
    for (u32 i = 0; i < n; ++i) {
        const float near = __fmul_rn(x[i], by.inverse);
        x[i] = __fmaf_rn(-__fmaf_rn(near, by.scale, -x[i]), by.inverse, near);
    }
}

// x as e4m3 values, four to a word. A block that holds an Inf or a NaN is stored as NaN.
template <u32 n> WEFT_FN void e4m3_words(u32 (&word)[n / 4], const float (&x)[n], bool broken) {
#pragma unroll
    for (u32 i = 0; i < n / 4; ++i)
        word[i] = broken ? 0x7f7f7f7fu
                         : pack_e4m3(x[4 * i], x[4 * i + 1]) | pack_e4m3(x[4 * i + 2], x[4 * i + 3])
                                                                   << 16;
}

// x * inverse as sixteen e4m3 values. A block that holds an Inf or a NaN is stored as NaN.
WEFT_FN uint4 quantize(const float (&x)[lane_columns], float inverse, bool broken) {
    if (broken) return make_uint4(0x7f7f7f7fu, 0x7f7f7f7fu, 0x7f7f7f7fu, 0x7f7f7f7fu);
    u32 word[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
        word[i] = pack_e4m3(__fmul_rn(x[4 * i], inverse), __fmul_rn(x[4 * i + 1], inverse)) |
                  pack_e4m3(__fmul_rn(x[4 * i + 2], inverse), __fmul_rn(x[4 * i + 3], inverse))
                      << 16;
    return make_uint4(word[0], word[1], word[2], word[3]);
}

}  // namespace weft
