// SPDX-License-Identifier: Apache-2.0
// e4m3 on a CPU: the rounding of the GPU's cvt.rn.satfinite, and the blocks of quantize.cuh in
// memory.
#pragma once
#include <bit>
#include <cstring>

#include <weft/device/quantize.cuh>

namespace weft {

// Rounds to nearest even; saturates at 448; NaN is 0x7f. Below 2^-6 an e4m3 is a multiple of 2^-9,
// and so is a float just above 2^14.
inline u8 to_e4m3(float value) {
    const u32 wide = std::bit_cast<u32>(value), size = wide & 0x7fffffffu;
    if (size > infinity_bits) return 0x7f;
    const u32 small =
        std::bit_cast<u32>(std::bit_cast<float>(size) + 0x1p14f) - std::bit_cast<u32>(0x1p14f);
    const u32 normal = (size - (120u << 23) + 0x7ffffu + (size >> 20 & 1u)) >> 20;
    const u32 rounded = size < 0x3c800000u ? small : normal;
    return u8((wide >> 24 & 0x80u) | (size >= 0x43e80000u || rounded > 0x7e ? 0x7e : rounded));
}

inline float from_e4m3(u8 bits) {
    const u32 exponent = bits >> 3 & 15, mantissa = bits & 7;
    if ((bits & 0x7f) == 0x7f) return std::bit_cast<float>(0x7fc00000u);
    const float size = exponent == 0
                           ? float(mantissa) * 0x1p-9f
                           : std::bit_cast<float>((exponent + 120) << 23 | mantissa << 20);
    return bits & 0x80 ? -size : size;
}

template <u32 columns> u32 amax_bits_of(const float (&x)[columns]) {
    u32 bits = 0;
    for (float value : x) {
        const u32 size = std::bit_cast<u32>(value) & 0x7fffffffu;
        bits = size > bits ? size : bits;
    }
    return bits;
}

// One block as e4m3 values. A block that holds an Inf or a NaN is stored as NaN.
template <u32 columns>
void store_block(const float (&x)[columns], float inverse, bool broken, u8* to) {
    for (u32 i = 0; i < columns; ++i) to[i] = broken ? 0x7f : to_e4m3(x[i] * inverse);
}

}  // namespace weft
