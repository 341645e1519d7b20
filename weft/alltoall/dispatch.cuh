// Dispatch: every token straight into the slot (source rank, token) of each rank that owns one of
// its experts. One launch. The grid is (token workers, chunks of a row); a row of few tokens is
// split over many CTAs because one SM pushes about 36 GB/s while the GPU pushes 334 (H200,
// 2026-11-20). Only the last CTA waits for peers.
#pragma once
#include <weft/alltoall/payload.cuh>

namespace weft {

// Where this warp's lanes stand in one token's routing: lane k holds entry k.
struct Routing {
    u32 destinations;  // the same in every lane
    u32 rank;          // max_ranks where the entry names no expert
    i32 local;
    float weight;
    i32 id;
};

// A token as its threads hold it before anything is decided: its cargo, and in lane k its k-th id
// and weight.
template <Shape S> struct Parcel {
    Cargo<S> cargo;
    i64 id;
    float weight;
};

template <Shape S> WEFT_FN Parcel<S> load_ids(const DispatchArgs& a, u32 token, u32 k) {
    Parcel<S> parcel{.cargo = {}, .id = -1, .weight = 1.0f};
    if (k < S.top_k) {
        parcel.id = raw_id<S>(a, token, k);
        if (a.weights != nullptr) parcel.weight = a.weights[u64(token) * S.top_k + k];
    }
    return parcel;
}

template <Shape S>
WEFT_FN Parcel<S> load_parcel(const Block& team, const DispatchArgs& a, u32 token) {
    if (token >= a.tokens) return {.cargo = {}, .id = -1, .weight = 1.0f};
    Parcel<S> parcel = load_ids<S>(a, token, team.warp_lane());
    parcel.cargo.load(Cut(team), a, token);
    return parcel;
}

template <Shape S>
WEFT_FN Routing route_token(const DispatchArgs& a, const Parcel<S>& parcel, u32 token, u32 k,
                            bool reports) {
    Routing r{.destinations = 0, .rank = max_ranks, .local = -1, .weight = 0.0f, .id = -1};
    r.id = expert_id<S>(a, parcel.id, token, k, reports);
    if (r.id >= 0) {
        const Place place = place_of<S>(a, u32(r.id));
        r.rank = place.rank;
        r.local = i32(place.local);
        r.weight = parcel.weight;
    }
    r.destinations = __reduce_or_sync(all_lanes, r.rank < max_ranks ? 1u << r.rank : 0u);
    return r;
}

// One 16-byte vector of a peer's view of the route: four ids, or four weights, each where the
// expert is the peer's.
template <Shape S> WEFT_FN uint4 route_vector(const Routing& r, u32 peer, u32 vector) {
    constexpr u32 id_vectors = S.slots() / 4;
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

// One warp tells every rank where the token goes, and keeps its destinations for combine.
template <Shape S>
WEFT_FN void send_route(const DispatchArgs& a, u32 token, u32 lane, const Routing& r) {
    Share<S>& own = mine<S>(a.site);
    constexpr u32 vectors = S.slots() / 2, total = S.ranks * vectors;
#pragma unroll
    for (u32 first = 0; first < total; first += warp_lanes) {
        const u32 j = first + lane, peer = j / vectors, vector = j % vectors;
        const uint4 words = route_vector<S>(r, peer, vector);
        if (j < total)
            store(
                reinterpret_cast<uint4*>(&share<S>(a.site, peer).inbox.route[a.site.rank][token]) +
                    vector,
                words);
    }
    const u32 same = __match_any_sync(all_lanes, r.id);
    if (r.id >= 0 && (same & ((1u << lane) - 1u)) != 0)
        refuse_duplicate(own.header, a.site, token, lane, r.id);
    if (lane == 0) own.destinations[token] = r.destinations;
    if constexpr (S.way == Way::choices) {
        if (lane < S.top_k) {
            own.choices.rank[token][lane] = r.rank;
            own.choices.weight[token][lane] = r.weight;
        }
    }
}

template <Shape S>
WEFT_FN void send_token(const Block& team, const DispatchArgs& a, u32 token,
                        const Parcel<S>& parcel) {
    const bool routes = blockIdx.y == 0 && team.warp() == 0;
    const Routing r = route_token<S>(a, parcel, token, team.warp_lane(), routes);
    parcel.cargo.push(Cut(team), a, token, r.destinations);
    if (routes) send_route<S>(a, token, team.warp_lane(), r);
}

// Rows that the last round used and this one does not: their ids become -1, so no stale token is
// ever read.
template <Shape S>
WEFT_FN void clear_rows(const Block& team, const DispatchArgs& a, u32 from, u32 until) {
    constexpr u32 vectors = S.slots() / 4, each = S.ranks * vectors;
    const u32 block = blockIdx.y * gridDim.x + blockIdx.x,
              total = until > from ? (until - from) * each : 0;
    for (u32 j = block * team.lanes() + team.lane(); j < total; j += team.teams() * team.lanes()) {
        const u32 token = from + j / each, peer = j % each / vectors, vector = j % vectors;
        store(reinterpret_cast<uint4*>(&share<S>(a.site, peer).inbox.route[a.site.rank][token]) +
                  vector,
              make_uint4(~0u, ~0u, ~0u, ~0u));
    }
    for (u32 token = from + block * team.lanes() + team.lane(); token < a.tokens;
         token += team.teams() * team.lanes())
        mine<S>(a.site).destinations[token] = 0;
}

// This rank's numbers to every rank, cut over all CTAs: like the rows, they are stored before
// `last_of`, and its barriers order them before the flags.
template <Shape S> WEFT_FN void send_stats(const Block& team, const DispatchArgs& a) {
    if constexpr (S.stats != 0) {
        const u32 block = blockIdx.y * gridDim.x + blockIdx.x;
        for (u32 i = block * team.lanes() + team.lane(); i < S.stats;
             i += team.teams() * team.lanes()) {
            const i32 number = load_input(a.stats + i);
#pragma unroll
            for (u32 turn = 0; turn < S.ranks; ++turn) {
                const u32 rank = a.site.rank + turn, peer = rank < S.ranks ? rank : rank - S.ranks;
                store(&share<S>(a.site, peer).inbox.stats.row[a.site.rank][i], number);
            }
        }
    }
}

// All of this rank's tokens; true in the team that came last, which then publishes for all.
template <Shape S>
WEFT_FN bool send_tokens(const Block& team, const DispatchArgs& a, const Turn& turn, u32 count,
                         Parcel<S> parcel) {
    u32 token = blockIdx.x;
    while (token < count) {
        const Parcel<S> next = load_parcel<S>(team, a, token + gridDim.x);
        send_token<S>(team, a, token, parcel);
        parcel = next;
        token += gridDim.x;
    }
    clear_rows<S>(team, a, count, turn.rows);
    send_stats<S>(team, a);
    fault(mine<S>(a.site).header, Point::after_payload, a.site.rank, turn.epoch + 1);
    return team.last_of(&mine<S>(a.site).header.arrived);
}

template <Shape S, Part part = Part::whole> WEFT_FN void dispatch(const DispatchArgs& a) {
    const Block team;
    Header& header = mine<S>(a.site).header;
    wait_for_predecessor();
    admit_successor();
    const Turn turn = header.turn;
    Parcel<S> parcel{};
    if constexpr (part != Part::receive) parcel = load_parcel<S>(team, a, blockIdx.x);
    if (turn.failed != 0) return;
    const u64 start = team.lane() == 0 ? now_ns() : 0, wanted = (turn.epoch + 1) & epoch_mask;
    u32 count = header.sending;
    if constexpr (part != Part::receive) {
        mark_start(team, header, Phase::dispatch, wanted, start);
        if (fault(header, Point::dispatch_enter, a.site.rank, wanted) == Action::stay_away) return;
        count = token_count<S>(a, team.first() && team.lane() == 0);
        if (!send_tokens<S>(team, a, turn, count, parcel)) return;
        publish<S>(team, a.site, Phase::dispatch, wanted, count);
        if (team.lane() == 0) header.sending = count;
    }
    // Only one team comes here, the last of the whole kernel or the only one of the receiving half:
    // it alone advances the turn.
    if constexpr (part != Part::send) {
        if (!await_all<S>(team, a.site, Phase::dispatch, wanted)) return;
        if (team.lane() == 0) {
            header.turn = {wanted, 0, count};
            keep_record(header, Phase::dispatch, wanted, start, count);
            mark_end(header, Phase::dispatch, wanted);
        }
    }
}

}  // namespace weft
