// SPDX-License-Identifier: Apache-2.0
// The third kernel of grouping returns the experts' results to the owners of the tokens. `scatter`
// stores the sum of a token's rows, in top-k order, into the outbox. `send` also does the work of
// combine's sender: it stores the sum directly into the owner's inbox or, with gemm_push, copies
// the rows there one by one; its last CTA publishes the flags. A warp processes 32 vectors of one
// token in each step, one per lane, so that all rows of a token are in flight at once and small
// batches also fill the GPU.
#pragma once
#include <weft/device/row.cuh>
#include <weft/grouping/rows.cuh>

namespace weft {

constexpr u32 token_rows_in_flight = 8;  // in each lane

// A strip of one token's row, one vector per lane. Lane k also holds the token's k-th entry, and
// that entry's row of y.
template <Shape S> struct Strip {
    static constexpr u32 row_vectors = S.out_bytes() / 16;
    static constexpr u32 count = (row_vectors + warp_lanes - 1) / warp_lanes;  // of a row
    TokenSlot at;
    u32 first;
    Entry entry;
    i32 row;

    WEFT_FN u32 vector() const { return first + threadIdx.x % warp_lanes; }
    WEFT_FN bool exists() const { return vector() < row_vectors; }
    WEFT_FN bool has_entries() const { return __any_sync(all_lanes, entry.group != no_group); }
    WEFT_FN void store_to(u8* to, uint4 v) const {
        if (exists()) store(reinterpret_cast<uint4*>(to) + vector(), v);
    }
};

// Tokens in the order (token, source), each rank starting with itself, so that ranks do not store
// to the same peer at once. After the last token there are no entries.
template <Shape S, Grouping G> WEFT_FN Strip<S> find_strip(const GroupArgs& a, u32 unit, u32 k) {
    const u32 slot = unit / Strip<S>::count, token = slot / S.ranks,
              source = (a.site.rank + slot) % S.ranks;
    Strip<S> strip{.at = {source, token},
                   .first = unit % Strip<S>::count * warp_lanes,
                   .entry = {no_group, 0.0f},
                   .row = -1};
    if (token >= tokens_from<S>(own_share<S>(a.site).inbox, source)) return strip;
    strip.entry = load_entry<S, G>(a, strip.at, k);
    if (k < S.top_k) strip.row = a.position[(u64(source) * S.tokens + token) * S.top_k + k];
    return strip;
}

// Calls visit(strip) for every strip of every token that has entries on this rank, each in one
// warp. The indices of the next strip are loaded before this one is visited.
template <Shape S, Grouping G, class Visit>
WEFT_FN void for_strips(const Block& team, const GroupArgs& a, Visit visit) {
    static_assert(u64(S.tokens) * S.ranks * (Strip<S>::count + 1) < 1ull << 31, "units are a u32");
    const u32 lane = team.warp_lane(), warps = team.lanes() / warp_lanes;
    u32 max_tokens = 0;
#pragma unroll
    for (u32 source = 0; source < S.ranks; ++source)
        max_tokens = max(max_tokens, tokens_from<S>(own_share<S>(a.site).inbox, source));
    u32 unit = blockIdx.x * warps + team.warp();
    Strip<S> next = find_strip<S, G>(a, unit, lane);
    while (unit < max_tokens * S.ranks * Strip<S>::count) {
        const Strip<S> strip = next;
        unit += gridDim.x * warps;
        next = find_strip<S, G>(a, unit, lane);
        if (strip.has_entries()) visit(strip);
    }
}

// Calls visit(k, vector) for each of a token's rows, in top-k order. The loads of eight rows start
// before the first visit. Lanes beyond the row load its last vector, so that a warp stays together.
template <Shape S, class Visit>
WEFT_FN void for_rows(const Strip<S>& strip, const void* y, Visit visit) {
    constexpr u32 in_flight = S.top_k < token_rows_in_flight ? S.top_k : token_rows_in_flight;
    const uint4* const at =
        static_cast<const uint4*>(y) + min(strip.vector(), Strip<S>::row_vectors - 1);
#pragma unroll
    for (u32 first = 0; first < S.top_k; first += in_flight) {
        uint4 data[in_flight];
        bool exists[in_flight];
#pragma unroll
        for (u32 i = 0; i < in_flight; ++i) {
            const i32 row = __shfl_sync(all_lanes, strip.row, (first + i) % warp_lanes);
            exists[i] = first + i < S.top_k && row >= 0;
            if (exists[i]) data[i] = load_input(at + u64(u32(row)) * Strip<S>::row_vectors);
        }
#pragma unroll
        for (u32 i = 0; i < in_flight; ++i)
            if (exists[i]) visit(first + i, data[i]);
    }
}

// One vector of the sum of a token's rows, rounded once.
template <Shape S> WEFT_FN uint4 sum_rows(const Strip<S>& strip, const void* y) {
    float sum[elements_in_vector(S.dtype)] = {};
    for_rows<S>(strip, y, [&](u32 k, uint4 v) {
        add_weighted<S.dtype>(sum, __shfl_sync(all_lanes, strip.entry.weight, k), v);
    });
    return round_vector<S.dtype>(sum);
}

template <Shape S, Grouping G> WEFT_FN void scatter(const GroupArgs& a) {
    const Block team;
    griddep_wait();
    launch_dependents();
    Share<S>& own = own_share<S>(a.site);
    if (own.header.state.failed != 0) return;
    for_strips<S, G>(team, a, [&](const Strip<S>& strip) {
        strip.store_to(own.outbox.row[strip.at.in_inbox(a)], sum_rows<S>(strip, a.y));
    });
}

// Sends the results of this rank's experts for a token to its owner.
template <Shape S> WEFT_FN void send_strip(const GroupArgs& a, const Strip<S>& strip) {
    const u32 source = strip.at.source, token = strip.at.token;
    if constexpr (S.combine == Combine::gemm_push) {
        for_rows<S>(strip, a.y, [&](u32 k, uint4 v) {
            strip.store_to(dst_addr_of<S>(a.site, source, token, k), v);
        });
    } else {
        u8* to = share<S>(a.site, source).inbox.returned.row[a.site.rank][token];
        const uint4 sum = sum_rows<S>(strip, a.y);
        if constexpr (S.combine == Combine::push_fp8) {
            float x[elements_in_vector(S.dtype)] = {};
            add_vector<S.dtype>(x, sum);
            post_fp8<S.hidden>(to, strip.vector(), x);
        } else {
            strip.store_to(to, sum);
        }
    }
}

template <Shape S, Grouping G> WEFT_FN void send(const GroupArgs& a) {
    const Block team;
    Header& header = own_share<S>(a.site).header;
    griddep_wait();
    launch_dependents();
    const EpochState state = header.state;
    const RankSet living = header.living;  // loaded with the state
    if (state.failed != 0) return;
    const u64 start = start_of_lane<S>(team);
    mark_start(team, header, Phase::combine, state.epoch, start);
    if (fault(header, Point::combine_enter, a.site.rank, state.epoch) == Action::stay_away) return;
    for_strips<S, G>(team, a, [&](const Strip<S>& strip) { send_strip<S>(a, strip); });
    if (!team.is_last_cta(a.arrived)) return;
    publish_combine<S>(team, a.site, living, state.epoch);
}

}  // namespace weft
