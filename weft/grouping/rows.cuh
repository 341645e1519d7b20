// SPDX-License-Identifier: Apache-2.0
// The second kernel of grouping, `gather`, reads each received row once and writes it to the rows
// of all its entries. A CTA processes one token in each step, and every warp looks up the rows of
// the token, one entry per lane.
#pragma once
#include <weft/device/copy.cuh>
#include <weft/grouping/group.cuh>

namespace weft {

constexpr u32 vectors_in_flight = 4;  // of a row, in each thread

// Loads from a row that a peer wrote: never through the non-coherent path.
WEFT_FN uint4 load_row(const uint4* at) { return load_peer_row(at); }
template <class V> WEFT_FN V load_row(const V* at) { return *const_cast<const volatile V*>(at); }
WEFT_FN uint2 load_row(const uint2* at) {
    const u64 v = *reinterpret_cast<const volatile u64*>(at);
    return make_uint2(u32(v), u32(v >> 32));
}

struct TokenSlot {
    u32 source, token;

    WEFT_FN u32 in_inbox(const GroupArgs& a) const { return slot_of(a.source_rows, source, token); }
};

// All tokens of the round as one index space; lane s of every warp holds the sources s, s + 32, ...
template <Shape S> struct ReceivedTokens {
    static constexpr u32 sources = (S.ranks + warp_lanes - 1) / warp_lanes;  // of a lane
    u32 count[sources], until[sources];  // of a source; of it and all sources before it

    WEFT_FN static ReceivedTokens of(const Inbox<S>& inbox, u32 lane) {
        ReceivedTokens t;
        u32 before = 0;
#pragma unroll
        for (u32 j = 0; j < sources; ++j) {
            const u32 source = j * warp_lanes + lane;
            t.count[j] = source < S.ranks ? tokens_from<S>(inbox, source) : 0;
            t.until[j] = t.count[j];
#pragma unroll
            for (u32 step = 1; step < warp_lanes; step *= 2) {
                const u32 earlier = __shfl_up_sync(all_lanes, t.until[j], step);
                if (lane >= step) t.until[j] += earlier;
            }
            t.until[j] += before;
            if (j + 1 < sources) before = __shfl_sync(all_lanes, t.until[j], warp_lanes - 1);
        }
        return t;
    }
    WEFT_FN u32 total() const { return __shfl_sync(all_lanes, until[sources - 1], warp_lanes - 1); }
    WEFT_FN TokenSlot slot(u32 i) const {
        u32 source = 0;
#pragma unroll
        for (u32 j = 0; j < sources; ++j) source += __popc(__ballot_sync(all_lanes, until[j] <= i));
        u32 begin = 0;
#pragma unroll
        for (u32 j = 0; j < sources; ++j) {
            const u32 first = __shfl_sync(all_lanes, until[j] - count[j], source - j * warp_lanes);
            if (sources == 1 || source / warp_lanes == j) begin = first;
        }
        return {source, i - begin};
    }
};

// One entry of a token, in its lane.
struct Entry {
    u32 group;
    float weight;
};

template <Shape S, Grouping G> WEFT_FN Entry load_entry(const GroupArgs& a, TokenSlot at, u32 k) {
    if (k >= S.top_k) return {no_group, 0.0f};
    const Route<S>& route = own_share<S>(a.site).inbox.route[at.in_inbox(a)];
    return {group_of<S, G>(route, k), route.weight[k]};
}

// The row of an entry, or -1 if it has none or does not fit the buffer.
template <Shape S, Grouping G>
WEFT_FN i32 row_of_entry(const GroupArgs& a, TokenSlot at, u32 k, u32 group) {
    if (group == no_group) return -1;
    const u64 slot = u64(at.source) * S.tokens + at.token;
    const u32 tile = at.source * tiles_of(S, G) + at.token / G.tile;
    const u32 row = u32(a.offsets[group]) + a.before[tile * G.groups + group] +
                    u32(a.within[slot * S.top_k + k]);
    return row < limit_of(a, G, group) ? i32(row) : -1;
}

// One warp writes the token's rows and their metadata.
template <Shape S, Grouping G>
WEFT_FN void label_rows(const GroupArgs& a, TokenSlot at, u32 k, const Entry& entry, i32 row) {
    const u32 slot = at.source * S.tokens + at.token;
    if (k < S.top_k) a.position[u64(slot) * S.top_k + k] = row;
    if (row >= 0) a.slot[row] = i32(slot);
    if constexpr (S.combine == Combine::gemm_push)
        if (row >= 0) a.dst_addr[row] = i64(dst_addr_of<S>(a.site, at.source, at.token, k));
    if (row >= 0) a.weight[row] = entry.weight;
}

// Copies one row of plane P and the following planes to the rows of the lanes in `lanes`.
template <Shape S, u32 P>
WEFT_FN void copy_planes(const Block& team, const GroupArgs& a, TokenSlot at, i32 row, u32 lanes) {
    if constexpr (P < S.planes) {
        using V = typename Vector<vector_bytes(S.row_bytes[P])>::type;
        constexpr u32 vectors = S.row_bytes[P] / sizeof(V);
        const V* from = reinterpret_cast<const V*>(
            plane<P>(own_share<S>(a.site).inbox.payload).row[at.in_inbox(a)]);
        for (u32 first = 0; first < vectors; first += vectors_in_flight * team.lanes()) {
            V data[vectors_in_flight];
            const u32 v = first + team.lane();
#pragma unroll
            for (u32 i = 0; i < vectors_in_flight; ++i)
                if (v + i * team.lanes() < vectors) data[i] = load_row(from + v + i * team.lanes());
            for (u32 left = lanes; left != 0; left &= left - 1) {
                const u32 to_row = u32(__shfl_sync(all_lanes, row, __ffs(left) - 1));
                V* to = static_cast<V*>(a.rows[P]) + u64(to_row) * vectors + v;
#pragma unroll
                for (u32 i = 0; i < vectors_in_flight; ++i)
                    if (v + i * team.lanes() < vectors) store(to + i * team.lanes(), data[i]);
            }
        }
        copy_planes<S, P + 1>(team, a, at, row, lanes);
    }
}

template <Shape S, u32 P> WEFT_FN void zero_planes(const Block& team, const GroupArgs& a, u32 row) {
    if constexpr (P < S.planes) {
        using V = typename Vector<vector_bytes(S.row_bytes[P])>::type;
        constexpr u32 vectors = S.row_bytes[P] / sizeof(V);
        V* to = static_cast<V*>(a.rows[P]) + u64(row) * vectors;
        for (u32 v = team.lane(); v < vectors; v += team.lanes()) store(to + v, V{});
        zero_planes<S, P + 1>(team, a, row);
    }
}

// Zeroes the rows between a group's last one and the next multiple of `align`.
template <Shape S, Grouping G> WEFT_FN void pad_groups(const Block& team, const GroupArgs& a) {
    if constexpr (G.align > 1) {
        for (u32 i = blockIdx.x; i < G.groups * (G.align - 1); i += gridDim.x) {
            const u32 g = i / (G.align - 1), begin = u32(a.offsets[g]), count = u32(a.counts[g]);
            const u32 row = begin + count + i % (G.align - 1);
            if (row < begin + G.padded(count)) zero_planes<S, 0>(team, a, row);
        }
    }
}

// Zeroes the slots of entries without a row: their owner must not read stale data.
template <Shape S>
WEFT_FN void zero_dropped_rows(const Block& team, const GroupArgs& a, TokenSlot at, u32 missing) {
    for (; missing != 0; missing &= missing - 1) {
        u8* dst = dst_addr_of<S>(a.site, at.source, at.token, __ffs(missing) - 1);
        for (u32 v = team.lane(); v < S.out_bytes() / 16; v += team.lanes())
            store(reinterpret_cast<uint4*>(dst) + v, uint4{});
    }
}

template <Shape S, Grouping G> WEFT_FN void gather(const GroupArgs& a) {
    const Block team;
    griddep_wait();
    launch_dependents();
    if (own_share<S>(a.site).header.state.failed != 0) return;
    const u32 k = team.warp_lane();
    const auto tokens = ReceivedTokens<S>::of(own_share<S>(a.site).inbox, k);
    for (u32 i = blockIdx.x, total = tokens.total(); i < total; i += gridDim.x) {
        const TokenSlot at = tokens.slot(i);
        const Entry entry = load_entry<S, G>(a, at, k);
        const i32 row = row_of_entry<S, G>(a, at, k, entry.group);
        if (team.warp() == 0) label_rows<S, G>(a, at, k, entry, row);
        copy_planes<S, 0>(team, a, at, row, __ballot_sync(all_lanes, row >= 0));
        if constexpr (S.combine == Combine::gemm_push)
            zero_dropped_rows<S>(team, a, at,
                                 __ballot_sync(all_lanes, entry.group != no_group && row < 0));
    }
    pad_groups<S, G>(team, a);
}

}  // namespace weft
