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

// One scale for a row: as block_scale, but a row of zeros has scale 1, so that one can divide by
// it.
WEFT_FN BlockScale row_scale(u32 amax_bits) {
    const BlockScale scale = block_scale(amax_bits);
    return amax_bits < smallest_amax_bits ? BlockScale{1.0f, 0.0f} : scale;
}

}  // namespace weft
