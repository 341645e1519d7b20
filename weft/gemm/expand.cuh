// SPDX-License-Identifier: Apache-2.0
// Expands MXFP4 weights to E4M3 in registers, as wgmma's A operand. A value takes 4.25 bits of
// memory traffic and passes through shared memory once.
//
// A unit is 64 weight rows by 128 columns of k. A row's values are E2M1 times a power of two per 32
// columns. Relative to the row's own power, which is applied to the result's column, that power is
// 2^-8 to 2^6. Every E2M1 value times such a power is an E4M3 value, possibly subnormal. A unit
// consists of
//
//   values     [4 warps][2 rows, 8 apart][32 lanes][4 words]: a word for each 32 columns of k
//   exponents  [4 warps][8 rows][2 rows, 8 apart][4 bytes]: each power + 8, times 8 (0 to 112)
//
// so that a lane's values for its registers of A are adjacent. A word has eight values: `first`
// are those of columns 4 (lane % 4) + i, `second` those 16 columns further on. Nibble i has the
// magnitude (its code, 0 to 7) of first[i], nibble 4 + i that of second[i]; bit 8 i + 7 is the sign
// of first[i], bit 8 i + 3 that of second[i]. gemm/mxfp4.py packs units.
#pragma once
#include <weft/gemm/shape.cuh>
#include <weft/gemm/wgmma.cuh>

namespace weft {

// The magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6 times 2^(exponent - 8) as E4M3, a byte each.
struct alignas(8) Magnitudes {
    u32 low, high;
};
constexpr u32 magnitude_tables = 16;  // for exponents 0 to 14, and one for invalid bytes

// The exponent is added to all bytes but that of 0. The lowest three give subnormal values.
WEFT_FN Magnitudes magnitudes_times(u32 exponent) {
    Magnitudes all{exponent * 0x08080800u + 0xfbf7f000u, exponent * 0x08080808u + 0x0c080400u};
    if (exponent == 2) all.low = 0x0c080400;
    if (exponent == 1) all.low = 0x06040200;
    if (exponent == 0) all = {0x03020100, 0x0c080604};
    return all;
}

// A thread's packed values of one k block.
struct PackedWeights {
    uint4 rows[2];
    uint2 exponents;

    // unit: the warpgroup's unit in shared memory.
    WEFT_FN void read(const u8* unit) {
        const u32 lane = threadIdx.x % warp_lanes;
        const u32 warp = threadIdx.x / warp_lanes % (warpgroup_threads / warp_lanes);
        const uint4* const values = reinterpret_cast<const uint4*>(unit) + warp * 2 * warp_lanes;
        exponents = reinterpret_cast<const uint2*>(unit + unit_value_bytes)[warp * 8 + lane / 4];
        // Mask bytes that `pack_mxfp4` never writes: as an offset they would cause a misaligned
        // access.
        exponents.x &= 0x78787878;
        exponents.y &= 0x78787878;
        rows[0] = values[lane];
        rows[1] = values[warp_lanes + lane];
    }
    WEFT_FN u32 word(u32 r, u32 i) const {
        return i == 0 ? rows[r].x : i == 1 ? rows[r].y : i == 2 ? rows[r].z : rows[r].w;
    }
    // Computes the registers of A for the i-th 32 columns of k. tables: magnitudes by exponent.
    WEFT_FN void expand(u32 (&a)[4], u32 i, const Magnitudes* tables) const {
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            const u32 offset = permute_bytes(r == 0 ? exponents.x : exponents.y, 0, 0x4440 | i);
            const Magnitudes by =
                *reinterpret_cast<const Magnitudes*>(reinterpret_cast<const u8*>(tables) + offset);
            const u32 packed = word(r, i), codes = packed & 0x77777777;
            a[r] = permute_bytes(by.low, by.high, codes) | (packed & 0x80808080);
            a[2 + r] = permute_bytes(by.low, by.high, codes >> 16) | (packed << 4 & 0x80808080);
        }
    }
};

}  // namespace weft
