// SPDX-License-Identifier: Apache-2.0
// Compares the scales that a GPU computes for a block of FP8 with divisions, for every amax.

#include <cmath>
#include <cstdio>
#include <cstdlib>

// What GPUs may make of 1 / y: up to two units in the last place away from it.
static int units;
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) {
    return __builtin_bit_cast(float, __builtin_bit_cast(int, a / b) + units);
}
// The branch of GPUs, from here on.
#include <weft/device/order.cuh>
#define __CUDA_ARCH__ 900
#include <weft/device/quantize.cuh>

using namespace weft;

static bool is_right(u32 amax_bits) {
    const float amax = __builtin_bit_cast(float, amax_bits);
    const BlockScale scale = block_scale(amax_bits);
    return scale.scale == amax / fp8_max && scale.inverse == fp8_max / amax;
}

// quotient STEP: all mantissas at exponent 127, and every STEP-th amax of all that have a scale.
int main(int, char** words) {
    const u64 step = std::strtoull(words[1], nullptr, 10);
    u64 wrong = 0, tried = 0;
    for (units = -2; units <= 2; ++units) {
        for (u32 mantissa = 0; mantissa < 1u << 23; ++mantissa, ++tried)
            wrong += !is_right(0x3f800000u | mantissa);
        for (u64 bits = smallest_amax_bits; bits < infinity_bits; bits += step, ++tried)
            wrong += !is_right(u32(bits));
        wrong += !is_right(infinity_bits - 1);
    }
    std::printf("%llu of %llu wrong\n", (unsigned long long)wrong, (unsigned long long)tried);
    return wrong != 0;
}
