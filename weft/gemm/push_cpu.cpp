// SPDX-License-Identifier: Apache-2.0
// Push with flag-in-data on a CPU. Like any file of this folder it is compiled into an entry, which
// gemm/reference.py generates.
#include <weft/device/row.hpp>

namespace weft {

// Stores `rows` rows, which follow each other from `from` on, at their dst_addr, 0 for nowhere: in
// words of eight bytes, each stored whole, with the sentinel, all ones, in neither of its halves.
// Where *abort_flag is not 0 no row is stored. N: dtype of the numbers.
template <DType N>
void push_rows(const u64* dst_addr, const u8* from, u64 rows, u64 bytes, u32* abort_flag) {
    if (abort_flag != nullptr && load_relaxed(abort_flag) != 0) return;
    for (u64 row = 0; row < rows; ++row) {
        if (dst_addr[row] == 0) continue;
        post_row<N>(reinterpret_cast<u8*>(dst_addr[row]), from + row * bytes, u32(bytes));
    }
}

}  // namespace weft
