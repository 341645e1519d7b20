// SPDX-License-Identifier: Apache-2.0
// Stores a token's payload into peers' inboxes: opaque rows, or the first row quantised to FP8 in
// registers. A PayloadFragment holds the data that a thread loads before the token's routing is
// known, so that all cold loads of a token share one round trip.
#pragma once
#include <weft/alltoall/phases.cuh>
#include <weft/device/quantize_warp.cuh>

namespace weft {

// This thread's first vector of a row that the CTAs of a worker share, and the stride to its next.
struct RowSlice {
    u32 first, step;

    WEFT_FN explicit RowSlice(const Block& team)
        : first(blockIdx.y * team.lanes() + team.lane()), step(gridDim.y * team.lanes()) {}
};

template <Shape S, u32 P, class V>
WEFT_FN V* inbox_row(const DispatchArgs& a, u32 peer, u32 token) {
    const u32 slot = slot_of(a.source_rows, a.site.rank, token);
    return reinterpret_cast<V*>(plane<P>(share<S>(a.site, peer).inbox.payload).row[slot]);
}

// Stores one vector of plane P at all destinations. Each rank starts with itself, so that ranks do
// not store to the same peer at once.
template <Shape S, u32 P, class V>
WEFT_FN void push_vector(const DispatchArgs& a, u32 token, u32 v, RankSet destinations, V data) {
    const u32 rank = a.site.rank;
#pragma unroll
    for (u32 i = 0; i < S.ranks; ++i) {
        const u32 peer = next_rank<S>(rank, i);
        if (has(destinations, peer)) store(inbox_row<S, P, V>(a, peer, token) + v, data);
    }
}

// This thread's vectors of plane P and the following ones. The planes form one flat index space, so
// small planes use the threads that a large one leaves idle.
template <Shape S, u32 P>
WEFT_FN void push_planes(const DispatchArgs& a, u32 token, u32 v, u32 step, RankSet destinations) {
    if constexpr (P < S.planes) {
        using V = typename Vector<vector_bytes(S.row_bytes[P])>::type;
        constexpr u32 vectors = S.row_bytes[P] / sizeof(V);
        const V* row = static_cast<const V*>(a.payload[P]) + u64(token) * vectors;
        for (; v < vectors; v += step)
            push_vector<S, P>(a, token, v, destinations, load_input(row + v));
        push_planes<S, P + 1>(a, token, v - vectors, step, destinations);
    }
}

template <Shape S> struct PayloadFragment {
    using V = typename Vector<vector_bytes(S.row_bytes[0])>::type;
    static constexpr u32 vectors = S.row_bytes[0] / sizeof(V);
    V data;

    WEFT_FN void load(const RowSlice& slice, const DispatchArgs& a, u32 token) {
        if (slice.first < vectors)
            data = load_input(static_cast<const V*>(a.payload[0]) + u64(token) * vectors +
                              slice.first);
    }

    WEFT_FN void push(const RowSlice& slice, const DispatchArgs& a, u32 token,
                      RankSet destinations) const {
        if (slice.first < vectors) {
            push_vector<S, 0>(a, token, slice.first, destinations, data);
            push_planes<S, 0>(a, token, slice.first + slice.step, slice.step, destinations);
        } else {
            push_planes<S, 1>(a, token, slice.first - vectors, slice.step, destinations);
        }
    }
};

// Quantised: plane 0 holds e4m3 values, plane 1 the scales of their blocks.
template <Shape S>
    requires(S.quant != Quant::none)
struct PayloadFragment<S> {
    using Source = Columns<S.dtype>;
    static constexpr u32 row_lanes = S.hidden / lane_columns;
    Source source;

    WEFT_FN static Source fetch(const DispatchArgs& a, u32 token, u32 v) {
        Source columns{};
        const uint4* row =
            static_cast<const uint4*>(a.payload[0]) + u64(token) * (S.out_bytes() / 16);
        if (v < row_lanes)
#pragma unroll
            for (u32 i = 0; i < Source::vectors; ++i)
                columns.v[i] = load_input(row + v * Source::vectors + i);
        return columns;
    }

    WEFT_FN static void push_columns(const DispatchArgs& a, u32 token, u32 v, RankSet destinations,
                                     const Source& columns) {
        float x[lane_columns];
        columns.widen(x);
        const u32 amax = block_amax_bits<S.block()>(x);
        if (v >= row_lanes) return;
        const u32 block = v * lane_columns / S.block();
        const bool leads = v % (S.block() / lane_columns) == 0, broken = amax >= infinity_bits;
        if constexpr (S.quant == Quant::mxfp8) {
            const u32 exponent = mx_exponent(amax);
            push_vector<S, 0>(a, token, v, destinations, quantize(x, mx_inverse(exponent), broken));
            if (leads) push_vector<S, 1>(a, token, block, destinations, u8(exponent));
        } else {
            const BlockScale scale = block_scale(amax);
            push_vector<S, 0>(a, token, v, destinations, quantize(x, scale.inverse, broken));
            if (leads) push_vector<S, 1>(a, token, block, destinations, scale.scale);
        }
    }

    WEFT_FN void load(const RowSlice& slice, const DispatchArgs& a, u32 token) {
        source = fetch(a, token, slice.first);
    }

    // Whole warps stay together, because the lanes of a block share their maximum.
    WEFT_FN void push(const RowSlice& slice, const DispatchArgs& a, u32 token,
                      RankSet destinations) const {
        const u32 lane = slice.first % warp_lanes;
        push_columns(a, token, slice.first, destinations, source);
        for (u32 v = slice.first + slice.step; v - lane < row_lanes; v += slice.step)
            push_columns(a, token, v, destinations, fetch(a, token, v));
        push_planes<S, 2>(a, token, slice.first, slice.step, destinations);
    }
};

}  // namespace weft
