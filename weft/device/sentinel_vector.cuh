// The sentinel in 16-byte vectors, as threads of a GPU store, poll and restore it.
#pragma once
#include <weft/device/copy.cuh>
#include <weft/device/sentinel.cuh>

namespace weft {

WEFT_FN uint4 sentinel_vector() { return make_uint4(sentinel, sentinel, sentinel, sentinel); }

WEFT_FN bool is_ready(uint4 v) {
    return v.x != sentinel && v.y != sentinel && v.z != sentinel && v.w != sentinel;
}

WEFT_FN void restore_sentinel(uint4* at) { post_vector(at, sentinel_vector()); }

template <DType D> WEFT_FN uint4 canonical(uint4 v) {
    return make_uint4(canonical<D>(v.x), canonical<D>(v.y), canonical<D>(v.z), canonical<D>(v.w));
}

// The cheaper form, for rows of which only the sum is seen: a word that equals the sentinel becomes
// another NaN, without looking at its 16-bit halves.
template <DType D> WEFT_FN uint4 without_sentinel(uint4 v) {
    constexpr u32 other = D == DType::fp32 ? 0x7fffffffu : 0x7fff7fffu;
    v.x = v.x == sentinel ? other : v.x;
    v.y = v.y == sentinel ? other : v.y;
    v.z = v.z == sentinel ? other : v.z;
    v.w = v.w == sentinel ? other : v.w;
    return v;
}

}  // namespace weft
