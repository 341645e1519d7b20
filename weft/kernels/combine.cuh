// Combine: tell every rank that my experts are done, wait until all of theirs are, then pull each
// token's rows from the ranks that hold them and sum in rank order. One launch; one remote round
// trip, because every thread has all its peers' loads in flight before it adds the first.
#pragma once
#include <weft/kernels/copy.cuh>
#include <weft/kernels/team.cuh>

namespace weft {

constexpr u32 loads_in_flight = 8;

// Adds the rows of peers first .. first + 7, in that order.
template <Shape S>
WEFT_FN void pull_peers(const CombineArgs& a, u32 token, u32 v, u32 destinations, u32 first,
                        float (&sum)[numbers_in_vector(S.number)]) {
    constexpr u32 in_flight = S.ranks < loads_in_flight ? S.ranks : loads_in_flight;
    uint4 row[in_flight];
    // One pointer that walks from share to share: eight hoisted addresses would not fit in the
    // registers.
    u64 at = u64(
        reinterpret_cast<const uint4*>(share<S>(a.site, first).outbox.row[a.site.rank][token]) + v);
#pragma unroll
    for (u32 i = 0; i < in_flight; ++i, at += a.site.stride)
        if (destinations >> (first + i) & 1)
            row[i] = load_shared_row(reinterpret_cast<const uint4*>(at));
#pragma unroll
    for (u32 i = 0; i < in_flight; ++i)
        if (destinations >> (first + i) & 1) add_vector<S.number>(sum, row[i]);
}

// out[token] = the sum of its ranks' rows in rank order, in fp32, then `add`, rounded once.
template <Shape S>
WEFT_FN void reduce_token(const Block& team, const CombineArgs& a, u32 token, u32 destinations) {
    constexpr u32 vectors = S.out_bytes() / 16;
    const u32 step = gridDim.y * team.lanes();
    uint4* out = static_cast<uint4*>(a.out) + u64(token) * vectors;
    const uint4* add = static_cast<const uint4*>(a.add) + u64(token) * vectors;
    for (u32 v = blockIdx.y * team.lanes() + team.lane(); v < vectors; v += step) {
        float sum[numbers_in_vector(S.number)] = {};
#pragma unroll
        for (u32 first = 0; first < S.ranks; first += loads_in_flight)
            pull_peers<S>(a, token, v, destinations, first, sum);
        if (a.add) add_vector<S.number>(sum, load_input(add + v));
        out[v] = round_vector<S.number>(sum);
    }
}

template <Shape S> WEFT_FN void combine(const CombineArgs& a) {
    const Block team;
    Share<S>& own = mine<S>(a.site);
    const Turn turn = own.header.turn;
    if (turn.failed != 0) return;
    const u64 start = now_ns();
    if (fault(own.header, Point::combine_enter, a.site.rank, turn.epoch) == Action::stay_away)
        return;

    if (team.first()) publish<S>(team, a.site, Phase::combine, turn.epoch, 0);
    // Read before the wait, so that the local load hides behind it.
    u32 token = blockIdx.x, destinations = token < a.tokens ? own.destinations[token] : 0;
    if (!await_all<S>(team, a.site, Phase::combine, turn.epoch)) return;
    while (token < a.tokens) {
        const u32 next = token + gridDim.x,
                  next_destinations = next < a.tokens ? own.destinations[next] : 0;
        reduce_token<S>(team, a, token, destinations);
        token = next;
        destinations = next_destinations;
    }
    if (team.first() && team.lane() == 0)
        keep_record(own.header, Phase::combine, turn.epoch, start, a.tokens);
}

}  // namespace weft
