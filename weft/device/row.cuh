// SPDX-License-Identifier: Apache-2.0
// Rows that return to their owners with flag-in-data. A warp posts, polls, restores and adds one
// strip at a time; operators determine the rows and their addresses.
#pragma once
#include <weft/device/quantize_warp.cuh>
#include <weft/device/sentinel_vector.cuh>
#include <weft/device/wait.cuh>

namespace weft {

constexpr u32 rows_in_flight = 8;  // of one token, in each lane
constexpr u32 block_lanes = scale_columns / lane_columns;
constexpr u32 blocks_in_strip = warp_lanes / block_lanes;

// The index of a lane's i-th 16-byte vector, of 512 columns that a warp loads or posts. In
// unquantised rows, the vectors of neighbouring lanes are contiguous, so that a warp's store fills
// whole lines. In rows to be quantised, each lane holds 16 columns of one block.
template <DType D, bool quantised> WEFT_FN u32 lane_vector(u32 part, u32 i) {
    constexpr u32 width = Columns<D>::vectors;
    const u32 lane = threadIdx.x % warp_lanes;
    if constexpr (quantised) return (part * warp_lanes + lane) * width + i;
    return (part * width + i) * warp_lanes + lane;
}

// Whether vector v belongs to the row; always true if a row consists of whole parts of a warp.
template <u32 vectors, u32 of_warp> WEFT_FN bool is_in_row(u32 v) {
    return vectors % of_warp == 0 || v < vectors;
}

// A lane's columns of such a part of a row. With `is_in_row` here, a low-latency combine takes 95
// registers instead of 80, and an SM holds two of its CTAs instead of three (NVRTC 13, sm_90a).
template <DType D, bool quantised, u32 hidden>
WEFT_FN Columns<D> load_columns(const void* row, u32 part) {
    constexpr u32 vectors = hidden / elements_in_vector(D);
    Columns<D> columns{};
#pragma unroll
    for (u32 i = 0; i < Columns<D>::vectors; ++i) {
        const u32 at = lane_vector<D, quantised>(part, i);
        if (at < vectors) columns.v[i] = load_once(static_cast<const uint4*>(row) + at);
    }
    return columns;
}

// The cheaper form (sentinel.cuh), for rows of which only the sum is visible to users.
template <DType D> WEFT_FN Columns<D> without_sentinel(Columns<D> columns) {
#pragma unroll
    for (u32 i = 0; i < Columns<D>::vectors; ++i) columns.v[i] = without_sentinel<D>(columns.v[i]);
    return columns;
}

// Posts a lane's columns of such a part of an unquantised row. No word may be the sentinel.
template <DType D, u32 hidden>
WEFT_FN void post_columns(u8* row, u32 part, const Columns<D>& columns) {
    constexpr u32 vectors = hidden / elements_in_vector(D);
#pragma unroll
    for (u32 i = 0; i < Columns<D>::vectors; ++i) {
        const u32 at = lane_vector<D, false>(part, i);
        if (is_in_row<vectors, Columns<D>::vectors * warp_lanes>(at))
            post_vector(reinterpret_cast<uint4*>(row) + at, columns.v[i]);
    }
}

// Posts a lane's columns of a row as FP8, from column v * n on. The lanes of a block share its
// maximum, so all lanes of the warp take part. Nothing is written after the last scale, because no
// reader waits for those words: such a word could arrive after the row has been read, and would
// then be taken for a part of the next row.
template <u32 hidden, u32 n> WEFT_FN void post_fp8(u8* row, u32 v, const float (&x)[n]) {
    const u32 amax = block_amax_bits<scale_columns>(x);
    if (!is_in_row<hidden / n, warp_lanes>(v)) return;
    const BlockScale block = block_scale(amax);
    const bool broken = amax >= infinity_bits;
    if constexpr (n == lane_columns) {
        post_vector(reinterpret_cast<uint4*>(row) + v, quantize(x, block.inverse, broken));
    } else {
        float scaled[n];
        u32 word[n / 4];
#pragma unroll
        for (u32 i = 0; i < n; ++i) scaled[i] = __fmul_rn(x[i], block.inverse);
        e4m3_words(word, scaled, broken);
        if constexpr (n == 8)
            store_relaxed(reinterpret_cast<u64*>(row) + v, u64(word[1]) << 32 | word[0]);
        else
            store_relaxed(reinterpret_cast<u32*>(row) + v, word[0]);
    }
    constexpr u32 lanes = scale_columns / n;
    if (v % lanes == 0)
        store_relaxed(reinterpret_cast<u32*>(row + hidden) + v / lanes,
                      __float_as_uint(block.scale));
}

// Vectors that one lane polls, `step` bytes apart; the constructor polls them once.
template <u32 count, u64 step> struct PolledVectors {
    uint4 v[count];
    u8* first;
    u32 mine;  // vectors of this lane, as bits

    WEFT_FN PolledVectors(u8* first, u32 mine) : first(first), mine(mine) { poll(mine); }

    WEFT_FN uint4* address(u32 i) const { return reinterpret_cast<uint4*>(first + i * step); }
    WEFT_FN void poll(u32 which) {
#pragma unroll
        for (u32 i = 0; i < count; ++i)
            if (which >> i & 1) v[i] = poll_vector(address(i));
    }
    WEFT_FN u32 missing() const {
        u32 found = 0;
#pragma unroll
        for (u32 i = 0; i < count; ++i)
            if ((mine >> i & 1) != 0 && !is_ready(v[i])) found |= 1u << i;
        return found;
    }
    WEFT_FN void restore() const {
#pragma unroll
        for (u32 i = 0; i < count; ++i)
            if (mine >> i & 1) restore_sentinel(address(i));
    }
};

// Polls the vectors that a lane misses (`left`, one bit each). With more than small_batch_tokens it
// polls one, because other warps need the cache too, and the others after that one has arrived.
constexpr u32 small_batch_tokens = 32;
template <class Poll, class Missing>
WEFT_FN void poll_missing(u32 left, u32 tokens, const Poll& poll, const Missing& missing) {
    const u32 next = tokens > small_batch_tokens ? left & (0u - left) : left;
    poll(next);
    if (next == left) return;
    if (const u32 now = missing(); now != left) poll(now);
}

// One strip of up to eight rows of a token, `step` bytes apart: one vector of each row in each
// lane. The scales of FP8 rows follow their values; each lane has one scale, of row `scale_row`.
template <DType D, bool fp8, u32 hidden, u32 rows, u64 step> struct RowStrip {
    static constexpr u32 count = rows < rows_in_flight ? rows : rows_in_flight;
    static constexpr u32 columns = fp8 ? lane_columns : elements_in_vector(D);         // of a lane
    static constexpr u32 vectors = hidden / columns, blocks = hidden / scale_columns;  // of a row
    static constexpr u32 strips = (vectors + warp_lanes - 1) / warp_lanes;             // of a row

    PolledVectors<count, step> values;
    u32* scale_at;
    u32 scale;
    u32 expected;  // rows, as bits
    bool has_scale;

    WEFT_FN RowStrip(u8* row, u32 strip, u32 expected)
        : RowStrip(row, strip * warp_lanes + threadIdx.x % warp_lanes,
                   strip * blocks_in_strip + threadIdx.x % blocks_in_strip,
                   expected & ((1u << count) - 1)) {}
    WEFT_FN RowStrip(u8* row, u32 vector, u32 block, u32 expected)
        : values(row + vector * 16, vector < vectors ? expected : 0),
          scale_at(reinterpret_cast<u32*>(row + scale_row() * step + hidden) + block),
          scale(sentinel),
          expected(expected),
          has_scale(fp8 && (expected >> scale_row() & 1) != 0 && block < blocks) {
        poll_scale();
    }

    WEFT_FN static u32 scale_row() { return threadIdx.x % warp_lanes / blocks_in_strip; }
    WEFT_FN void poll_scale() {
        if (has_scale && scale == sentinel) scale = load_relaxed(scale_at);
    }
    WEFT_FN void poll(u32 which) {
        values.poll(fp8 ? which & values.mine : which);
        poll_scale();
    }
    // The rows that are incomplete in this lane.
    WEFT_FN u32 missing() const {
        return values.missing() | (has_scale && scale == sentinel ? 1u << scale_row() : 0);
    }
    WEFT_FN void restore() const {
        values.restore();
        if (has_scale) store_relaxed(scale_at, sentinel);
    }
    // Adds row i, weighted or not. All lanes of the warp take part.
    template <class... Weight>
    WEFT_FN void add_to(float (&sum)[columns], u32 i, Weight... weight) const {
        const u32 lane = i * blocks_in_strip + threadIdx.x % warp_lanes / block_lanes;
        const u32 theirs = fp8 ? __shfl_sync(all_lanes, scale, lane) : 0;
        if ((expected >> i & 1) == 0) return;
        if constexpr (fp8)
            add_e4m3(sum, values.v[i], __uint_as_float(theirs), weight...);
        else if constexpr (sizeof...(weight) != 0)
            add_weighted<D>(sum, weight..., values.v[i]);
        else
            add_vector<D>(sum, values.v[i]);
    }
};

// Polls a strip until all of it is ready, and restores its sentinels; false, for all lanes, when a
// wait has failed. tokens: tokens of the batch. peer_of(i): the rank that sends row i.
template <class Strip, class PeerOf>
WEFT_FN bool await_rows(Header& header, const Site& site, u64 epoch, u32 tokens, Strip& rows,
                        const PeerOf& peer_of) {
    SpinWait spin;
    for (u32 left = rows.missing(); !__all_sync(all_lanes, left == 0); left = rows.missing()) {
        const auto describe = [&] {
            const u32 peer = peer_of(u32(__ffs(i32(left)) - 1));
            return Wait{peer, Phase::combine, epoch, (epoch - 1) & epoch_mask};
        };
        const bool waiting = left == 0 || spin.keep_waiting_for(header, site, describe);
        if (!__all_sync(all_lanes, waiting)) return false;
        poll_missing(
            left, tokens, [&](u32 which) { rows.poll(which); }, [&] { return rows.missing(); });
    }
    rows.restore();
    return true;
}

// Stores a lane's columns of a result, from its `at`-th vector on: the sum plus `add`, if any,
// rounded once.
template <DType D, u32 n>
WEFT_FN void store_sum(void* out, const void* add, u64 at, float (&sum)[n]) {
    constexpr u32 width = elements_in_vector(D);
#pragma unroll
    for (u32 i = 0; i < n / width; ++i) {
        float (&part)[width] = reinterpret_cast<float (&)[width]>(sum[i * width]);
        if (add != nullptr)
            add_vector<D>(part, load_input(static_cast<const uint4*>(add) + at + i));
        static_cast<uint4*>(out)[at + i] = round_vector<D>(part);
    }
}

}  // namespace weft
