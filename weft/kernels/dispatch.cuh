// Dispatch: every token straight into the slot (source rank, token) of each rank that owns one of
// its experts. One launch. The grid is (token workers, chunks of a row); a row of few tokens is
// split over many CTAs because one SM pushes about 36 GB/s while the GPU pushes 334 (H200,
// 2026-11-20). Only the last CTA waits for peers.
#pragma once
#include <weft/kernels/copy.cuh>
#include <weft/kernels/team.cuh>

namespace weft {

// Where this warp's lanes stand in one token's routing: lane k holds entry k.
struct Routing {
    u32 destinations;  // the same in every lane
    u32 rank;          // max_ranks where the entry names no expert
    i32 local;
    float weight;
    i32 id;
};

template <Shape S>
WEFT_FN Routing route_token(const DispatchArgs& a, u32 token, u32 k, bool reports) {
    Routing r{.destinations = 0, .rank = max_ranks, .local = -1, .weight = 0.0f, .id = -1};
    if (k < S.top_k) {
        r.id = expert_id<S>(a, token, k, reports);
        if (r.id >= 0) {
            const Place place = place_of<S>(a, u32(r.id));
            r.rank = place.rank;
            r.local = i32(place.local);
            r.weight = a.weights ? a.weights[u64(token) * S.top_k + k] : 1.0f;
        }
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
}

// One vector of plane P to all destinations; own rank first, then upwards, so that peers are not
// hit in step.
template <Shape S, u32 P, class V>
WEFT_FN void push_vector(const DispatchArgs& a, u32 token, u32 v, u32 destinations, V data) {
#pragma unroll
    for (u32 i = 0; i < S.ranks; ++i) {
        const u32 peer = a.site.rank + i < S.ranks ? a.site.rank + i : a.site.rank + i - S.ranks;
        if (destinations >> peer & 1)
            store(reinterpret_cast<V*>(
                      plane<P>(share<S>(a.site, peer).inbox.payload).row[a.site.rank][token]) +
                      v,
                  data);
    }
}

// This thread's vectors of all planes. The planes form one flat index space, so that small ones
// ride along with the threads that a large one leaves idle; `v` is this thread's place in it.
template <Shape S, u32 P>
WEFT_FN void push_planes(const DispatchArgs& a, u32 token, u32 v, u32 step, u32 destinations) {
    if constexpr (P < S.planes) {
        using V = typename Vector<vector_bytes(S.row_bytes[P])>::type;
        constexpr u32 vectors = S.row_bytes[P] / sizeof(V);
        const V* row = static_cast<const V*>(a.payload[P]) + u64(token) * vectors;
        for (; v < vectors; v += step)
            push_vector<S, P>(a, token, v, destinations, load_input(row + v));
        push_planes<S, P + 1>(a, token, v - vectors, step, destinations);
    }
}

// The first vector is loaded before the ids are read, so that both cold loads share one round trip.
template <Shape S> WEFT_FN void send_token(const Block& team, const DispatchArgs& a, u32 token) {
    using V = typename Vector<vector_bytes(S.row_bytes[0])>::type;
    constexpr u32 vectors = S.row_bytes[0] / sizeof(V);
    const u32 step = gridDim.y * team.lanes(), v = blockIdx.y * team.lanes() + team.lane();
    const V* row = static_cast<const V*>(a.payload[0]) + u64(token) * vectors;
    V data{};
    if (v < vectors) data = load_input(row + v);
    const bool routes = blockIdx.y == 0 && team.warp() == 0;
    const Routing r = route_token<S>(a, token, team.warp_lane(), routes);
    if (v < vectors) {
        push_vector<S, 0>(a, token, v, r.destinations, data);
        push_planes<S, 0>(a, token, v + step, step, r.destinations);
    } else {
        push_planes<S, 1>(a, token, v - vectors, step, r.destinations);
    }
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

template <Shape S> WEFT_FN void dispatch(const DispatchArgs& a) {
    const Block team;
    Header& header = mine<S>(a.site).header;
    const Turn turn = header.turn;
    if (turn.failed != 0) return;
    const u64 start = now_ns(), wanted = (turn.epoch + 1) & epoch_mask;
    if (fault(header, Point::dispatch_enter, a.site.rank, wanted) == Action::stay_away) return;

    const u32 count = token_count<S>(a, team.first() && team.lane() == 0);
    for (u32 token = blockIdx.x; token < count; token += gridDim.x) send_token<S>(team, a, token);
    clear_rows<S>(team, a, count, turn.rows);
    fault(header, Point::after_payload, a.site.rank, wanted);

    if (!team.last_of(&header.arrived)) return;
    publish<S>(team, a.site, Phase::dispatch, wanted, count);
    if (!await_all<S>(team, a.site, Phase::dispatch, wanted)) return;
    if (team.lane() == 0) {
        header.turn = {wanted, 0, count};
        keep_record(header, Phase::dispatch, wanted, start, count);
    }
}

}  // namespace weft
