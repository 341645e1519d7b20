// SPDX-License-Identifier: Apache-2.0
// Flag-in-data. Every 32-bit word of an inbox holds the sentinel until a peer overwrites it, and no
// word of a row equals the sentinel. So a reader that observes no sentinel in a row has the whole
// row, without a counter, flag or fence. The reader then restores the sentinel. NCCL's LL128 is
// similar.
#pragma once
#include <weft/device/header.cuh>

namespace weft {

constexpr u32 sentinel = 0xffffffffu;  // two NaNs of 16 bits, or one of 32
constexpr u64 sentinel_pair = ~0ull;

// Of two words, or of one.
WEFT_FN constexpr bool is_ready(u64 words) {
    return u32(words) != sentinel && u32(words >> 32) != sentinel;
}

// Makes a word of a row differ from the sentinel: a NaN with all bits set loses its sign. FP8 rows
// and scales never hold such a word.
template <DType D> WEFT_FN u32 canonical(u32 word) {
    if constexpr (D == DType::fp32) return word == sentinel ? 0x7fffffffu : word;
    const u32 high = (word >> 16) == 0xffffu ? 0x80000000u : 0u;
    const u32 low = (word & 0xffffu) == 0xffffu ? 0x8000u : 0u;
    return word & ~(high | low);
}

// The cheaper form, for rows of which only the sum is visible to users: a word that equals the
// sentinel becomes another NaN, without a check of its 16-bit halves.
template <DType D> WEFT_FN u32 without_sentinel(u32 word) {
    constexpr u32 other = D == DType::fp32 ? 0x7fffffffu : 0x7fff7fffu;
    return word == sentinel ? other : word;
}

}  // namespace weft
