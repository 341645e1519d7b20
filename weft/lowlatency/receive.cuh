// SPDX-License-Identifier: Apache-2.0
// The receivers of a low-latency dispatch: they copy rows from the inbox to their experts' rows as
// they arrive. A warp copies 2 KiB of a row at a time.
#pragma once
#include <weft/lowlatency/rank_state.cuh>

namespace weft {

constexpr u32 lane_vectors = 4;  // of a row, in each lane

constexpr u32 masks_in_flight = 4;  // of a thread

// The first row of each source at each expert, chunk by chunk of its tokens, and the masks of the
// chunks if they fit. If they do not, entries are kept for spans of several chunks, and masks are
// read again from the inbox.
template <LowLatencyShape S> struct ReceiveScratch {
    static constexpr u32 max_entries = 8192, max_bits = 3072;  // 44 KiB
    static constexpr u32 pairs = S.ranks * S.local;
    static constexpr u32 fitting = max_entries / pairs > 0 ? max_entries / pairs : 1;
    static constexpr u32 span = (S.chunks() + fitting - 1) / fitting;
    static constexpr u32 entries = (S.chunks() + span - 1) / span;
    static constexpr bool holds_bits = S.chunks() * pairs <= max_bits;

    u32 first[S.ranks][entries][S.local];
    u32 bits[holds_bits ? S.ranks : 1][holds_bits ? S.chunks() : 1][S.local];
    u32 tokens[S.ranks];

    WEFT_FN u32 bits_of(LowLatencyInbox<S>& inbox, u32 source, u32 chunk, u32 e) const {
        if constexpr (holds_bits) return bits[source][chunk][e];
        return value_of(load_relaxed(&inbox.token_masks[source][chunk][e]));
    }
};

// Waits for a source's token count and its first mask of one of this rank's experts. Both are
// polled together, because they arrive together. False when a wait has failed.
template <LowLatencyShape S>
WEFT_FN bool await_first_mask(const LowLatencyDispatchArgs& a, u64 epoch, u32 source, u32 e,
                              u32& tokens, u64& word) {
    LowLatencyShare<S>& own = own_share<S>(a.site);
    SpinWait spin;
    for (;;) {
        const u64 count_word = load_relaxed(&own.inbox.tokens[source]);
        word = load_relaxed(&own.inbox.token_masks[source][0][e]);
        tokens = clamp_tokens<S>(value_of(count_word));
        const bool count_only = tokens == 0 || a.own_experts == 0;
        const bool has_count = is_of(count_word, epoch);
        if (has_count && (count_only || is_of(word, epoch))) return true;
        const u64 seen = epoch_in(has_count ? word : count_word, epoch);
        const Wait wait{source, Phase::dispatch, epoch, seen};
        if (!spin.keep_waiting(own.header, a.site, wait)) return false;
    }
}

// Reads one source's masks of one of this rank's experts; a source that has exited has sent none.
// The first entry gets the number of rows, the others their first row among the source's rows.
// Called by one thread; false when a wait has failed.
template <LowLatencyShape S>
WEFT_FN bool await_masks(const LowLatencyDispatchArgs& a, RankSet living, u64 epoch, u32 source,
                         u32 e, ReceiveScratch<S>& scratch) {
    LowLatencyShare<S>& own = own_share<S>(a.site);
    const auto at = [&](u32 chunk) { return &own.inbox.token_masks[source][chunk][e]; };
    u64 word[masks_in_flight] = {};
    u32 tokens = 0, total = 0;
#pragma unroll
    for (u32 j = 1; j < masks_in_flight; ++j)
        if (j < S.chunks()) word[j] = load_relaxed(at(j));
    if (has(living, source) && !await_first_mask<S>(a, epoch, source, e, tokens, word[0]))
        return false;
    const u32 chunks = a.own_experts == 0 ? 0 : chunks_of(tokens);
    for (u32 c = 0; c < chunks; c += masks_in_flight) {
        if (c != 0)
#pragma unroll
            for (u32 j = 0; j < masks_in_flight; ++j)
                if (c + j < chunks) word[j] = load_relaxed(at(c + j));
#pragma unroll
        for (u32 j = 0; j < masks_in_flight; ++j) {
            if (c + j >= chunks) break;
            u32 bits = value_of(word[j]);
            if (!is_of(word[j], epoch) &&
                !await_tagged(own.header, a.site, Phase::dispatch, at(c + j), source, epoch, bits))
                return false;
            bits &= valid_bits(tokens, c + j);
            if constexpr (ReceiveScratch<S>::holds_bits) scratch.bits[source][c + j][e] = bits;
            if ((c + j) % ReceiveScratch<S>::span == 0)
                scratch.first[source][(c + j) / ReceiveScratch<S>::span][e] = total;
            total += bits_in(bits);
        }
    }
    scratch.first[source][0][e] = total;
    if (e == 0) scratch.tokens[source] = tokens;
    return true;
}

template <LowLatencyShape S>
WEFT_FN bool await_metadata(const Block& team, const LowLatencyDispatchArgs& a, RankSet living,
                            u64 epoch, bool leads, ReceiveScratch<S>& scratch) {
    if (leads && team.lane() < S.ranks)
        fault(own_share<S>(a.site).header, Point::before_poll, team.lane(), epoch);
    bool arrived = true;
    // A rank without experts still reads how many tokens there are.
    const u32 words = max(1u, a.own_experts);
    for (u32 i = team.lane(); arrived && i < S.ranks * words; i += team.lanes())
        arrived = await_masks<S>(a, living, epoch, i / words, i % words, scratch);
    return arrived;
}

// Turns each source's own row numbers into rows among all: rows are ordered by source, then token.
template <LowLatencyShape S>
WEFT_FN void compute_offsets(const Block& team, const LowLatencyDispatchArgs& a, bool leads,
                             ReceiveScratch<S>& scratch) {
    constexpr u32 span = ReceiveScratch<S>::span;
    for (u32 e = team.lane(); e < a.own_experts; e += team.lanes()) {
        u32 total = 0;
        for (u32 source = 0; source < S.ranks; ++source) {
            const u32 rows = scratch.first[source][0][e];
            const u32 entries = (chunks_of(scratch.tokens[source]) + span - 1) / span;
            scratch.first[source][0][e] = total;
            for (u32 i = 1; i < entries; ++i) scratch.first[source][i][e] += total;
            if (leads) {
                a.ranges[2 * (e * S.ranks + source)] = i32(total);
                a.ranges[2 * (e * S.ranks + source) + 1] = i32(rows);
            }
            total += rows;
        }
        if (leads) a.counts[e] = i32(total);
    }
    if (leads && team.lane() < S.ranks)
        a.routing.source_tokens[team.lane()] = i32(scratch.tokens[team.lane()]);
    __syncthreads();
}

template <LowLatencyShape S>
WEFT_FN ExpertRow find_expert_row(const LowLatencyDispatchArgs& a, const ReceiveScratch<S>& scratch,
                                  u32 source, u32 token, u32 choice) {
    constexpr u32 span = ReceiveScratch<S>::span;
    LowLatencyInbox<S>& inbox = own_share<S>(a.site).inbox;
    const i32 expert = local_of(choice, a.own_experts);
    if (expert < 0) return {-1, 0};
    const u32 e = u32(expert), chunk = token / chunk_tokens;
    u32 first = scratch.first[source][chunk / span][e];
    for (u32 c = chunk / span * span; c < chunk; ++c)
        first += bits_in(scratch.bits_of(inbox, source, c, e));
    const ExpertRow place =
        expert_row(expert, token, first, scratch.bits_of(inbox, source, chunk, e));
    return place.row < S.rows() ? place : ExpertRow{-1, 0};
}

// One warp's part of one row.
template <LowLatencyShape S> struct RowFragment {
    uint4 v[lane_vectors];
    u64 word;  // lane k: the `choices` word of entry k

    static constexpr u32 span = warp_lanes * lane_vectors;
    static constexpr u32 units = (S.sent_vectors() + span - 1) / span;  // of a row

    WEFT_FN static u32 vector(u32 unit, u32 i) {
        return unit % units * span + i * warp_lanes + threadIdx.x % warp_lanes;
    }
};

// The row of one unit of a receiver's work. Each rank starts with its own rows.
template <LowLatencyShape S> struct ReceiveUnit {
    u32 source, token;

    WEFT_FN static ReceiveUnit of(u32 unit, u32 rank) {
        const u32 slot = unit / RowFragment<S>::units;
        return {(slot + rank) % S.ranks, slot / S.ranks};
    }
};

// Polls choices and row together, because they usually arrive together.
template <LowLatencyShape S>
WEFT_FN RowFragment<S> poll_row(LowLatencyInbox<S>& inbox, u32 source, u32 token, u32 unit) {
    RowFragment<S> fragment{};
    const u32 lane = threadIdx.x % warp_lanes;
    fragment.word = 0;
    if (lane < S.top_k) fragment.word = load_relaxed(&inbox.choices[source][token][lane]);
    const uint4* row = reinterpret_cast<const uint4*>(inbox.sent_row(source, token));
#pragma unroll
    for (u32 i = 0; i < lane_vectors; ++i)
        if (RowFragment<S>::vector(unit, i) < S.sent_vectors())
            fragment.v[i] = poll_vector(row + RowFragment<S>::vector(unit, i));
    return fragment;
}

// Waits for a token's choices and, if one of them is an expert of this rank (`has_row`), for this
// warp's part of the row, whose sentinels are restored. False when a wait has failed.
template <LowLatencyShape S>
WEFT_FN bool await_row(const LowLatencyDispatchArgs& a, u64 epoch, u32 source, u32 token, u32 unit,
                       RowFragment<S>& fragment, bool& has_row) {
    LowLatencyShare<S>& own = own_share<S>(a.site);
    const u32 lane = threadIdx.x % warp_lanes;
    uint4* row = reinterpret_cast<uint4*>(own.inbox.sent_row(source, token));
    const auto missing = [&] {
        u32 vectors = 0;
#pragma unroll
        for (u32 i = 0; i < lane_vectors; ++i)
            if (RowFragment<S>::vector(unit, i) < S.sent_vectors() && !is_ready(fragment.v[i]))
                vectors |= 1u << i;
        return vectors;
    };
    const auto poll = [&](u32 which) {
#pragma unroll
        for (u32 i = 0; i < lane_vectors; ++i)
            if (which >> i & 1) fragment.v[i] = poll_vector(row + RowFragment<S>::vector(unit, i));
    };
    SpinWait spin;
    for (;;) {
        const bool has_choice = lane >= S.top_k || is_of(fragment.word, epoch);
        const u32 left = missing();
        const bool has_all_choices = __all_sync(all_lanes, has_choice);
        if (has_all_choices) {
            has_row = __any_sync(all_lanes, value_of(fragment.word) != 0);
            if (!has_row) return true;
            if (__all_sync(all_lanes, left == 0)) break;
        }
        // Until all choices have arrived, no lane knows whether there is a row.
        const bool waits = has_all_choices ? left != 0 : !has_choice;
        const u64 seen = has_all_choices ? epoch_before(epoch) : epoch_in(fragment.word, epoch);
        const Wait wait{source, Phase::dispatch, epoch, seen};
        const bool waiting = !waits || spin.keep_waiting(own.header, a.site, wait);
        if (!__all_sync(all_lanes, waiting)) return false;
        if (!has_choice) fragment.word = load_relaxed(&own.inbox.choices[source][token][lane]);
        poll_missing(left, a.tokens, poll, missing);
    }
#pragma unroll
    for (u32 i = 0; i < lane_vectors; ++i)
        if (RowFragment<S>::vector(unit, i) < S.sent_vectors())
            restore_sentinel(row + RowFragment<S>::vector(unit, i));
    return true;
}

// Stores one vector of a row at one of its experts.
template <LowLatencyShape S>
WEFT_FN void put_vector(const LowLatencyDispatchArgs& a, u32 e, u32 row, u32 v, uint4 data) {
    if (v < S.value_vectors()) {
        store(static_cast<uint4*>(a.rows) + (u64(e) * S.rows() + row) * S.value_vectors() + v,
              data);
    } else if (v < S.value_vectors() + S.scale_vectors()) {
        const u32 block = 4 * (v - S.value_vectors());
        const u32 word[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            if (block + i < S.blocks()) put_scale<S>(a.scales, e, row, block + i, word[i]);
    }
}

template <LowLatencyShape S>
WEFT_FN void keep_weights(const LowLatencyDispatchArgs& a, u64 slot, u32 v, uint4 data) {
    constexpr u32 first = S.value_vectors() + S.scale_vectors();
    if (v < first || v >= S.sent_vectors()) return;
    const u32 word[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 k = 4 * (v - first) + i;
        if (k < S.top_k) a.routing.weights[slot + k] = __uint_as_float(word[i]);
    }
}

// Receives one warp's part of one row: waits for it and stores it at each of its experts.
template <LowLatencyShape S>
WEFT_FN bool receive_row(const LowLatencyDispatchArgs& a, u64 epoch, u32 source, u32 token,
                         u32 unit, const ReceiveScratch<S>& scratch, RowFragment<S>& fragment,
                         TraceRecorder& recorder) {
    const u64 since = recorder.waits();
    bool has_row = false;
    if (!await_row<S>(a, epoch, source, token, unit, fragment, has_row)) return false;
    const u32 k = threadIdx.x % warp_lanes;
    // Lanes without an entry hold the word 0, which means no expert.
    const auto [e, row] = find_expert_row<S>(a, scratch, source, token, value_of(fragment.word));
    const u64 slot = (u64(source) * S.tokens + token) * S.top_k;
    if (unit % RowFragment<S>::units == 0 && k < S.top_k) {
        const u64 at = u64(u32(e)) * S.rows() + row;
        if constexpr (!S.gemm_push) a.routing.position[slot + k] = e < 0 ? -1 : i32(at);
        if (e >= 0) a.source[at] = i32(source * S.tokens + token);
        if constexpr (S.gemm_push)
            if (e >= 0) a.routing.dst_addr[at] = dst_addr_of<S>(a.site, source, token, k);
    }
    if (!has_row) return true;
    recorder.waited(since, source);
    u32 entries = __ballot_sync(all_lanes, e >= 0);
    for (; entries != 0; entries &= entries - 1) {
        const u32 from = u32(__ffs(i32(entries)) - 1);
        const u32 to_e = u32(__shfl_sync(all_lanes, e, from)),
                  to_row = __shfl_sync(all_lanes, row, from);
#pragma unroll
        for (u32 i = 0; i < lane_vectors; ++i)
            put_vector<S>(a, to_e, to_row, RowFragment<S>::vector(unit, i), fragment.v[i]);
    }
    if constexpr (S.reduce == Reduce::sender)
#pragma unroll
        for (u32 i = 0; i < lane_vectors; ++i)
            keep_weights<S>(a, slot, RowFragment<S>::vector(unit, i), fragment.v[i]);
    return true;
}

// Polls a warp's first row while offsets are computed.
template <LowLatencyShape S>
WEFT_FN RowFragment<S> poll_first_row(const LowLatencyDispatchArgs& a, u32 unit) {
    const auto [source, token] = ReceiveUnit<S>::of(unit, a.site.rank);
    if (token >= S.tokens) return {};
    return poll_row<S>(own_share<S>(a.site).inbox, source, token, unit);
}

// Receives all rows of all sources, in the order (token, source).
template <LowLatencyShape S>
WEFT_FN bool receive_rows(const LowLatencyDispatchArgs& a, u64 epoch, WarpUnits warp_units,
                          const ReceiveScratch<S>& scratch, RowFragment<S> fragment,
                          TraceRecorder& recorder) {
    LowLatencyShare<S>& own = own_share<S>(a.site);
    u32 max_tokens = 0;
#pragma unroll
    for (u32 source = 0; source < S.ranks; ++source)
        max_tokens = max(max_tokens, scratch.tokens[source]);
    for (u32 unit = warp_units.first; unit < max_tokens * S.ranks * RowFragment<S>::units;
         unit += warp_units.step) {
        const auto [source, token] = ReceiveUnit<S>::of(unit, a.site.rank);
        if (token >= scratch.tokens[source]) continue;
        if (unit != warp_units.first) fragment = poll_row<S>(own.inbox, source, token, unit);
        if (!receive_row<S>(a, epoch, source, token, unit, scratch, fragment, recorder))
            return false;
        recorder.worked();
    }
    return true;
}

}  // namespace weft
