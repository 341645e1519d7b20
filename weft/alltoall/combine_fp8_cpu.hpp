// SPDX-License-Identifier: Apache-2.0
// Combine by push_fp8 on a CPU: rows are stored and received word by word, with flag-in-data. The
// receiver restores the sentinel in each word.
#pragma once
#include <weft/alltoall/phases.cuh>
#include <weft/device/row.hpp>

namespace weft {

// Stores a block of a row as FP8 at the owner. Nothing is written after the last scale, because no
// reader would restore it.
template <Shape S> void post_block(const float (&x)[scale_columns], u32 block, u8* row) {
    u8 values[scale_columns];
    const float scale = quantize_block(x, values);
    post_words<u32>(row + block * scale_columns, values, scale_columns);
    post_words<u32>(row + S.hidden + block * 4, &scale, 4);
}

// Adds columns `at` .. `at` + count, whole blocks, of one peer's row.
template <Shape S, u32 count>
bool add_fp8(float (&sum)[count], const Site& site, u32 peer, u32 token, u32 at) {
    Share<S>& own = own_share<S>(site);
    u8* row = own.inbox.returned.row[peer][token];
    u8 values[count];
    float scales[count / scale_columns];
    const u64 epoch = own.header.state.epoch;
    const Wait wait{peer, Phase::combine, epoch, (epoch - 1) & epoch_mask};
    if (!receive_words<u32>(own.header, site, wait, row + at, values, count)) return false;
    if (!receive_words<u32>(own.header, site, wait, row + S.hidden + at / scale_columns * 4, scales,
                            sizeof scales))
        return false;
    for (u32 i = 0; i < count; ++i) sum[i] += from_e4m3(values[i]) * scales[i / scale_columns];
    return true;
}

}  // namespace weft
