// SPDX-License-Identifier: Apache-2.0
// Low-latency dispatch: tokens are quantised in registers, unless the input is quantised, and
// stored once at every rank that has one of their experts; the receiver places them by expert as
// they arrive. One launch, or split into a sending and a receiving kernel. A warp is the unit of
// work: it sends 512 columns of a token, or receives 2 KiB of a row.
//
// Roles, in grid order:
// coordinator    sends credits and checks that the peers' dispatch is the same one
// metadata CTAs  send token counts and the masks of tokens by expert (metadata.cuh)
// senders        send rows, their entries and weights
// receivers      read the metadata, then move rows to their places by expert (receive.cuh)
#pragma once
#include <weft/lowlatency/metadata.cuh>
#include <weft/lowlatency/receive.cuh>

namespace weft {

// A warp's loads of a token before it may send: 16 columns per lane, or as many bytes of a row that
// is sent unchanged, and, in lane k, the k-th id.
// All loads start at once and are used when the credits have arrived.
template <LowLatencyShape S> struct TokenFragment {
    // A lane holds 32 bytes of a quantised row.
    static constexpr DType held = S.recipe == Recipe::quantised ? DType::bf16 : S.dtype;
    static constexpr u32 width = S.input_vectors() * elements_in_vector(held);  // of a row
    Columns<held> columns;
    u32 token, part;
    u32 id_low, id_high;

    static constexpr u32 row_lanes =
        (S.input_vectors() + Columns<held>::vectors - 1) / Columns<held>::vectors;
    static constexpr u32 units = (row_lanes + warp_lanes - 1) / warp_lanes;  // of a token

    WEFT_FN static TokenFragment of(const LowLatencyDispatchArgs& a, u32 unit) {
        const u32 lane = threadIdx.x % warp_lanes;
        TokenFragment fragment{.columns = {},
                               .token = unit / units,
                               .part = unit % units,
                               .id_low = ~0u,
                               .id_high = ~0u};
        if (fragment.token >= a.tokens) return fragment;
        const u8* row = static_cast<const u8*>(a.x) + u64(fragment.token) * S.input_vectors() * 16;
        fragment.columns = load_columns<held, S.quantises(), width>(row, fragment.part);
        if (lane < S.top_k) {
            const u8* id = static_cast<const u8*>(a.ids) +
                           (u64(fragment.token) * S.top_k + lane) * a.ids_bytes;
            fragment.id_low = load_early(id);
            if (a.ids_bytes == 8) fragment.id_high = load_early(id + 4);
        }
        return fragment;
    }
    // The id as an index; -1 for none and for an out-of-range id.
    WEFT_FN i32 id(const LowLatencyDispatchArgs& a) const {
        const bool known = (a.ids_bytes != 8 || id_high == 0) && id_low < S.experts;
        return known ? i32(id_low) : -1;
    }
};

// Calls visit(row of the token in the inbox) for each destination, in rank order from this rank on.
template <LowLatencyShape S, class Visit>
WEFT_FN void for_destinations(const Site& site, u32 token, RankSet destinations,
                              const Visit& visit) {
#pragma unroll
    for (u32 i = 0; i < S.ranks; ++i) {
        const u32 peer = next_rank<S>(site.rank, i);
        if (has(destinations, peer))
            visit(share_of<S>(site, peer).inbox.sent_row(site.rank, token));
    }
}

// Quantises and sends the columns of one warp, or sends the loaded vectors unchanged.
template <LowLatencyShape S>
WEFT_FN void send_columns(const Site& site, const TokenFragment<S>& fragment,
                          RankSet destinations) {
    if constexpr (!S.quantises()) {
        using Fragment = TokenFragment<S>;
        auto columns = fragment.columns;
#pragma unroll
        for (u32 i = 0; i < Columns<Fragment::held>::vectors; ++i)
            columns.v[i] = canonical<S.input_dtype()>(columns.v[i]);
        for_destinations<S>(site, fragment.token, destinations, [&](u8* row) {
            post_columns<Fragment::held, Fragment::width>(row, fragment.part, columns);
        });
    } else {
        float x[lane_columns];
        fragment.columns.widen(x);
        const u32 amax = block_amax_bits<S.group>(x);
        const u32 v = fragment.part * warp_lanes + threadIdx.x % warp_lanes;
        if (v >= TokenFragment<S>::row_lanes) return;
        const BlockScale scale = scale_for<S>(amax);
        if constexpr (S.recipe == Recipe::triton_dist)
            for (float& each : x) each = div_full(each, divisor_of(scale.scale));
        const uint4 values = quantize(x, scale.inverse, amax >= infinity_bits);
        constexpr u32 lanes = S.group / lane_columns;
        const bool leads = v % lanes == 0;
        for_destinations<S>(site, fragment.token, destinations, [&](u8* row) {
            post_vector(reinterpret_cast<uint4*>(row) + v, values);
            if (leads) send_scale<S.blocks()>(row + S.hidden, v / lanes, scale.scale);
        });
    }
}

// Sends the weights of one token, for Reduce::sender.
template <LowLatencyShape S>
WEFT_FN void send_weights(const LowLatencyDispatchArgs& a, u32 token, RankSet destinations) {
    const u32 lane = threadIdx.x % warp_lanes;
    if (lane >= S.weight_vectors() * 4) return;
    u32 bits = 0;
    if (lane < S.top_k)
        bits = a.weights == nullptr ? 0x3f800000u
                                    : __float_as_uint(a.weights[u64(token) * S.top_k + lane]);
    bits = canonical<DType::fp32>(bits);
    for_destinations<S>(a.site, token, destinations, [&](u8* row) {
        u32* words = reinterpret_cast<u32*>(row + (S.value_vectors() + S.scale_vectors()) * 16);
        store_relaxed(words + lane, bits);
    });
}

template <LowLatencyShape S>
WEFT_FN void send_tokens(const LowLatencyDispatchArgs& a, RankSet living, u64 epoch,
                         WarpUnits warp_units, TokenFragment<S> fragment, TraceRecorder& recorder) {
    constexpr u32 units = TokenFragment<S>::units;
    for (u32 unit = warp_units.first; unit < a.tokens * units; unit += warp_units.step) {
        const TokenFragment<S> next = TokenFragment<S>::of(a, unit + warp_units.step);
        const i32 id = fragment.id(a);
        RankSet destination{};  // of this lane's entry
        if (id >= 0) destination = only(locate_expert<S>(a.placement, u32(id)).rank);
        const RankSet destinations = union_of_lanes(destination) & living;
        if (unit % units == 0) send_choices<S>(a, living, epoch, fragment.token, id);
        send_columns<S>(a.site, fragment, destinations);
        if constexpr (S.reduce == Reduce::sender)
            if (unit % units == 0) send_weights<S>(a, fragment.token, destinations);
        fragment = next;
        recorder.worked();
    }
}

template <LowLatencyShape S, PhasePart part>
WEFT_FN CtaRoles dispatch_roles(const LowLatencyDispatchArgs& a) {
    if constexpr (part == PhasePart::recv) return {0, 0};
    return {a.tokens == 0 ? 1 : chunks_of(a.tokens), a.senders};
}

// Fails if a peer's dispatch is not the same one, and records the waits for the peer. No CTA waits
// for it.
template <LowLatencyShape S>
WEFT_FN void check_dispatch_begun(const Block& team, const LowLatencyDispatchArgs& a,
                                  const RankState& state, u64 epoch) {
    const u32 peer = team.lane();
    u32 tokens = 0;
    if (!state.is_living_peer<S>(peer) || !await_dispatch_begun<S>(a, epoch, peer)) return;
    await_last_token<S>(a, epoch, peer, tokens);
}

// With gemm_push the experts' kernels store rows at the owners, so the dispatch waits for the
// combine credits on their behalf.
// Order: the end of this kernel orders their stores after the restored sentinels.
template <LowLatencyShape S>
WEFT_FN void await_combine_credits(const Block& team, const LowLatencyDispatchArgs& a,
                                   const RankState& state) {
    const u32 lane =
        team.lane() - warp_lanes;  // the second warp: the first one reads dispatch begun
    if (state.is_living_peer<S>(lane))
        await_credit<S>(a.site, state.progress, Phase::combine, lane);
}

// Checks whether this CTA has work and sets `idle` if not; false when a wait has failed. The number
// of receivers allows for ranks with many tokens. A CTA whose first unit is beyond this rank's own
// token count reads the token counts of all ranks first; otherwise, with one token, all receivers
// would repeatedly poll every word of every source.
template <LowLatencyShape S>
WEFT_FN bool find_work(const Block& team, const LowLatencyDispatchArgs& a, const RankState& state,
                       u64 epoch, u32 first, bool& idle) {
    LowLatencyShare<S>& own = own_share<S>(a.site);
    const u32 token = ReceiveUnit<S>::of(first, a.site.rank).token, peer = team.lane();
    if (token < a.tokens) return true;
    u32 tokens = 0;
    bool arrived = true;
    if (state.is_living_peer<S>(peer))
        arrived = await_tagged(own.header, a.site, Phase::dispatch, &own.inbox.tokens[peer], peer,
                               epoch, tokens);
    idle = !team.any(token < clamp_tokens<S>(tokens));
    return team.all(arrived);
}

// The work of a receiver CTA.
template <LowLatencyShape S>
WEFT_FN bool receive(const Block& team, const LowLatencyDispatchArgs& a, const RankState& state,
                     u64 epoch, const CtaRoles& roles, ReceiveScratch<S>& scratch,
                     TraceRecorder& recorder) {
    const WarpUnits warp_units = roles.receiver_units();
    bool idle = false;
    const u32 first = warp_units.first - team.warp();  // of this CTA
    if (!roles.is_first_receiver() && !find_work<S>(team, a, state, epoch, first, idle))
        return false;
    if (idle) {
        recorder.learned();
        return true;
    }
    const bool arrived =
        await_metadata<S>(team, a, state.living, epoch, roles.is_first_receiver(), scratch);
    const RowFragment<S> fragment = poll_first_row<S>(a, warp_units.first);
    if (!team.all(arrived)) return false;
    compute_offsets<S>(team, a, roles.is_first_receiver(), scratch);
    recorder.learned();
    return receive_rows<S>(a, epoch, warp_units, scratch, fragment, recorder);
}

template <LowLatencyShape S, PhasePart part = PhasePart::whole>
WEFT_FN void low_latency_dispatch(const LowLatencyDispatchArgs& a) {
    __shared__ TraceRecord record;
    __shared__ __align__(16)
        u8 scratch[largest(sizeof(MetadataScratch<S>), sizeof(ReceiveScratch<S>))];
    MetadataScratch<S>& metadata = *reinterpret_cast<MetadataScratch<S>*>(scratch);
    ReceiveScratch<S>& receiving = *reinterpret_cast<ReceiveScratch<S>*>(scratch);
    const Block team;
    LowLatencyShare<S>& own = own_share<S>(a.site);
    const CtaRoles roles = dispatch_roles<S, part>(a);
    if (roles.is<CtaRole::metadata>()) clear_masks<S>(team, metadata);
    griddep_wait();
    launch_dependents();
    const RankState state = RankState::read<S>(own);
    TokenFragment<S> fragment{};
    if (roles.is<CtaRole::sender>()) fragment = TokenFragment<S>::of(a, roles.sender_units().first);
    if (roles.is<CtaRole::metadata>()) build_masks<S>(team, a, blockIdx.x - 1, metadata);
    const u64 start = start_time(team, roles);
    const u64 done = part == PhasePart::recv ? state.progress.received : state.progress.sent;
    const u64 epoch = (done + 1) & epoch_mask;
    TraceRecorder recorder(team, record, !roles.is<CtaRole::coordinator>(), start);
    u64 end = 0;

    if constexpr (part != PhasePart::recv) {
        const Action planned = fault(own.header, Point::dispatch_enter, a.site.rank, epoch);
        if (planned == Action::stay_away) return;
    }
    const bool stores = roles.is<CtaRole::metadata>() || roles.is<CtaRole::sender>();
    if (!state.may_start<S>(team, a.site, Phase::dispatch, stores)) return;
    recorder.credited();
    // Senders and metadata CTAs count themselves after they have sent.
    const auto count = [&] {
        if (team.lane() != team.lanes() - 1 || !is_last_cta_relaxed(own.header)) return;
        if constexpr (part != PhasePart::recv) own.progress.sent = epoch;
        if constexpr (part != PhasePart::send) own.progress.received = epoch;
    };
    if (!stores) count();
    if (roles.is<CtaRole::coordinator>()) {
        send_credits<S>(team, a.site, state);
        if constexpr (part != PhasePart::recv)
            mark_start(team, own.header, Phase::dispatch, epoch, start);
        if constexpr (part != PhasePart::send) check_dispatch_begun<S>(team, a, state, epoch);
        if constexpr (S.gemm_push) await_combine_credits<S>(team, a, state);
    } else if (stores) {
        if (roles.is<CtaRole::metadata>())
            send_metadata<S>(team, a, state, epoch, blockIdx.x - 1, metadata);
        else
            send_tokens<S>(a, state.living, epoch, roles.sender_units(), fragment, recorder);
        count();
        fault(own.header, Point::after_payload, a.site.rank, epoch);
    } else {
        if (!receive<S>(team, a, state, epoch, roles, receiving, recorder)) return;
        if (roles.is_first_receiver() && team.lane() == 0) {
            end = keep_record(own.header, Phase::dispatch, epoch, start, a.tokens);
            mark_end(own.header, Phase::dispatch, epoch, end);
        }
    }
    recorder.ended(team, a.traces, Phase::dispatch, epoch, roles.worker_role(), blockIdx.x, end);
}

}  // namespace weft
