// SPDX-License-Identifier: Apache-2.0
// The senders of a low-latency combine: they send experts' rows to their tokens' owners, one by one
// or as one sum of this rank's rows of a token. A warp sends 512 columns.
#pragma once
#include <weft/lowlatency/rank_state.cuh>

namespace weft {

// The rows of this rank's experts for a token, in a warp: lane k has the row index of entry k, or
// -1.
template <LowLatencyShape S> struct TokenRows {
    u32 source, token, part;
    u32 position, source_tokens;  // as loaded
    float weight;

    static constexpr u32 row_lanes = S.hidden / lane_columns;
    static constexpr u32 units = (row_lanes + warp_lanes - 1) / warp_lanes;  // of a row

    WEFT_FN static TokenRows of(const LowLatencyCombineArgs& a, u32 unit) {
        const u32 lane = threadIdx.x % warp_lanes, slot = unit / units;
        TokenRows rows{.source = (slot + a.site.rank) % S.ranks,
                       .token = slot / S.ranks,
                       .part = unit % units,
                       .position = ~0u,
                       .source_tokens = 0,
                       .weight = 1.0f};
        if (lane >= S.top_k || rows.token >= S.tokens) return rows;
        const u64 at = (u64(rows.source) * S.tokens + rows.token) * S.top_k + lane;
        rows.position = load_early(a.routing.position + at);
        rows.source_tokens = load_early(a.routing.source_tokens + rows.source);
        if constexpr (S.reduce == Reduce::sender)
            rows.weight = __uint_as_float(load_early(a.routing.weights + at));
        return rows;
    }
    WEFT_FN u32 vector() const { return part * warp_lanes + threadIdx.x % warp_lanes; }  // of FP8
    // Whether entry k has a row on this rank. Positions beyond the source's token count are stale.
    WEFT_FN bool has_row() const { return token < source_tokens && i32(position) >= 0; }
};

// Calls visit(k, columns) for this rank's entries of a token, in top-k order. Several rows are
// loaded before the first is used, because a rank often has more than one.
template <LowLatencyShape S, class Visit>
WEFT_FN void for_choices(const LowLatencyCombineArgs& a, const TokenRows<S>& rows, u32 entries,
                         const Visit& visit) {
    // Sums and quantised values need additional registers.
    constexpr u32 vectors = S.combine_fp8 || S.reduce == Reduce::sender ? 4 : 8;
    constexpr u32 together = vectors / Columns<S.dtype>::vectors;
    while (entries != 0) {
        u32 choice[together];
        Columns<S.dtype> columns[together];
#pragma unroll
        for (u32 i = 0; i < together; ++i) {
            choice[i] = u32(__ffs(i32(entries)) - 1);
            if (entries == 0) continue;
            entries &= entries - 1;
            const u32 position = __shfl_sync(all_lanes, rows.position, choice[i]);
            const u8* row = static_cast<const u8*>(a.y) + u64(position) * S.out_bytes();
            columns[i] = load_columns<S.dtype, S.combine_fp8, S.hidden>(row, rows.part);
        }
#pragma unroll
        for (u32 i = 0; i < together; ++i)
            if (choice[i] < warp_lanes) visit(choice[i], columns[i]);
    }
}

// Sends every row of a token separately.
template <LowLatencyShape S>
WEFT_FN void send_entry_rows(const LowLatencyCombineArgs& a, const TokenRows<S>& rows,
                             u32 entries) {
    LowLatencyInbox<S>& owner = share_of<S>(a.site, rows.source).inbox;
    for_choices<S>(a, rows, entries, [&](u32 k, const Columns<S.dtype>& columns) {
        u8* row = owner.returned_row(rows.token, k);
        if constexpr (S.combine_fp8) {
            float x[lane_columns];
            columns.widen(x);
            post_fp8<S.hidden>(row, rows.vector(), x);
        } else {
            post_columns<S.dtype, S.hidden>(row, rows.part, without_sentinel(columns));
        }
    });
}

// Sends this rank's rows of a token as one sum: weighted, in top-k order, in fp32.
template <LowLatencyShape S>
WEFT_FN void send_sum(const LowLatencyCombineArgs& a, const TokenRows<S>& rows, u32 entries) {
    float sum[lane_columns] = {};
    for_choices<S>(a, rows, entries, [&](u32 k, const Columns<S.dtype>& columns) {
        const float weight = __shfl_sync(all_lanes, rows.weight, k);
        float x[lane_columns];
        columns.widen(x);
#pragma unroll
        for (u32 i = 0; i < lane_columns; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, x[i]));
    });
    u8* row = share_of<S>(a.site, rows.source).inbox.returned_row(rows.token, a.site.rank);
    if constexpr (S.combine_fp8) {
        post_fp8<S.hidden>(row, rows.vector(), sum);
    } else {
        constexpr u32 width = elements_in_vector(S.dtype);
        Columns<S.dtype> columns;
#pragma unroll
        for (u32 i = 0; i < lane_columns / width; ++i)
            columns.v[i] =
                round_vector<S.dtype>(reinterpret_cast<const float (&)[width]>(sum[i * width]));
        post_columns<S.dtype, S.hidden>(row, rows.part, without_sentinel(columns));
    }
}

// The largest token count of any source.
template <LowLatencyShape S> WEFT_FN u32 max_source_tokens(const LowLatencyCombineArgs& a) {
    u32 max_tokens = 0;
#pragma unroll
    for (u32 source = 0; source < S.ranks; ++source)
        max_tokens = max(max_tokens, u32(a.routing.source_tokens[source]));
    return max_tokens;
}

template <LowLatencyShape S>
WEFT_FN void send_rows(const LowLatencyCombineArgs& a, WarpUnits warp_units, TokenRows<S> rows,
                       TraceRecorder& recorder) {
    u32 unit = warp_units.first, end = 0;
    do {
        const TokenRows<S> next = TokenRows<S>::of(a, unit + warp_units.step);
        const u32 entries = __ballot_sync(all_lanes, rows.has_row());
        if (entries != 0) {
            if constexpr (S.reduce == Reduce::sender)
                send_sum<S>(a, rows, entries);
            else
                send_entry_rows<S>(a, rows, entries);
            recorder.worked();
        }
        rows = next;
        unit += warp_units.step;
        // The counts are read after the first rows have been sent.
        if (end == 0) end = max(1u, max_source_tokens<S>(a)) * S.ranks * TokenRows<S>::units;
    } while (unit < end);
}

}  // namespace weft
