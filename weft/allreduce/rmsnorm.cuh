// SPDX-License-Identifier: Apache-2.0
// RMSNorm with bitwise equal results on CPUs and GPUs in every launch shape. Entries that include
// it are compiled without fused multiply-adds, and with IEEE division and square root.
//
// The sum of squares of a row is a tree that depends on the row's length alone: the elements of a
// 16-byte vector in order, then 32 neighbouring vectors as a butterfly (a partial), then partials
// l, l + 32, ... in order, then the 32 sums as a butterfly again.
#pragma once
#include <weft/device/order.cuh>

namespace weft {

template <u32 n> WEFT_FN float square_sum(const float (&x)[n]) {
    float sum = 0.0f;
    for (u32 i = 0; i < n; ++i) sum = sum + x[i] * x[i];
    return sum;
}

WEFT_FN float inverse_rms(float squares, u32 hidden, float eps) {
    return 1.0f / square_root(squares / float(hidden) + eps);
}

}  // namespace weft
