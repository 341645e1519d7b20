// SPDX-License-Identifier: Apache-2.0
// Block-scaled FP8 (e4m3) in plain arithmetic: the same bits on CPU and GPU.
//
// fp8    a block is 128 columns with one fp32 scale: scale = amax / 448,
//        q = round(x * (448 / amax)), and x reads back as q * scale.
// mxfp8  a block is 32 columns with one power of two, stored as its exponent + 127 (UE8M0): the
//        smallest that scales amax to at most 448.
//
// The all-reduce also has `row_scale`, one for a row, and `group_exponent`, UE8M0 of 128 columns,
// as in other libraries.
//
// A block of zeros is stored as zeros; fp8 treats a block below 2^-117 as one. A block that holds
// an Inf or a NaN has scale NaN, so all of it reads back as NaN: the error stays visible and stays
// in its block.
#pragma once
#include <weft/device/order.cuh>

namespace weft {

// How dispatch stores the first payload: as opaque bytes, or as FP8 with scales.
enum class Quant : u32 { none = 0, fp8 = 1, mxfp8 = 2 };

constexpr float fp8_max = 448.0f;
constexpr float inverse_fp8_max = 1.0f / fp8_max;  // rounded: other libraries multiply by it
constexpr u32 infinity_bits = 0x7f800000u;
constexpr u32 scale_columns = 128;
constexpr u32 mx_columns = 32;
constexpr u32 smallest_amax_bits = 0x05000000u;  // 2^-117: amax / 448 is still a normal number

struct BlockScale {
    float scale;    // dequantises: x = q * scale
    float inverse;  // quantises: q = round(x * inverse)
};

#if defined(__CUDA_ARCH__)
// x / y, rounded once, for x and y from 1 to 448 (tests/device/test_quotient.py). reciprocal: of y,
// to two ulp. The language's division calls a function for very small or large numbers, and ptxas
// makes warps yield at the head of the loops of a kernel with calls: a k block of the gated GEMM
// took 7 % longer.
WEFT_FN float quotient(float x, float y, float reciprocal) {
    reciprocal = __fmaf_rn(__fmaf_rn(-y, reciprocal, 1.0f), reciprocal, reciprocal);
    const float near = x * reciprocal;
    return __fmaf_rn(__fmaf_rn(-y, near, x), reciprocal, near);
}

// amax is m * 2^e with m from 1 to 2. Both quotients of m are normal numbers, and so are those of
// amax, whose exponents are e more and e less.
WEFT_FN BlockScale scale_of_amax(u32 amax_bits) {
    constexpr u32 one = 0x3f800000u;
    const u32 exponent = amax_bits & 0x7f800000u;
    const float m = __builtin_bit_cast(float, amax_bits - exponent + one);
    const float scale = quotient(m, fp8_max, inverse_fp8_max);
    const float inverse = quotient(fp8_max, m, __fdividef(1.0f, m));
    return {__builtin_bit_cast(float, __builtin_bit_cast(u32, scale) + exponent - one),
            __builtin_bit_cast(float, __builtin_bit_cast(u32, inverse) - exponent + one)};
}
#else
WEFT_FN BlockScale scale_of_amax(u32 amax_bits) {
    const float amax = __builtin_bit_cast(float, amax_bits);
    return {amax / fp8_max, fp8_max / amax};
}
#endif

// amax_bits: the largest |x| of the block as bits, so that NaN > Inf > finite values.
WEFT_FN BlockScale block_scale(u32 amax_bits) {
    if (amax_bits >= infinity_bits) return {__builtin_bit_cast(float, 0x7fc00000u), 0.0f};
    if (amax_bits < smallest_amax_bits) return {0.0f, 0.0f};
    return scale_of_amax(amax_bits);
}

// The UE8M0 byte of a block; 255 is NaN. 448 is 1.75 * 2^8, so it is the exponent of amax less 8,
// plus one where the mantissa of amax is above 1.75.
WEFT_FN u32 mx_exponent(u32 amax_bits) {
    if (amax_bits >= infinity_bits) return 255;
    const u32 exponent = amax_bits >> 23, larger = (amax_bits & 0x7fffffu) > 0x600000u;
    return exponent + larger < 9 ? 0 : exponent + larger - 8;
}

// 2^(127 - e) as a float: the factor that quantises a block with UE8M0 byte e.
WEFT_FN float mx_inverse(u32 e) {
    if (e == 255) return 0.0f;
    // e is at most 247 here, so 254 - e is a normal exponent.
    return __builtin_bit_cast(float, (254 - e) << 23);
}

// The scale of a row, by which its values are divided: amax * fl(1 / 448), but at least the scale
// that maps 2^-9, the smallest positive e4m3 number, to 448.
constexpr float smallest_row_scale = 0x1p-9f * inverse_fp8_max;

WEFT_FN BlockScale row_scale(u32 amax_bits) {
    if (amax_bits >= infinity_bits) return {__builtin_bit_cast(float, 0x7fc00000u), 0.0f};
    const float scale = __builtin_bit_cast(float, amax_bits) * inverse_fp8_max;
    const float most = scale < smallest_row_scale ? smallest_row_scale : scale;
    return {most, 1.0f / most};
}

// The UE8M0 byte of 128 columns: of 2^-33 at least, where amax / 448 is 1e-10.
constexpr u32 smallest_group_exponent = 127 - 33;

WEFT_FN u32 group_exponent(u32 amax_bits) {
    const u32 exponent = mx_exponent(amax_bits);
    return exponent < smallest_group_exponent ? smallest_group_exponent : exponent;
}

}  // namespace weft
