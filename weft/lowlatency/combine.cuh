// SPDX-License-Identifier: Apache-2.0
// Low-latency combine: experts' rows are stored at their tokens' owners, which add them in top-k
// order as they arrive. With Reduce::sender each rank first adds its own experts' rows of a token
// and sends one row. One launch, or split into a sending and a receiving kernel. A warp is the unit
// of work.
//
// Roles, in grid order:
// coordinator  sends credits; checks that all ranks combine the same dispatch
// senders      push experts' rows to the tokens' owners (combine_send.cuh); none with gemm_push
// receivers    sum this rank's tokens as the rows arrive
#pragma once
#include <weft/lowlatency/combine_send.cuh>

namespace weft {

// Rows of one token that return to its owner.
template <LowLatencyShape S>
using ReturnedStrip =
    RowStrip<S.dtype, S.combine_fp8, S.hidden, S.returned_rows(), S.returned_vectors() * 16>;

// Waits for rows first .. first + 7 of a token, those in `expected`, and adds them. False when a
// wait has failed.
template <LowLatencyShape S, u32 n>
WEFT_FN bool add_rows(const LowLatencyCombineArgs& a, u64 epoch, u32 token, u32 strip, u32 first,
                      u32 expected, float lane_weight, float (&sum)[n], TraceRecorder& recorder) {
    LowLatencyShare<S>& own = own_share<S>(a.site);
    ReturnedStrip<S> rows(own.inbox.returned_row(token, first), strip, expected);
    const u64 since = recorder.waits();
    if (!await_rows(own.header, a.site, epoch, a.tokens, rows,
                    [&](u32 i) { return missing_rank<S>(a, token, first + i); }))
        return false;
    recorder.waited(since, a.site.rank);
#pragma unroll
    for (u32 i = 0; i < ReturnedStrip<S>::count; ++i) {
        if constexpr (S.reduce == Reduce::sender)
            rows.add_to(sum, i);
        else
            rows.add_to(sum, i, __shfl_sync(all_lanes, lane_weight, first + i));
    }
    return true;
}

// One warp's columns of out[token] = its rows in order, weighted, in fp32, then `add`, rounded
// once.
template <LowLatencyShape S>
WEFT_FN bool sum_columns(const LowLatencyCombineArgs& a, u64 epoch, u32 token, u32 unit,
                         TraceRecorder& recorder) {
    const u32 lane = threadIdx.x % warp_lanes, strip = unit % ReturnedStrip<S>::strips;
    const u32 at = strip * warp_lanes + lane;
    const auto expected = returned_rows<S>(a.routing, token);
    float weight = 1.0f;
    if (S.reduce == Reduce::receiver && a.weights != nullptr && lane < S.top_k)
        weight = a.weights[u64(token) * S.top_k + lane];
    float sum[ReturnedStrip<S>::columns] = {};
#pragma unroll
    for (u32 first = 0; first < S.returned_rows(); first += rows_in_flight)
        if (!add_rows<S>(a, epoch, token, strip, first, ranks_from(expected, first), weight, sum,
                         recorder))
            return false;
    if (at >= ReturnedStrip<S>::vectors) return true;
    constexpr u32 parts = ReturnedStrip<S>::columns / elements_in_vector(S.dtype);
    store_sum<S.dtype>(a.out, a.add, u64(token) * (S.out_bytes() / 16) + at * parts, sum);
    return true;
}

template <LowLatencyShape S>
WEFT_FN bool sum_tokens(const LowLatencyCombineArgs& a, u64 epoch, WarpUnits warp_units,
                        TraceRecorder& recorder) {
    constexpr u32 units = ReturnedStrip<S>::strips;
    for (u32 unit = warp_units.first; unit < a.tokens * units; unit += warp_units.step) {
        if (!sum_columns<S>(a, epoch, unit / units, unit, recorder)) return false;
        recorder.worked();
    }
    return true;
}

// The coordinator checks that all ranks combine the same dispatch: one warp sends this rank's
// dispatch id, another one compares those of the peers.
template <LowLatencyShape S, PhasePart part, u32 first = 0>
WEFT_FN void compare_dispatch_ids(const Block& team, const LowLatencyCombineArgs& a,
                                  const RankState& state, u64 epoch) {
    if constexpr (first + warp_lanes < S.ranks)
        compare_dispatch_ids<S, part, first + warp_lanes>(team, a, state, epoch);
    const u32 peer = first + team.warp_lane();
    if (S.gemm_push || !state.is_living_peer<S>(peer)) return;
    if (part != PhasePart::recv && team.warp() == 2 &&
        await_credit<S>(a.site, state.progress, Phase::combine, peer))
        send_dispatch_id<S>(a, epoch, peer);
    if (part != PhasePart::send && team.warp() == 3) same_dispatch<S>(a, epoch, peer);
}

// The coordinator clears the addresses, so that a GEMM that runs again before the next dispatch
// stores nothing.
template <LowLatencyShape S>
WEFT_FN void clear_dst_addrs(const Block& team, const LowLatencyCombineArgs& a) {
    const u32 warps = team.lanes() / warp_lanes;
    for (u32 e = team.warp(); e < a.own_experts; e += warps)
        for (u32 row = team.warp_lane(); row < min(u32(a.counts[e]), S.rows()); row += warp_lanes)
            a.routing.dst_addr[u64(e) * S.rows() + row] = 0;
}

template <LowLatencyShape S, PhasePart part = PhasePart::whole>
WEFT_FN void low_latency_combine(const LowLatencyCombineArgs& a) {
    __shared__ TraceRecord record;
    const Block team;
    LowLatencyShare<S>& own = own_share<S>(a.site);
    const CtaRoles roles{0, S.gemm_push || part == PhasePart::recv ? 0 : a.senders};
    griddep_wait();
    launch_dependents();
    const RankState state = RankState::read<S>(own);
    TokenRows<S> rows{};
    if (roles.is<CtaRole::sender>()) rows = TokenRows<S>::of(a, roles.sender_units().first);
    const u64 start = start_time(team, roles);
    const u64 done = part == PhasePart::recv ? state.progress.combined : state.progress.returned;
    const u64 epoch = (done + 1) & epoch_mask;
    TraceRecorder recorder(team, record, !roles.is<CtaRole::coordinator>(), start);
    u64 end = 0;

    if constexpr (part != PhasePart::recv) {
        const Action planned = fault(own.header, Point::combine_enter, a.site.rank, epoch);
        if (planned == Action::stay_away) return;
    }
    if (roles.is<CtaRole::sender>()) fault(own.header, Point::before_ready, a.site.rank, epoch);
    if (!state.may_start<S>(team, a.site, Phase::combine, roles.is<CtaRole::sender>())) return;
    recorder.credited();
    // Senders count themselves after they have sent.
    const auto count = [&] {
        if (team.lane() != team.lanes() - 1 || !is_last_cta_relaxed(own.header)) return;
        if constexpr (part != PhasePart::recv) own.progress.returned = epoch;
        if constexpr (part != PhasePart::send) own.progress.combined = epoch;
    };
    if (!roles.is<CtaRole::sender>()) count();
    if (roles.is<CtaRole::coordinator>()) {
        send_credits<S>(team, a.site, state);
        if constexpr (part != PhasePart::recv)
            mark_start(team, own.header, Phase::combine, epoch, start);
        compare_dispatch_ids<S, part>(team, a, state, epoch);
        if constexpr (S.gemm_push) clear_dst_addrs<S>(team, a);
    } else if (roles.is<CtaRole::sender>()) {
        send_rows<S>(a, roles.sender_units(), rows, recorder);
        count();
    } else {
        fault(own.header, Point::before_read, a.site.rank, epoch);
        if (!sum_tokens<S>(a, epoch, roles.receiver_units(), recorder)) return;
        if (roles.is_first_receiver() && team.lane() == 0) {
            end = keep_record(own.header, Phase::combine, epoch, start, a.tokens);
            mark_end(own.header, Phase::combine, epoch, end);
        }
    }
    recorder.ended(team, a.traces, Phase::combine, epoch, roles.worker_role(), blockIdx.x, end);
}

}  // namespace weft
