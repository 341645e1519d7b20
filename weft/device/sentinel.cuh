// Flag-in-data. Every 32-bit word of an inbox holds the sentinel until a peer overwrites it, and no
// word of a row equals the sentinel: so a reader that sees none in a row has the row, with no
// counter, flag or fence between the two. The reader puts the sentinel back. NCCL's LL128 works
// alike.
#pragma once
#include <weft/device/header.cuh>

namespace weft {

constexpr u32 sentinel = 0xffffffffu;  // two NaNs of 16 bits, or one of 32
constexpr u64 sentinel_pair = ~0ull;

WEFT_FN constexpr bool is_ready(u64 words) {
    return u32(words) != sentinel && u32(words >> 32) != sentinel;
}

// A row's words must not look like the sentinel: numbers that are NaN with all bits set lose their
// sign. FP8 and scales never have it.
template <Number N> WEFT_FN u32 canonical(u32 word) {
    if constexpr (N == Number::fp32) return word == sentinel ? 0x7fffffffu : word;
    const u32 high = (word >> 16) == 0xffffu ? 0x80000000u : 0u;
    const u32 low = (word & 0xffffu) == 0xffffu ? 0x8000u : 0u;
    return word & ~(high | low);
}

}  // namespace weft
