// SPDX-License-Identifier: Apache-2.0
// Dispatch: each token is stored directly into slot (source rank, token) of each rank that owns one
// of its experts. One launch, or split into a sending and a receiving kernel.
//
// Roles: all CTAs send. Each worker (blockIdx.x) takes tokens in a grid-stride loop and its CTAs
// (blockIdx.y) share a row, because one SM pushes about 36 GB/s while the GPU pushes 334 (H200,
// 2026-11-20): a small batch must be spread over many CTAs. The CTA that finishes last publishes
// the flags, waits for the peers' flags and advances the epoch.
#pragma once
#include <weft/alltoall/payload.cuh>

namespace weft {

// One token's routing in a warp: lane k holds entry k.
struct Routing {
    RankSet destinations;  // the same in every lane
    u32 rank;              // max_ranks where the entry names no expert
    i32 local;
    float weight;
    i32 id;
};

// The loads of a token that start before its routing is known: each thread's part of the first
// payload, and in lane k the k-th id and weight.
template <Shape S> struct TokenFragment {
    PayloadFragment<S> payload;
    i64 id;
    float weight;
};

template <Shape S> WEFT_FN TokenFragment<S> load_ids(const DispatchArgs& a, u32 token, u32 k) {
    TokenFragment<S> fragment{.payload = {}, .id = -1, .weight = 1.0f};
    if (k < S.top_k) {
        fragment.id = raw_id<S>(a, token, k);
        if (a.weights != nullptr) fragment.weight = a.weights[u64(token) * S.top_k + k];
    }
    return fragment;
}

template <Shape S>
WEFT_FN TokenFragment<S> load_fragment(const Block& team, const DispatchArgs& a, u32 token) {
    if (token >= a.tokens) return {.payload = {}, .id = -1, .weight = 1.0f};
    TokenFragment<S> fragment = load_ids<S>(a, token, team.warp_lane());
    fragment.payload.load(RowSlice(team), a, token);
    return fragment;
}

template <Shape S>
WEFT_FN Routing route_token(const DispatchArgs& a, RankSet living, const TokenFragment<S>& fragment,
                            u32 token, u32 k, bool reports) {
    Routing r{.destinations = {}, .rank = max_ranks, .local = -1, .weight = 0.0f, .id = -1};
    r.id = expert_id<S>(a, fragment.id, token, k, reports);
    ExpertLocation location{};
    if (r.id >= 0) location = living_location<S>(a, living, r.id, token, k, reports);
    if (r.id >= 0) {
        r.rank = location.rank;
        r.local = i32(location.local);
        r.weight = fragment.weight;
    }
    r.destinations = union_of_lanes(r.rank < max_ranks ? only(r.rank) : RankSet{});
    return r;
}

// One 16-byte vector of a peer's Route: four ids, or four weights, each filled where the expert is
// the peer's.
template <Shape S> WEFT_FN uint4 route_vector(const Routing& r, u32 peer, u32 vector) {
    constexpr u32 id_vectors = S.padded_top_k() / 4;
    const bool is_id = vector < id_vectors;
    u32 word[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 k = (is_id ? vector : vector - id_vectors) * 4 + i;
        const u32 rank = __shfl_sync(all_lanes, r.rank, k % warp_lanes);
        const i32 local = __shfl_sync(all_lanes, r.local, k % warp_lanes);
        const u32 weight = __shfl_sync(all_lanes, __float_as_uint(r.weight), k % warp_lanes);
        word[i] = rank == peer ? (is_id ? u32(local) : weight) : (is_id ? ~0u : 0u);
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

// One warp writes the token's Route to every rank and saves its destinations for combine.
template <Shape S>
WEFT_FN void send_route(const DispatchArgs& a, RankSet living, u32 token, u32 lane,
                        const Routing& r) {
    Share<S>& own = own_share<S>(a.site);
    constexpr u32 vectors = S.padded_top_k() / 2, total = S.ranks * vectors;
#pragma unroll
    for (u32 first = 0; first < total; first += warp_lanes) {
        const u32 j = first + lane, peer = j / vectors, vector = j % vectors;
        const uint4 words = route_vector<S>(r, peer, vector);
        if (j < total)
            store(reinterpret_cast<uint4*>(&route_at<S>(a, living, peer, token)) + vector, words);
    }
    const u32 same = __match_any_sync(all_lanes, r.id);
    if (r.id >= 0 && (same & ((1u << lane) - 1u)) != 0)
        refuse_duplicate(own.header, a.site, token, lane, r.id);
    if (lane == 0) own.destinations[token] = r.destinations;
    if constexpr (S.combine == Combine::gemm_push) {
        if (lane < S.top_k) {
            own.saved_routing.rank[token][lane] = r.rank;
            own.saved_routing.weight[token][lane] = r.weight;
        }
    }
}

template <Shape S>
WEFT_FN void send_token(const Block& team, const DispatchArgs& a, RankSet living, u32 token,
                        const TokenFragment<S>& fragment) {
    const bool routes = blockIdx.y == 0 && team.warp() == 0;
    const Routing r = route_token<S>(a, living, fragment, token, team.warp_lane(), routes);
    fragment.payload.push(RowSlice(team), a, token, r.destinations);
    if (routes) send_route<S>(a, living, token, team.warp_lane(), r);
}

// Sets the ids of routes that the last round may have used and this one does not to -1, so that no
// stale token is read. If the slots have moved since the last round, all routes may be stale.
template <Shape S>
WEFT_FN void clear_rows(const Block& team, const DispatchArgs& a, RankSet living, u32 from,
                        u32 until) {
    constexpr u32 vectors = S.padded_top_k() / 4, each = S.ranks * vectors;
    const u32 block = blockIdx.y * gridDim.x + blockIdx.x,
              total = until > from ? (until - from) * each : 0;
    for (u32 j = block * team.lanes() + team.lane(); j < total; j += team.teams() * team.lanes()) {
        const u32 token = from + j / each, peer = j % each / vectors, vector = j % vectors;
        store(reinterpret_cast<uint4*>(&route_at<S>(a, living, peer, token)) + vector,
              make_uint4(~0u, ~0u, ~0u, ~0u));
    }
    for (u32 token = from + block * team.lanes() + team.lane(); token < a.tokens;
         token += team.teams() * team.lanes())
        own_share<S>(a.site).destinations[token] = {};
}

// This rank's statistics to every living rank, split over all CTAs. They are stored before
// `is_last_cta`, as rows are, so its barriers order them before the flags.
template <Shape S>
WEFT_FN void send_stats(const Block& team, const DispatchArgs& a, RankSet living) {
    if constexpr (S.stats != 0) {
        const u32 block = blockIdx.y * gridDim.x + blockIdx.x;
        for (u32 i = block * team.lanes() + team.lane(); i < S.stats;
             i += team.teams() * team.lanes()) {
            const i32 value = load_input(a.stats + i);
#pragma unroll
            for (u32 offset = 0; offset < S.ranks; ++offset) {
                const u32 peer = next_rank<S>(a.site.rank, offset);
                if (has(living, peer))
                    store(&share<S>(a.site, peer).inbox.stats.row[a.site.rank][i], value);
            }
        }
    }
}

// Sends all tokens of this rank; true in the team that finishes last, which then publishes for all.
template <Shape S>
WEFT_FN bool send_tokens(const Block& team, const DispatchArgs& a, const EpochState& state,
                         RankSet living, u32 count, u32 stale, TokenFragment<S> fragment) {
    u32 token = blockIdx.x;
    while (token < count) {
        const TokenFragment<S> next = load_fragment<S>(team, a, token + gridDim.x);
        send_token<S>(team, a, living, token, fragment);
        fragment = next;
        token += gridDim.x;
    }
    clear_rows<S>(team, a, living, count, stale);
    send_stats<S>(team, a, living);
    fault(own_share<S>(a.site).header, Point::after_payload, a.site.rank, state.epoch + 1);
    return team.is_last_cta(&own_share<S>(a.site).header.arrived);
}

template <Shape S, PhasePart part = PhasePart::whole> WEFT_FN void dispatch(const DispatchArgs& a) {
    const Block team;
    Header& header = own_share<S>(a.site).header;
    griddep_wait();
    launch_dependents();
    const EpochState state = header.state;
    const RankSet living = header.living;  // loaded with the state, as is this:
    const bool slot_stride_changed = header.source_rows != a.source_rows;
    TokenFragment<S> fragment{};
    if constexpr (part != PhasePart::recv) fragment = load_fragment<S>(team, a, blockIdx.x);
    if (state.failed != 0) return;
    const u64 start = start_of_lane<S>(team), epoch = (state.epoch + 1) & epoch_mask;
    u32 count = header.sending;
    if constexpr (part != PhasePart::recv) {
        mark_start(team, header, Phase::dispatch, epoch, start);
        if (fault(header, Point::dispatch_enter, a.site.rank, epoch) == Action::stay_away) return;
        count = token_count<S>(a, team.first() && team.lane() == 0);
        const u32 stale = slot_stride_changed ? a.source_rows : state.rows;
        if (!send_tokens<S>(team, a, state, living, count, stale, fragment)) return;
        publish_dispatch<S>(team, a, living, epoch, start, count);
        if (team.lane() == 0) {
            header.sending = count;
            header.source_rows = a.source_rows;
        }
    }
    // Only one team gets here, the last one of the whole kernel or the only one of the receiving
    // kernel, and advances the epoch.
    if constexpr (part != PhasePart::send) {
        if (!await_dispatch<S>(team, a, living, epoch, start)) return;
        if (team.lane() == 0) {
            header.state = {epoch, 0, count};
            keep_record(header, Phase::dispatch, epoch, start, count);
            mark_end(header, Phase::dispatch, epoch);
        }
    }
}

}  // namespace weft
