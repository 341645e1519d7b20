// SPDX-License-Identifier: Apache-2.0
// Combine by push_fp8, with flag-in-data: rows are summed as they arrive, so that transfers and
// sums overlap. A warp is the unit of work.
//
// Roles, in grid order:
// coordinator  publishes that this rank has read its inbox, and waits for the same from the peers
// senders      push this rank's rows to the tokens' owners and wait for no rank
// receivers    sum rows as they arrive and restore the sentinels
#pragma once
#include <weft/alltoall/phases.cuh>
#include <weft/device/roles.cuh>
#include <weft/device/row.cuh>

namespace weft {

constexpr u32 max_strips = warp_lanes / blocks_in_strip;  // of one fragment: one lane per scale

// The rows of a token that return to its owner, in strips of 512 columns.
template <Shape S>
using ReturnedRows = RowStrip<S.dtype, true, S.hidden, S.ranks, sizeof(Returned<S>::row[0])>;

// Up to a.strips strips of one slot, at most max_strips. They are loaded before it is known whether
// the slot has a row, so that cold loads share one round trip. Slots are in the order (token,
// source), each rank starting with itself, so that ranks do not store to the same peer at once.
template <Shape S> struct PushFragment {
    u32 source, token, strip, end;
    u32 expert, source_tokens;  // lane k: entry k; token count of the source
    Columns<S.dtype> columns;   // of the first strip

    WEFT_FN static Columns<S.dtype> load(const CombineArgs& a, u32 source, u32 token, u32 strip) {
        return load_columns<S.dtype, true, S.hidden>(
            own_share<S>(a.site).outbox.row[slot_of(a.source_rows, source, token)], strip);
    }

    WEFT_FN static PushFragment of(const CombineArgs& a, u32 unit) {
        constexpr u32 strips = ReturnedRows<S>::strips;
        const u32 fragments = (strips + a.strips - 1) / a.strips, slot = unit / fragments;
        const u32 strip = unit % fragments * a.strips, lane = threadIdx.x % warp_lanes;
        PushFragment fragment{.source = (a.site.rank + slot) % S.ranks,
                              .token = slot / S.ranks,
                              .strip = strip,
                              .end = min(strip + a.strips, strips),
                              .expert = ~0u,
                              .source_tokens = 0,
                              .columns = {}};
        if (fragment.token >= a.source_rows) return fragment;
        Inbox<S>& inbox = own_share<S>(a.site).inbox;
        fragment.source_tokens = load_early(&inbox.counts[fragment.source]);
        if (lane < S.top_k)
            fragment.expert = load_early(
                &inbox.route[slot_of(a.source_rows, fragment.source, fragment.token)].expert[lane]);
        fragment.columns = load(a, fragment.source, fragment.token, strip);
        return fragment;
    }

    // All lanes of the warp take part.
    WEFT_FN bool has_row() const {
        return __any_sync(all_lanes, i32(expert) >= 0 && token < source_tokens) != 0;
    }
};

// Pushes one fragment. Its scales are stored together at the end, one word per lane: separate
// four-byte stores would be separate packets, about 6 % of a row's time on the link.
template <Shape S>
WEFT_FN void push_fragment(const CombineArgs& a, const PushFragment<S>& fragment) {
    const u32 lane = threadIdx.x % warp_lanes;
    u8* row = share<S>(a.site, fragment.source).inbox.returned.row[a.site.rank][fragment.token];
    Columns<S.dtype> ahead = fragment.columns;
    u32 scale = 0;  // of this lane's block of the fragment
    for (u32 strip = fragment.strip; strip < fragment.end; ++strip) {
        const Columns<S.dtype> columns = ahead;
        if (strip + 1 < fragment.end)
            ahead = PushFragment<S>::load(a, fragment.source, fragment.token, strip + 1);
        float x[lane_columns];
        columns.widen(x);
        const u32 amax = block_amax_bits<scale_columns>(x), v = strip * warp_lanes + lane;
        const BlockScale block = block_scale(amax);
        if (v < ReturnedRows<S>::vectors)
            post_vector(reinterpret_cast<uint4*>(row) + v,
                        quantize(x, block.inverse, amax >= infinity_bits));
        const u32 strip_scale = __shfl_sync(all_lanes, __float_as_uint(block.scale),
                                            lane % blocks_in_strip * block_lanes);
        if (lane / blocks_in_strip == strip - fragment.strip) scale = strip_scale;
    }
    const u32 at = fragment.strip * blocks_in_strip + lane;
    if (at < min(fragment.end * blocks_in_strip, ReturnedRows<S>::blocks))
        store_relaxed(reinterpret_cast<u32*>(row + S.hidden) + at, scale);
}

// The largest token count of any source, from early loads.
template <Shape S> WEFT_FN u32 max_source_tokens(const Site& site) {
    u32 source_tokens[S.ranks], max_tokens = 0;
#pragma unroll
    for (u32 i = 0; i < S.ranks; ++i)
        source_tokens[i] = load_early(&own_share<S>(site).inbox.counts[i]);
#pragma unroll
    for (u32 i = 0; i < S.ranks; ++i) max_tokens = max(max_tokens, source_tokens[i]);
    return min(max_tokens, S.tokens);
}

// Pushes all fragments of one CTA; `fragment` is each warp's first one. The CTA counts itself
// before its last fragments, when it has finished all reads of the inbox. Order: the barrier
// gathers the CTA's loads to lane 0, whose add releases them to the coordinator.
template <Shape S>
WEFT_FN void push_fragments(const Block& team, const CombineArgs& a, WarpUnits warp_units,
                            PushFragment<S> fragment, u32 max_tokens) {
    const u32 fragments = (ReturnedRows<S>::strips + a.strips - 1) / a.strips,
              end = max_tokens * S.ranks * fragments;
    for (bool last = false; !last; warp_units.first += warp_units.step) {
        last = warp_units.first - team.warp() + warp_units.step >= end;  // the same in all warps
        const bool has_row = fragment.has_row();
        const PushFragment<S> now = fragment;
        if (last) {
            __syncthreads();
            if (team.lane() == 0) add_acq_rel(&own_share<S>(a.site).header.arrived, 1);
        } else {
            fragment = PushFragment<S>::of(a, warp_units.first + warp_units.step);
        }
        if (has_row) push_fragment<S>(a, now);
    }
}

// One strip of out[token] = the sum of its ranks' rows in rank order, in fp32, then `add`, rounded
// once.
template <Shape S>
WEFT_FN bool sum_strip(const CombineArgs& a, u64 epoch, u32 token, u32 strip,
                       RankSet destinations) {
    using Rows = ReturnedRows<S>;
    Share<S>& own = own_share<S>(a.site);
    float sum[Rows::columns] = {};
#pragma unroll 1
    for (u32 first = 0; first < S.ranks; first += rows_in_flight) {
        Rows rows(own.inbox.returned.row[first][token], strip, ranks_from(destinations, first));
        if (!await_rows(own.header, a.site, epoch, a.tokens, rows,
                        [&](u32 i) { return first + i; }))
            return false;
#pragma unroll
        for (u32 i = 0; i < Rows::count; ++i) rows.add_to(sum, i);
    }
    const u32 v = strip * warp_lanes + threadIdx.x % warp_lanes;
    if (v >= Rows::vectors) return true;
    constexpr u32 width = Rows::columns / elements_in_vector(S.dtype);
    const u64 at = u64(token) * (S.out_bytes() / 16) + v * width;
    store_sum<S.dtype>(a.out, a.add, at, sum);
    return true;
}

template <Shape S> WEFT_FN bool sum_tokens(const CombineArgs& a, u64 epoch, WarpUnits warp_units) {
    constexpr u32 strips = ReturnedRows<S>::strips;
    const RankSet* peers = own_share<S>(a.site).destinations;
    const u32 end = a.tokens * strips;
    RankSet next{};
    if (warp_units.first < end) next = load_early(peers + warp_units.first / strips);
    for (u32 unit = warp_units.first; unit < end; unit += warp_units.step) {
        const RankSet destinations = next;
        const u32 after = unit + warp_units.step;
        if (after < end) next = load_early(peers + after / strips);
        if (!sum_strip<S>(a, epoch, unit / strips, unit % strips, destinations)) return false;
    }
    return true;
}

// The coordinator publishes after every sending CTA has read its last route, when this rank has
// finished reading the inbox. It stores no row itself.
// Order: lane 0 acquires all CTAs' counts, and the barrier extends that to the lanes that release.
template <Shape S>
WEFT_FN bool publish_inbox_read(const Block& team, const CombineArgs& a, const EpochState& state,
                                RankSet living) {
    Header& header = own_share<S>(a.site).header;
    bool read = true;
    if (team.lane() == 0) {
        SpinWait spin;
        const Wait wait{a.site.rank, Phase::combine, state.epoch, state.epoch};
        while (read && load_acquire_local(&header.arrived) != a.pushers)
            read = spin.keep_waiting(header, a.site, wait);
        if (read) header.arrived = 0;
    }
    if (!team.all(read)) return false;
    publish_combine<S>(team, a.site, living, state.epoch);
    return true;
}

template <Shape S, PhasePart part> WEFT_FN void combine_push_fp8(const CombineArgs& a) {
    const Block team;
    Header& header = own_share<S>(a.site).header;
    const CtaRoles roles{0, part == PhasePart::recv ? 0 : a.pushers};
    griddep_wait();
    launch_dependents();
    PushFragment<S> fragment{};
    u32 max_tokens = 0;
    if (roles.is<CtaRole::sender>()) {
        fragment = PushFragment<S>::of(a, roles.sender_units().first);
        max_tokens = max_source_tokens<S>(a.site);
    }
    const EpochState state = header.state;
    const RankSet living = header.living;  // loaded with the state
    if (state.failed != 0) return;
    const u64 start = start_of_lane<S>(team);
    if (fault(header, Point::combine_enter, a.site.rank, state.epoch) == Action::stay_away) return;

    if (roles.is<CtaRole::sender>())
        return push_fragments<S>(team, a, roles.sender_units(), fragment, max_tokens);
    if (roles.is<CtaRole::coordinator>()) {
        if constexpr (part != PhasePart::recv) {
            mark_start(team, header, Phase::combine, state.epoch, start);
            if (!publish_inbox_read<S>(team, a, state, living)) return;
        }
        if (part == PhasePart::send || !await_combine<S>(team, a.site, living, state.epoch)) return;
        if (team.lane() == 0) keep_record(header, Phase::combine, state.epoch, start, a.tokens);
    } else if constexpr (part != PhasePart::send) {
        if (!sum_tokens<S>(a, state.epoch, roles.receiver_units())) return;
    }
    if (team.lane() == 0) mark_end(header, Phase::combine, state.epoch);
}

}  // namespace weft
