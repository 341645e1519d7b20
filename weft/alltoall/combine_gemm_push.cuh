// SPDX-License-Identifier: Apache-2.0
// The receiver of combine by gemm_push: the kernels that compute the experts' rows have stored them
// into this rank's inbox, where they are weighted and summed. With Reduce::sender, the sum of each
// rank's rows is rounded as on that rank, so the bits are those of pull. With Reduce::receiver, all
// rows are summed in top-k order and rounded once, so the bits do not depend on their ranks.
#pragma once
#include <weft/alltoall/phases.cuh>
#include <weft/device/copy.cuh>
#include <weft/device/team.cuh>

namespace weft {

constexpr u32 expert_rows_in_flight = 8;

// One entry of a token's top k, in its lane.
struct Choice {
    u32 rank;  // max_ranks for none
    float weight;
    u32 order;  // position in the sum: by entry; with Reduce::sender by rank, then by entry
};

template <Shape S>
WEFT_FN Choice load_choice(const Share<S>& own, u32 token, RankSet destinations, u32 k) {
    Choice c{.rank = max_ranks, .weight = 0.0f, .order = 0};
    if (k < S.top_k && destinations != RankSet{}) {
        c.rank = own.saved_routing.rank[token][k];
        c.weight = own.saved_routing.weight[token][k];
    }
    const u32 key = S.reduce == Reduce::sender ? c.rank : c.rank == max_ranks;
#pragma unroll
    for (u32 j = 0; j < S.top_k; ++j) {
        const u32 other = __shfl_sync(all_lanes, key, j);
        c.order += other < key || (other == key && j < k);
    }
    return c;
}

// The sum of one lane's columns. With Reduce::sender, `total` is that of the ranks before the
// current one.
template <Shape S> struct RowSums {
    static constexpr u32 width = elements_in_vector(S.dtype);
    float total[width] = {}, part[width] = {};
    u32 rank = max_ranks;

    WEFT_FN void close_rank() {
        add_vector<S.dtype>(total, round_vector<S.dtype>(part));
#pragma unroll
        for (u32 i = 0; i < width; ++i) part[i] = 0.0f;
    }
    WEFT_FN void add(u32 from, float weight, uint4 v) {
        if (S.reduce == Reduce::sender && from != rank) close_rank();
        rank = from;
        add_weighted<S.dtype>(part, weight, v);
    }
    WEFT_FN float (&finish()) [width] {
        if constexpr (S.reduce == Reduce::receiver) return part;
        close_rank();
        return total;
    }
};

// Rows first .. first + 7 of one vector, in their order. All loads start before the first row is
// added.
template <Shape S>
WEFT_FN void add_expert_rows(const Choice& c, const uint4* row, bool loads, u32 first, u32 count,
                             RowSums<S>& sums) {
    constexpr u32 in_flight = S.top_k < expert_rows_in_flight ? S.top_k : expert_rows_in_flight;
    constexpr u32 vectors = S.out_bytes() / 16;
    uint4 data[in_flight];
    u32 from[in_flight];
#pragma unroll
    for (u32 i = 0; i < in_flight; ++i) {
        from[i] = (__ffs(__ballot_sync(all_lanes, c.order == first + i)) - 1) % warp_lanes;
        if (loads && first + i < count) data[i] = load_peer_row(row + u64(from[i]) * vectors);
    }
#pragma unroll
    for (u32 i = 0; i < in_flight; ++i) {
        const u32 rank = __shfl_sync(all_lanes, c.rank, from[i]);
        const float weight = __shfl_sync(all_lanes, c.weight, from[i]);
        if (loads && first + i < count) sums.add(rank, weight, data[i]);
    }
}

// out[token] = the sum of its rows in their order, then `add`, rounded once. Whole warps stay
// together, because each lane holds one entry.
template <Shape S>
WEFT_FN void reduce_expert_rows(const Block& team, const CombineArgs& a, u32 token,
                                RankSet destinations) {
    constexpr u32 vectors = S.out_bytes() / 16;
    Share<S>& own = own_share<S>(a.site);
    const Choice c = load_choice<S>(own, token, destinations, team.warp_lane());
    const u32 count = __popc(__ballot_sync(all_lanes, c.rank < max_ranks));
    const uint4* rows = reinterpret_cast<const uint4*>(own.inbox.returned.row[token]);
    for (u32 start = blockIdx.y * team.lanes() + team.warp() * warp_lanes; start < vectors;
         start += gridDim.y * team.lanes()) {
        const u32 v = start + team.warp_lane();
        const u64 at = u64(token) * vectors + v;
        RowSums<S> sums;
#pragma unroll
        for (u32 first = 0; first < S.top_k; first += expert_rows_in_flight)
            add_expert_rows<S>(c, rows + v, v < vectors, first, count, sums);
        auto& total = sums.finish();
        if (v >= vectors) continue;
        if (a.add) add_vector<S.dtype>(total, load_input(static_cast<const uint4*>(a.add) + at));
        static_cast<uint4*>(a.out)[at] = round_vector<S.dtype>(total);
    }
}

}  // namespace weft
