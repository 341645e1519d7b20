// The receiving half of combine where each choice of a token came home by itself: every row has
// been stored into this rank's inbox, by whatever kernel made it, and is weighed and summed here.
// The sums of each rank are rounded as if that rank had made them, so the bits are those of a pull.
#pragma once
#include <weft/alltoall/phases.cuh>
#include <weft/device/copy.cuh>
#include <weft/device/team.cuh>

namespace weft {

constexpr u32 choices_in_flight = 8;

// One choice of a token, in its lane.
struct Choice {
    u32 rank;  // max_ranks where there is none
    float weight;
    u32 turn;  // when it is added: by rank, then by place in the top k
};

template <Shape S>
WEFT_FN Choice load_choice(const Share<S>& own, u32 token, u32 destinations, u32 k) {
    Choice c{.rank = max_ranks, .weight = 0.0f, .turn = 0};
    if (k < S.top_k && destinations != 0) {
        c.rank = own.choices.rank[token][k];
        c.weight = own.choices.weight[token][k];
    }
#pragma unroll
    for (u32 j = 0; j < S.top_k; ++j) {
        const u32 other = __shfl_sync(all_lanes, c.rank, j);
        c.turn += other < c.rank || (other == c.rank && j < k);
    }
    return c;
}

// The sum of one lane's columns: of the rank whose turn it is, and of all ranks before it.
template <Number N> struct Sums {
    static constexpr u32 width = numbers_in_vector(N);
    float total[width] = {}, part[width] = {};
    u32 rank = max_ranks;

    WEFT_FN void close_rank() {
        add_vector<N>(total, round_vector<N>(part));
#pragma unroll
        for (u32 i = 0; i < width; ++i) part[i] = 0.0f;
    }
    WEFT_FN void add(u32 from, float weight, uint4 v) {
        if (from != rank) close_rank();
        rank = from;
        add_weighted<N>(part, weight, v);
    }
};

// Turns first .. first + 7 of one vector. All loads are started before the first is added.
template <Shape S>
WEFT_FN void add_choices(const Choice& c, const uint4* row, bool loads, u32 first, u32 count,
                         Sums<S.number>& sums) {
    constexpr u32 in_flight = S.top_k < choices_in_flight ? S.top_k : choices_in_flight;
    constexpr u32 vectors = S.out_bytes() / 16;
    uint4 data[in_flight];
    u32 from[in_flight];
#pragma unroll
    for (u32 i = 0; i < in_flight; ++i) {
        from[i] = (__ffs(__ballot_sync(all_lanes, c.turn == first + i)) - 1) % warp_lanes;
        if (loads && first + i < count) data[i] = load_shared_row(row + u64(from[i]) * vectors);
    }
#pragma unroll
    for (u32 i = 0; i < in_flight; ++i) {
        const u32 rank = __shfl_sync(all_lanes, c.rank, from[i]);
        const float weight = __shfl_sync(all_lanes, c.weight, from[i]);
        if (loads && first + i < count) sums.add(rank, weight, data[i]);
    }
}

// out[token] = the sum over ranks, in rank order, of each rank's rounded sum, then `add`, rounded
// once. Whole warps stay together: a lane knows one choice.
template <Shape S>
WEFT_FN void reduce_choices(const Block& team, const CombineArgs& a, u32 token, u32 destinations) {
    constexpr u32 vectors = S.out_bytes() / 16;
    Share<S>& own = mine<S>(a.site);
    const Choice c = load_choice<S>(own, token, destinations, team.warp_lane());
    const u32 count = __popc(__ballot_sync(all_lanes, c.rank < max_ranks));
    const uint4* rows = reinterpret_cast<const uint4*>(own.inbox.returned.row[token]);
    for (u32 start = blockIdx.y * team.lanes() + team.warp() * warp_lanes; start < vectors;
         start += gridDim.y * team.lanes()) {
        const u32 v = start + team.warp_lane();
        const u64 at = u64(token) * vectors + v;
        Sums<S.number> sums;
#pragma unroll
        for (u32 first = 0; first < S.top_k; first += choices_in_flight)
            add_choices<S>(c, rows + v, v < vectors, first, count, sums);
        sums.close_rank();
        if (v >= vectors) continue;
        if (a.add)
            add_vector<S.number>(sums.total, load_input(static_cast<const uint4*>(a.add) + at));
        static_cast<uint4*>(a.out)[at] = round_vector<S.number>(sums.total);
    }
}

}  // namespace weft
