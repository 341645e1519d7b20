// SPDX-License-Identifier: Apache-2.0
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

template <DType D> WEFT_FN uint4 without_sentinel(uint4 v) {
    return make_uint4(without_sentinel<D>(v.x), without_sentinel<D>(v.y), without_sentinel<D>(v.z),
                      without_sentinel<D>(v.w));
}

}  // namespace weft
