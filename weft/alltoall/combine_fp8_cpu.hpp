// Combine by push_fp8 on a CPU: rows are stored and received word by word, with flag-in-data. The
// receiver restores the sentinel in each word.
#pragma once
#include <weft/alltoall/phases.cuh>
#include <weft/device/cpu.hpp>
#include <weft/device/fp8.hpp>
#include <weft/device/sentinel.cuh>

namespace weft {

// Stores a block of a row as FP8 at the owner. Nothing is written behind the last scale, because no
// reader would restore it.
template <Shape S> void post_block(const float (&x)[scale_columns], u32 block, u8* row) {
    alignas(4) u8 values[scale_columns];
    const u32 amax = amax_bits_of(x);
    const BlockScale scale = block_scale(amax);
    store_block(x, scale.inverse, amax >= infinity_bits, values);
    u32* to = reinterpret_cast<u32*>(row);
    for (u32 i = 0; i < scale_columns / 4; ++i) {
        u32 word;
        std::memcpy(&word, values + 4 * i, 4);
        store_relaxed(to + block * scale_columns / 4 + i, word);
    }
    store_relaxed(to + S.hidden / 4 + block, std::bit_cast<u32>(scale.scale));
}

// Receives words of a row as they arrive and restores the sentinels; false when a wait has failed.
inline bool receive_words(const Site& site, Header& header, const Wait& wait, u32* from, u32 count,
                          u32* to) {
    SpinWait spin;
    for (u32 i = 0; i < count; ++i) {
        while ((to[i] = load_relaxed(from + i)) == sentinel)
            if (!spin.keep_waiting(header, site, wait)) return false;
        store_relaxed(from + i, sentinel);
    }
    return true;
}

// Adds columns `at` .. `at` + count, whole blocks, of one peer's FP8 row.
template <Shape S, u32 count>
bool add_fp8(float (&sum)[count], const Site& site, u32 peer, u32 token, u32 at) {
    Share<S>& own = own_share<S>(site);
    u32* row = reinterpret_cast<u32*>(own.inbox.returned.row[peer][token]);
    u32 words[count / 4], scales[count / scale_columns];
    const u64 wanted = own.header.state.epoch;
    const Wait wait{peer, Phase::combine, wanted, (wanted - 1) & epoch_mask};
    if (!receive_words(site, own.header, wait, row + at / 4, count / 4, words)) return false;
    if (!receive_words(site, own.header, wait, row + S.hidden / 4 + at / scale_columns,
                       count / scale_columns, scales))
        return false;
    const u8* values = reinterpret_cast<const u8*>(words);
    for (u32 i = 0; i < count; ++i)
        sum[i] += from_e4m3(values[i]) * std::bit_cast<float>(scales[i / scale_columns]);
    return true;
}

}  // namespace weft
