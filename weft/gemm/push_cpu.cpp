// A CPU's product stores rows that tell of themselves. Like any file of this folder it is compiled
// into an entry; gemm/push_cpu.py has it.
#include <cstring>

#include <weft/device/sentinel.cuh>

namespace weft {

// Rows `from`, one after the other, to their homes, 0 for nowhere: in words of eight bytes, each
// whole or not at all, none with all bits set. Where *unless is not 0 they go nowhere. N: of the
// numbers.
template <Number N>
void tell_rows(const u64* home, const u8* from, u64 rows, u64 bytes, u32* unless) {
    if (unless != nullptr && load_relaxed(unless) != 0) return;
    for (u64 row = 0; row < rows; ++row) {
        if (home[row] == 0) continue;
        u8* to = reinterpret_cast<u8*>(home[row]);
        for (u64 at = 0; at < bytes; at += 8) {
            u32 word[2];
            std::memcpy(word, from + row * bytes + at, 8);
            store_relaxed(reinterpret_cast<u64*>(to + at),
                          canonical<N>(word[0]) | u64(canonical<N>(word[1])) << 32);
        }
    }
}

}  // namespace weft
