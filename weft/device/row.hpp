// SPDX-License-Identifier: Apache-2.0
// Rows on a CPU with flag-in-data, in single-copy atomic words of four or eight bytes.
#pragma once
#include <weft/device/cpu.hpp>
#include <weft/device/sentinel.cuh>
#include <weft/device/wait.cuh>

namespace weft {

template <class Word> void post_words(u8* to, const void* from, u32 bytes) {
    for (u32 at = 0; at < bytes; at += sizeof(Word)) {
        Word word;
        std::memcpy(&word, static_cast<const u8*>(from) + at, sizeof(Word));
        store_relaxed(reinterpret_cast<Word*>(to + at), word);
    }
}

// Posts a row of which only the sum is visible to users, without sentinels among its words.
template <DType D> void post_row(u8* to, const void* from, u32 bytes) {
    for (u32 at = 0; at < bytes; at += 8) {
        u32 word[2];
        std::memcpy(word, static_cast<const u8*>(from) + at, 8);
        store_relaxed(reinterpret_cast<u64*>(to + at),
                      without_sentinel<D>(word[0]) | u64(without_sentinel<D>(word[1])) << 32);
    }
}

// Receives a row's words as they arrive and restores the sentinels; false when a wait has failed.
template <class Word>
bool receive_words(Header& header, const Site& site, const Wait& wait, u8* row, void* to,
                   u32 bytes) {
    SpinWait spin;
    for (u32 at = 0; at < bytes; at += sizeof(Word)) {
        Word* from = reinterpret_cast<Word*>(row + at);
        Word word;
        while (!is_ready(word = load_relaxed(from)))
            if (!spin.keep_waiting(header, site, wait)) return false;
        std::memcpy(static_cast<u8*>(to) + at, &word, sizeof(Word));
        store_relaxed(from, Word(sentinel_pair));
    }
    return true;
}

}  // namespace weft
