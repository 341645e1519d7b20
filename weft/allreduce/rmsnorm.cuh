// RMSNorm and FP8 of its result in plain arithmetic: the same bits on CPU and GPU, in every launch
// shape. Entries that include it are compiled without fused multiply-adds; `/` and square_root are
// those of IEEE.
//
// The sum of squares of a row is a tree that depends on the row's length alone: the elements of a
// 16-byte vector one after the other, then 32 neighbouring vectors as a butterfly (a partial), then
// partials l, l + 32, ... one after the other, then the 32 sums as a butterfly again.
#pragma once
#include <weft/device/quantize.cuh>

namespace weft {

template <u32 n> WEFT_FN float square_sum(const float (&x)[n]) {
    float sum = 0.0f;
    for (u32 i = 0; i < n; ++i) sum = sum + x[i] * x[i];
    return sum;
}

WEFT_FN float inverse_rms(float squares, u32 hidden, float eps) {
    return 1.0f / square_root(squares / float(hidden) + eps);
}

// One scale for a row, by which its numbers are divided: amax * fl(1 / 448), and at least the one
// that makes 448 of 2^-9, the smallest e4m3 number above 0.
constexpr float smallest_row_scale = 0x1p-9f * inverse_fp8_max;

WEFT_FN BlockScale row_scale(u32 amax_bits) {
    if (amax_bits >= infinity_bits) return {__builtin_bit_cast(float, 0x7fc00000u), 0.0f};
    const float scale = __builtin_bit_cast(float, amax_bits) * inverse_fp8_max;
    const float most = scale < smallest_row_scale ? smallest_row_scale : scale;
    return {most, 1.0f / most};
}

// The UE8M0 byte of a group: of 2^-33 at least, where amax / 448 is 1e-10.
constexpr u32 smallest_group_exponent = 127 - 33;

WEFT_FN u32 group_exponent(u32 amax_bits) {
    const u32 exponent = mx_exponent(amax_bits);
    return exponent < smallest_group_exponent ? smallest_group_exponent : exponent;
}

}  // namespace weft
