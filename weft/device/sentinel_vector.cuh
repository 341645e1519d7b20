// The sentinel in 16-byte vectors, as threads of a GPU store, poll and restore them.
#pragma once
#include <weft/device/copy.cuh>
#include <weft/device/sentinel.cuh>

namespace weft {

WEFT_FN uint4 sentinel_vector() { return make_uint4(sentinel, sentinel, sentinel, sentinel); }

WEFT_FN bool is_ready(uint4 v) {
    return v.x != sentinel && v.y != sentinel && v.z != sentinel && v.w != sentinel;
}

WEFT_FN void restore_sentinel(uint4* at) { post_vector(at, sentinel_vector()); }

template <Number N> WEFT_FN uint4 canonical(uint4 v) {
    return make_uint4(canonical<N>(v.x), canonical<N>(v.y), canonical<N>(v.z), canonical<N>(v.w));
}

// The cheaper form, where only the sum of rows is ever seen: a word that would be the sentinel
// becomes another NaN, whatever its halves were.
template <Number N> WEFT_FN uint4 without_sentinel(uint4 v) {
    constexpr u32 other = N == Number::fp32 ? 0x7fffffffu : 0x7fff7fffu;
    v.x = v.x == sentinel ? other : v.x;
    v.y = v.y == sentinel ? other : v.y;
    v.z = v.z == sentinel ? other : v.z;
    v.w = v.w == sentinel ? other : v.w;
    return v;
}

}  // namespace weft
