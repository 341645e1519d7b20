// SPDX-License-Identifier: Apache-2.0
// The push epilogue with flag-in-data on a CPU. gemm/reference.py generates the entry point that
// includes this file.
#include <weft/device/row.hpp>

namespace weft {

// Stores `rows` contiguous rows at their dst_addr; 0 skips the row. Each word of eight bytes is one
// store, and neither of its halves is the sentinel (all ones). If *abort_flag is not 0, no row is
// stored. N: dtype of the values.
template <DType N>
void push_rows(const u64* dst_addr, const u8* from, u64 rows, u64 bytes, u32* abort_flag) {
    if (abort_flag != nullptr && load_relaxed(abort_flag) != 0) return;
    for (u64 row = 0; row < rows; ++row) {
        if (dst_addr[row] == 0) continue;
        post_row<N>(reinterpret_cast<u8*>(dst_addr[row]), from + row * bytes, u32(bytes));
    }
}

}  // namespace weft
