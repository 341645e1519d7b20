// Low-latency combine: experts' rows go straight to their tokens' owners, who add them in top-k
// order as they arrive. With Reduce::sender each rank first adds what its own experts made of a
// token and sends one row. One launch, or split into a sending and a receiving kernel. A warp is
// the unit of work.
//
// Roles, in grid order:
// coordinator  sends credits; checks that all ranks combine the same dispatch
// senders      push experts' rows to the tokens' owners (combine_send.cuh); none with gemm_push
// receivers    sum this rank's tokens as the rows arrive
#pragma once
#include <weft/lowlatency/combine_send.cuh>

namespace weft {

constexpr u32 rows_in_flight = 8;  // of one token, in each lane

// One lane's columns of one returned row.
template <LowLatencyShape S> struct ReturnedFragment {
    uint4 v;
    u32 scale;  // of its block, in the block's first lane

    static constexpr u32 columns = S.combine_fp8 ? lane_columns : elements_in_vector(S.dtype);
    static constexpr u32 row_lanes = S.hidden / columns;
    static constexpr u32 units = (row_lanes + warp_lanes - 1) / warp_lanes;  // of a token
    static constexpr u32 lanes = scale_columns / lane_columns;

    WEFT_FN static u32* scale_at(u8* row, u32 at) {
        return reinterpret_cast<u32*>(row + S.hidden) + at / lanes;
    }
    WEFT_FN void load(u8* row, u32 at) {
        v = poll_vector(reinterpret_cast<const uint4*>(row) + at);
        if constexpr (S.combine_fp8)
            if (at % lanes == 0) scale = load_relaxed(scale_at(row, at));
    }
    WEFT_FN bool is_ready_at(u32 at) const {
        if constexpr (S.combine_fp8)
            if (at % lanes == 0 && scale == sentinel) return false;
        return is_ready(v);
    }
    WEFT_FN void restore(u8* row, u32 at) const {
        restore_sentinel(reinterpret_cast<uint4*>(row) + at);
        if constexpr (S.combine_fp8)
            if (at % lanes == 0) store_relaxed(scale_at(row, at), sentinel);
    }
    // All lanes of the warp take part.
    WEFT_FN void add_to(float (&sum)[columns], float weight) const {
        float x[columns] = {};
        if constexpr (S.combine_fp8) {
            const float block = __uint_as_float(
                __shfl_sync(all_lanes, scale, threadIdx.x % warp_lanes / lanes * lanes));
            add_e4m3(x, v, block);
        } else {
            add_vector<S.dtype>(x, v);
        }
#pragma unroll
        for (u32 i = 0; i < columns; ++i) {
            const float part = S.reduce == Reduce::sender ? x[i] : __fmul_rn(weight, x[i]);
            sum[i] = __fadd_rn(sum[i], part);
        }
    }
};

// Waits for rows first .. first + 7 of a token, those in `expected`, restores their sentinels and
// adds them. False when a wait has failed.
template <LowLatencyShape S, u32 n>
WEFT_FN bool add_rows(const LowLatencyCombineArgs& a, u64 wanted, u32 token, u32 at, u32 first,
                      u32 expected, float lane_weight, float (&sum)[n], TraceRecorder& recorder) {
    constexpr u32 count = S.returned_rows() < rows_in_flight ? S.returned_rows() : rows_in_flight;
    LowLatencyShare<S>& own = own_share<S>(a.site);
    const bool valid = at < ReturnedFragment<S>::row_lanes;
    ReturnedFragment<S> fragment[count];
#pragma unroll
    for (u32 i = 0; i < count; ++i)
        if (valid && (expected >> (first + i) & 1))
            fragment[i].load(own.inbox.returned_row(token, first + i), at);
    const auto missing = [&] {
        u32 found = 0;
#pragma unroll
        for (u32 i = 0; i < count; ++i)
            if (valid && (expected >> (first + i) & 1) && !fragment[i].is_ready_at(at))
                found |= 1u << i;
        return found;
    };
    const auto poll = [&](u32 which) {
#pragma unroll
        for (u32 i = 0; i < count; ++i)
            if (which >> i & 1) fragment[i].load(own.inbox.returned_row(token, first + i), at);
    };
    SpinWait spin;
    const u64 since = recorder.waits();
    for (u32 left = missing(); !__all_sync(all_lanes, left == 0); left = missing()) {
        u32 peer = a.site.rank;
        if (left != 0 && spin.checks_next())
            peer = missing_rank<S>(a, token, first + u32(__ffs(i32(left)) - 1));
        const Wait wait{peer, Phase::combine, wanted, epoch_before(wanted)};
        const bool waiting = left == 0 || spin.keep_waiting(own.header, a.site, wait);
        if (!__all_sync(all_lanes, waiting)) return false;
        const u32 next = next_polled(left, a.tokens);
        poll(next);
        if (next != left && missing() != left) poll(missing());
    }
    recorder.waited(since, a.site.rank);
#pragma unroll
    for (u32 i = 0; i < count; ++i)
        if (expected >> (first + i) & 1) {
            const float weight = __shfl_sync(all_lanes, lane_weight, first + i);
            if (valid) fragment[i].restore(own.inbox.returned_row(token, first + i), at);
            fragment[i].add_to(sum, weight);
        }
    return true;
}

// One warp's columns of out[token] = its rows in order, weighted, in fp32, then `add`, rounded
// once.
template <LowLatencyShape S>
WEFT_FN bool sum_columns(const LowLatencyCombineArgs& a, u64 wanted, u32 token, u32 unit,
                         TraceRecorder& recorder) {
    constexpr u32 width = elements_in_vector(S.dtype), parts = ReturnedFragment<S>::columns / width;
    const u32 lane = threadIdx.x % warp_lanes;
    const u32 at = unit % ReturnedFragment<S>::units * warp_lanes + lane;
    const u32 expected = a.routing.expected[2 * token + (S.reduce == Reduce::sender)];
    float weight = 1.0f;
    if (S.reduce == Reduce::receiver && a.weights != nullptr && lane < S.top_k)
        weight = a.weights[u64(token) * S.top_k + lane];
    float sum[ReturnedFragment<S>::columns] = {};
#pragma unroll
    for (u32 first = 0; first < S.returned_rows(); first += rows_in_flight)
        if (!add_rows<S>(a, wanted, token, at, first, expected, weight, sum, recorder))
            return false;
    if (at >= ReturnedFragment<S>::row_lanes) return true;
    const u64 vector = u64(token) * (S.out_bytes() / 16) + at * parts;
#pragma unroll
    for (u32 i = 0; i < parts; ++i) {
        float (&part)[width] = reinterpret_cast<float (&)[width]>(sum[i * width]);
        if (a.add != nullptr)
            add_vector<S.dtype>(part, load_input(static_cast<const uint4*>(a.add) + vector + i));
        static_cast<uint4*>(a.out)[vector + i] = round_vector<S.dtype>(part);
    }
    return true;
}

template <LowLatencyShape S>
WEFT_FN bool sum_tokens(const LowLatencyCombineArgs& a, u64 wanted, WarpUnits warp_units,
                        TraceRecorder& recorder) {
    constexpr u32 units = ReturnedFragment<S>::units;
    for (u32 unit = warp_units.first; unit < a.tokens * units; unit += warp_units.step) {
        if (!sum_columns<S>(a, wanted, unit / units, unit, recorder)) return false;
        recorder.worked();
    }
    return true;
}

// The coordinator checks that all ranks combine the same dispatch: one warp sends this rank's
// dispatch id, another one compares those of the peers.
template <LowLatencyShape S, PhasePart part>
WEFT_FN void compare_dispatch_ids(const Block& team, const LowLatencyCombineArgs& a,
                                  const RankState& state, u64 wanted) {
    const u32 peer = team.warp_lane();
    if (S.gemm_push || peer >= S.ranks) return;
    if (part != PhasePart::recv && team.warp() == 2 &&
        await_credit<S>(a.site, state.progress, Phase::combine, peer))
        send_dispatch_id<S>(a, wanted, peer);
    if (part != PhasePart::send && team.warp() == 3) same_dispatch<S>(a, wanted, peer);
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
    const u64 wanted = (done + 1) & epoch_mask;
    TraceRecorder recorder(team, record, !roles.is<CtaRole::coordinator>(), start);
    u64 end = 0;

    if constexpr (part != PhasePart::recv) {
        const Action planned = fault(own.header, Point::combine_enter, a.site.rank, wanted);
        if (planned == Action::stay_away) return;
    }
    if (roles.is<CtaRole::sender>()) fault(own.header, Point::before_ready, a.site.rank, wanted);
    if (!state.may_start<S>(team, a.site, Phase::combine, roles.is<CtaRole::sender>())) return;
    recorder.credited();
    // Senders count themselves after they have sent.
    const auto count = [&] {
        if (team.lane() != team.lanes() - 1 || !is_last_cta_relaxed(own.header)) return;
        if constexpr (part != PhasePart::recv) own.progress.returned = wanted;
        if constexpr (part != PhasePart::send) own.progress.combined = wanted;
    };
    if (!roles.is<CtaRole::sender>()) count();
    if (roles.is<CtaRole::coordinator>()) {
        send_credits<S>(team, a.site, state.progress);
        if constexpr (part != PhasePart::recv)
            mark_start(team, own.header, Phase::combine, wanted, start);
        compare_dispatch_ids<S, part>(team, a, state, wanted);
        if constexpr (S.gemm_push) clear_dst_addrs<S>(team, a);
    } else if (roles.is<CtaRole::sender>()) {
        send_rows<S>(a, roles.sender_units(), rows, recorder);
        count();
    } else {
        fault(own.header, Point::before_read, a.site.rank, wanted);
        if (!sum_tokens<S>(a, wanted, roles.receiver_units(), recorder)) return;
        if (roles.is_first_receiver() && team.lane() == 0) {
            end = keep_record(own.header, Phase::combine, wanted, start, a.tokens);
            mark_end(own.header, Phase::combine, wanted, end);
        }
    }
    recorder.ended(team, a.traces, Phase::combine, wanted, roles.worker_role(), blockIdx.x, end);
}

}  // namespace weft
