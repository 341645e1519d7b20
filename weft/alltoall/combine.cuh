// Combine: every token's rows come home from the ranks whose experts made them, and are summed in
// rank order. The way is fixed by the Shape: the owner pulls rows out of its peers' outboxes once
// they are ready, or the experts' ranks push them into the owner's inbox, as they are or as
// block-scaled FP8 (fp8_home.cuh); or each expert's row is there already, and the owner weighs it
// (choices.cuh). One launch either way, or two halves.
#pragma once
#include <weft/alltoall/choices.cuh>
#include <weft/alltoall/combine_fp8.cuh>
#include <weft/alltoall/push.cuh>

namespace weft {

constexpr u32 loads_in_flight = 8;

// Where one token's rows lie: peer p's at first + p * step.
struct Rows {
    u64 first, step;
};

template <Shape S, u32 rank> WEFT_FN Rows rows_of(const CombineArgs& a, u32 token) {
    if constexpr (S.way == Way::pull) {
        const u64 own = u64(mine<S>(a.site).outbox.row[rank][token]);
        return {own - rank * a.site.stride, a.site.stride};
    } else {
        auto& returned = mine<S>(a.site).inbox.returned;
        return {u64(returned.row[0][token]), sizeof(returned.row[0])};
    }
}

// Adds the rows of peers first .. first + 7, in that order. The loads start at this rank and go
// upwards, so that the ranks do not all pull from the same peer at once (7 % at 128 tokens, 8 x
// H200, 2026-11-20); `rank` is a compile-time constant so that rotated rows stay in registers.
template <Shape S, u32 rank, u32 n>
WEFT_FN void add_peers(Rows rows, u32 v, u32 destinations, u32 first, float (&sum)[n]) {
    constexpr u32 in_flight = S.ranks < loads_in_flight ? S.ranks : loads_in_flight;
    uint4 piece[in_flight];
#pragma unroll
    for (u32 turn = 0; turn < in_flight; ++turn) {
        const u32 i = (turn + rank) % in_flight;
        if (destinations >> (first + i) & 1)
            piece[i] = load_shared_row(
                reinterpret_cast<const uint4*>(rows.first + (first + i) * rows.step) + v);
    }
#pragma unroll
    for (u32 i = 0; i < in_flight; ++i)
        if (destinations >> (first + i) & 1) add_vector<S.number>(sum, piece[i]);
}

// out[token] = the sum of its ranks' rows in rank order, in fp32, then `add`, rounded once.
template <Shape S, u32 rank>
WEFT_FN void reduce_token(const Block& team, const CombineArgs& a, u32 token, u32 destinations) {
    constexpr u32 vectors = S.out_bytes() / 16;
    const Rows rows = rows_of<S, rank>(a, token);
    uint4* out = static_cast<uint4*>(a.out) + u64(token) * vectors;
    const uint4* add = static_cast<const uint4*>(a.add) + u64(token) * vectors;
    for (u32 v = blockIdx.y * team.lanes() + team.lane(); v < vectors;
         v += gridDim.y * team.lanes()) {
        float sum[numbers_in_vector(S.number)] = {};
#pragma unroll
        for (u32 first = 0; first < S.ranks; first += loads_in_flight)
            add_peers<S, rank>(rows, v, destinations, first, sum);
        if (a.add) add_vector<S.number>(sum, load_input(add + v));
        out[v] = round_vector<S.number>(sum);
    }
}

// Every CTA waits for itself: the rows it adds are behind the flags that it has seen.
template <Shape S, u32 rank>
WEFT_FN bool receive_rows(const Block& team, const CombineArgs& a, const Turn& turn) {
    const Share<S>& own = mine<S>(a.site);
    u32 token = blockIdx.x, destinations = token < a.tokens ? own.destinations[token] : 0;
    if (!await_all<S>(team, a.site, Phase::combine, turn.epoch)) return false;
    while (token < a.tokens) {
        const u32 next = token + gridDim.x,
                  next_destinations = next < a.tokens ? own.destinations[next] : 0;
        if constexpr (S.way == Way::choices)
            reduce_choices<S>(team, a, token, destinations);
        else
            reduce_token<S, rank>(team, a, token, destinations);
        token = next;
        destinations = next_destinations;
    }
    return true;
}

// Tells the peers that their rows are there: in their inboxes, or in my outbox to be pulled.
// Choices have been stored by earlier kernels.
template <Shape S>
WEFT_FN void send_rows(const Block& team, const CombineArgs& a, const Turn& turn) {
    bool publishes = team.first();
    if constexpr (S.way == Way::push) {
        push_rows<S>(team, a.site);
        publishes = team.last_of(&mine<S>(a.site).header.arrived);
    }
    if (publishes) publish<S>(team, a.site, Phase::combine, turn.epoch, 0);
}

// Rows are summed when the flags of all peers have come.
template <Shape S, u32 rank, Part part> WEFT_FN void combine_behind_flags(const CombineArgs& a) {
    const Block team;
    Header& header = mine<S>(a.site).header;
    wait_for_predecessor();
    admit_successor();
    const Turn turn = header.turn;
    if (turn.failed != 0) return;
    const u64 start = team.lane() == 0 ? now_ns() : 0;
    if (fault(header, Point::combine_enter, a.site.rank, turn.epoch) == Action::stay_away) return;

    if constexpr (part != Part::receive) {
        mark_start(team, header, Phase::combine, turn.epoch, start);
        send_rows<S>(team, a, turn);
    }
    if constexpr (part != Part::send) {
        const bool received = receive_rows<S, rank>(team, a, turn);
        if (received && team.lane() == 0) mark_end(header, Phase::combine, turn.epoch);
        if (received && team.first() && team.lane() == 0)
            keep_record(header, Phase::combine, turn.epoch, start, a.tokens);
    }
}

template <Shape S, u32 rank, Part part = Part::whole> WEFT_FN void combine(const CombineArgs& a) {
    if constexpr (S.way == Way::fp8)
        combine_as_they_come<S, part>(a);
    else
        combine_behind_flags<S, rank, part>(a);
}

}  // namespace weft
