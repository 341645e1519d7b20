// SPDX-License-Identifier: Apache-2.0
// Combine: the owner of a token sums the rows of the experts' ranks in rank order. One launch, or
// split into a sending and a receiving kernel. The Shape determines how rows are transferred:
//
// pull       the owner loads rows from its peers' outboxes after their flags have arrived
// push       the experts' ranks store rows into the owner's inbox (push.cuh)
// push_fp8   the same as block-scaled FP8, with flag-in-data (combine_fp8.cuh)
// gemm_push  each expert's row is already in the owner's inbox (combine_gemm_push.cuh)
//
// Roles, except with push_fp8: with push all CTAs send rows and the last one publishes the flags;
// otherwise the first one publishes them. Then every CTA waits for all flags and sums tokens in a
// grid-stride loop.
#pragma once
#include <weft/alltoall/combine_fp8.cuh>
#include <weft/alltoall/combine_gemm_push.cuh>
#include <weft/alltoall/push.cuh>

namespace weft {

constexpr u32 loads_in_flight = 8;

// The addresses of one token's rows: peer p's at first + p * step.
struct RowPointers {
    u64 first, step;
};

template <Shape S, u32 rank> WEFT_FN RowPointers rows_of(const CombineArgs& a, u32 token) {
    if constexpr (S.combine == Combine::pull) {
        const u64 own = u64(own_share<S>(a.site).outbox.row[slot_of(a.source_rows, rank, token)]);
        return {own - rank * a.site.stride, a.site.stride};
    } else {
        auto& returned = own_share<S>(a.site).inbox.returned;
        return {u64(returned.row[0][token]), sizeof(returned.row[0])};
    }
}

// Adds the rows of peers first .. first + 7, in that order. The loads start at this rank and go
// upwards, so that the ranks do not all pull from the same peer at once (7 % at 128 tokens, 8 x
// H200, 2026-11-20). `rank` is a compile-time constant, so that rotated rows stay in registers.
template <Shape S, u32 rank, u32 n>
WEFT_FN void add_peers(RowPointers rows, u32 v, RankSet destinations, u32 first, float (&sum)[n]) {
    constexpr u32 in_flight = S.ranks < loads_in_flight ? S.ranks : loads_in_flight;
    uint4 piece[in_flight];
#pragma unroll
    for (u32 offset = 0; offset < in_flight; ++offset) {
        const u32 i = (offset + rank) % in_flight;
        if (has(destinations, first + i))
            piece[i] = load_peer_row(
                reinterpret_cast<const uint4*>(rows.first + (first + i) * rows.step) + v);
    }
#pragma unroll
    for (u32 i = 0; i < in_flight; ++i)
        if (has(destinations, first + i)) add_vector<S.dtype>(sum, piece[i]);
}

// out[token] = the sum of its ranks' rows in rank order, in fp32, then `add`, rounded once.
template <Shape S, u32 rank>
WEFT_FN void reduce_token(const Block& team, const CombineArgs& a, u32 token,
                          RankSet destinations) {
    constexpr u32 vectors = S.out_bytes() / 16;
    const RowPointers rows = rows_of<S, rank>(a, token);
    uint4* out = static_cast<uint4*>(a.out) + u64(token) * vectors;
    const uint4* add = static_cast<const uint4*>(a.add) + u64(token) * vectors;
    for (u32 v = blockIdx.y * team.lanes() + team.lane(); v < vectors;
         v += gridDim.y * team.lanes()) {
        float sum[elements_in_vector(S.dtype)] = {};
#pragma unroll
        for (u32 first = 0; first < S.ranks; first += loads_in_flight)
            add_peers<S, rank>(rows, v, destinations, first, sum);
        if (a.add) add_vector<S.dtype>(sum, load_input(add + v));
        out[v] = round_vector<S.dtype>(sum);
    }
}

// Every CTA waits for the flags itself: its loads of rows are ordered after the flags that it has
// observed.
template <Shape S, u32 rank>
WEFT_FN bool receive_rows(const Block& team, const CombineArgs& a, const EpochState& state,
                          RankSet living) {
    const Share<S>& own = own_share<S>(a.site);
    u32 token = blockIdx.x;
    RankSet destinations = token < a.tokens ? own.destinations[token] : RankSet{};
    if (!await_combine<S>(team, a.site, living, state.epoch)) return false;
    while (token < a.tokens) {
        const u32 next = token + gridDim.x;
        const RankSet next_destinations = next < a.tokens ? own.destinations[next] : RankSet{};
        if constexpr (S.combine == Combine::gemm_push)
            reduce_expert_rows<S>(team, a, token, destinations);
        else
            reduce_token<S, rank>(team, a, token, destinations);
        token = next;
        destinations = next_destinations;
    }
    return true;
}

// Publishes that the peers' rows are in their inboxes, or in this rank's outbox. With gemm_push,
// earlier kernels have stored them.
template <Shape S>
WEFT_FN void send_rows(const Block& team, const CombineArgs& a, const EpochState& state,
                       RankSet living) {
    bool publishes = team.first();
    if constexpr (S.combine == Combine::push) {
        push_rows<S>(team, a);
        publishes = team.is_last_cta(&own_share<S>(a.site).header.arrived);
    }
    if (publishes) publish_combine<S>(team, a.site, living, state.epoch);
}

// All modes except push_fp8: rows are summed after the flags of all peers have arrived.
template <Shape S, u32 rank, PhasePart part>
WEFT_FN void combine_after_flags(const CombineArgs& a) {
    const Block team;
    Header& header = own_share<S>(a.site).header;
    griddep_wait();
    launch_dependents();
    const EpochState state = header.state;
    const RankSet living = header.living;  // loaded with the state
    if (state.failed != 0) return;
    const u64 start = start_of_lane<S>(team);
    if (fault(header, Point::combine_enter, a.site.rank, state.epoch) == Action::stay_away) return;

    if constexpr (part != PhasePart::recv) {
        mark_start(team, header, Phase::combine, state.epoch, start);
        send_rows<S>(team, a, state, living);
    }
    if constexpr (part != PhasePart::send) {
        const bool received = receive_rows<S, rank>(team, a, state, living);
        if (received && team.lane() == 0) mark_end(header, Phase::combine, state.epoch);
        if (received && team.first() && team.lane() == 0)
            keep_record(header, Phase::combine, state.epoch, start, a.tokens);
    }
}

template <Shape S, u32 rank, PhasePart part = PhasePart::whole>
WEFT_FN void combine(const CombineArgs& a) {
    if constexpr (S.combine == Combine::push_fp8)
        combine_push_fp8<S, part>(a);
    else
        combine_after_flags<S, rank, part>(a);
}

}  // namespace weft
