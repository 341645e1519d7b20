// SPDX-License-Identifier: Apache-2.0
// What all CPU backends share: a team of one thread and the conversion of elements in plain C++.
#pragma once
#include <bit>
#include <cstring>
#include <type_traits>

#include <weft/device/fp8.hpp>
#include <weft/device/header.cuh>

namespace weft {

struct Solo {
    u32 lane() const { return 0; }
    u32 lanes() const { return 1; }
    bool all(bool mine) const { return mine; }
    bool first() const { return true; }
    u32 teams() const { return 1; }
    void meet_publishers() const {}
};

template <DType D> using Bits = std::conditional_t<D == DType::fp32, u32, u16>;

// fp16 by integer operations: they vectorise, and g++ 11 has no _Float16.
inline float widen_half(u16 bits) {
    const u32 shifted = (bits & 0x7fffu) << 13;
    const u32 finite = std::bit_cast<u32>(std::bit_cast<float>(shifted) * 0x1p112f);
    const u32 wide = shifted < 0x7c00u << 13 ? finite : shifted | 0x7f800000u;
    return std::bit_cast<float>(wide | (bits & 0x8000u) << 16);
}

inline u32 narrow_half(u32 wide) {
    const u32 size = wide & 0x7fffffffu;
    // Below 2^-14 an fp16 is a multiple of 2^-24, and so is a float just above 0.5.
    const u32 small = std::bit_cast<u32>(std::bit_cast<float>(size) + 0.5f) - 0x3f000000u;
    const u32 normal = (size - (112u << 23) + 0xfffu + (size >> 13 & 1u)) >> 13;
    const u32 finite = size < 0x38800000u ? small : normal;
    return (wide >> 16 & 0x8000u) | (size < 0x47800000u ? finite : 0x7c00u);
}

template <DType D> float widen(Bits<D> bits) {
    if constexpr (D == DType::bf16)
        return std::bit_cast<float>(u32(bits) << 16);
    else if constexpr (D == DType::fp16)
        return widen_half(bits);
    else
        return std::bit_cast<float>(bits);
}

// Rounds to nearest even, as the GPU's cvt.rn does. Every NaN becomes the one NaN that the GPU
// writes.
template <DType D> Bits<D> narrow(float value) {
    const u32 wide = std::bit_cast<u32>(value);
    const bool is_nan = (wide & 0x7fffffffu) > 0x7f800000u;
    if constexpr (D == DType::bf16)
        return u16(is_nan ? 0x7fffu : (wide + 0x7fffu + (wide >> 16 & 1u)) >> 16);
    else if constexpr (D == DType::fp16)
        return u16(is_nan ? 0x7fffu : narrow_half(wide));
    else
        return is_nan ? 0x7fffffffu : wide;
}

template <DType D, u32 count> void read_block(float (&x)[count], const u8* row, u32 at) {
    for (u32 i = 0; i < count; ++i) x[i] = widen<D>(reinterpret_cast<const Bits<D>*>(row)[at + i]);
}

// One block as FP8; returns its scale.
template <u32 columns> float quantize_block(const float (&x)[columns], u8* values) {
    const u32 amax = amax_bits_of(x);
    const BlockScale scale = block_scale(amax);
    store_block(x, scale.inverse, amax >= infinity_bits, values);
    return scale.scale;
}

// One block of a row as FP8: e4m3 values to `values`, its scale to `scales`.
template <Quant quant, u32 columns>
void quantize_block(const float (&x)[columns], u32 block, u8* values, u8* scales) {
    if constexpr (quant == Quant::mxfp8) {
        const u32 amax = amax_bits_of(x);
        scales[block] = u8(mx_exponent(amax));
        store_block(x, mx_inverse(scales[block]), amax >= infinity_bits, values + block * columns);
    } else {
        const float scale = quantize_block(x, values + block * columns);
        std::memcpy(scales + 4 * block, &scale, 4);
    }
}

template <DType D, u32 count>
void add_block(float (&__restrict__ sum)[count], const Bits<D>* __restrict__ from) {
    for (u32 i = 0; i < count; ++i) sum[i] += widen<D>(from[i]);
}

// Product and sum are rounded separately, as on a GPU: entries are compiled with -ffp-contract=off.
template <DType D, u32 count>
void add_weighted(float (&__restrict__ sum)[count], float weight,
                  const Bits<D>* __restrict__ from) {
    for (u32 i = 0; i < count; ++i) sum[i] += weight * widen<D>(from[i]);
}

}  // namespace weft
