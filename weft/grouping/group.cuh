// SPDX-License-Identifier: Apache-2.0
// The first of the three kernels of grouping: counts the rows of each group and computes offsets.
//
// Roles: every CTA counts the entries of one tile with ballots and clears its share of the row
// metadata. The last CTA turns the counts into offsets by prefix sums. No order depends on atomics.
#pragma once
#include <weft/device/copy.cuh>
#include <weft/device/team.cuh>
#include <weft/grouping/layout.cuh>

namespace weft {

constexpr u32 group_threads = 512, group_warps = group_threads / warp_lanes;
constexpr u32 max_segments = 32;  // of the tiles; one thread sums each

// Counts of one CTA, then of all tiles.
template <Shape S, Grouping G> struct Scratch {
    static constexpr u32 tiles = S.ranks * tiles_of(S, G);
    static constexpr u32 fit = G.groups < group_threads ? group_threads / G.groups : 1;
    static constexpr u32 tile_limit = tiles < max_segments ? tiles : max_segments;
    static constexpr u32 segments = fit < tile_limit ? fit : tile_limit;
    static constexpr u32 tiles_each = (tiles + segments - 1) / segments;

    u16 count[group_warps][G.groups];
    u32 partial[segments][G.groups];
    u32 total[G.groups];
};

// The group of entry k of a token, or no_group.
template <Shape S, Grouping G> WEFT_FN u32 group_of(const Route<S>& route, u32 k) {
    const u32 expert = u32(route.expert[k]);
    return expert < G.groups ? expert : no_group;
}

// The rank of each of this warp's entries among themselves: `within[c]` counts the equal entries
// before it.
template <u32 chunks, u32 groups>
WEFT_FN void rank_entries(const u32 (&group)[chunks], u32 (&within)[chunks], u16 (&count)[groups],
                          u32 lane) {
#pragma unroll
    for (u32 c = 0; c < chunks; ++c) {
        const u32 same = __match_any_sync(all_lanes, group[c]);
        const u32 earlier = __popc(same & ((1u << lane) - 1u));
        const u32 old = group[c] != no_group ? count[group[c]] : 0;
        __syncwarp();
        if (group[c] != no_group && earlier == 0) count[group[c]] = u16(old + __popc(same));
        __syncwarp();
        within[c] = old + earlier;
    }
}

// Turns a column of counts into its exclusive prefix sum; returns the total.
template <class T, u32 rows, u32 columns>
WEFT_FN u32 scan_column(T (&counts)[rows][columns], u32 column) {
    u32 sum = 0;
#pragma unroll
    for (u32 row = 0; row < rows; ++row) {
        const u32 count = counts[row][column];
        counts[row][column] = T(sum);
        sum += count;
    }
    return sum;
}

// The entries of this CTA's tile that a thread counts. They are loaded before the number of
// received tokens and the state of the group are known, so that cold loads share one round trip.
template <Shape S, Grouping G> struct TileEntries {
    static constexpr u32 tiles = tiles_of(S, G), entries = G.tile * S.top_k;
    static constexpr u32 chunks = (entries + group_threads - 1) / group_threads;
    u32 source, first, start, arrived, expert[chunks];

    WEFT_FN explicit TileEntries(const Block& team, const GroupArgs& a)
        : source(blockIdx.x / tiles),
          first(blockIdx.x % tiles * G.tile),
          start(team.warp() * chunks * warp_lanes + team.warp_lane()) {
        const Inbox<S>& inbox = own_share<S>(a.site).inbox;
        arrived = load_early(&inbox.counts[source]);
#pragma unroll
        for (u32 c = 0; c < chunks; ++c) {
            if (!in_tile(c)) continue;
            const Route<S>& route = inbox.route[slot_of(a.source_rows, source, token(c))];
            expert[c] = load_early(&route.expert[(start + c * warp_lanes) % S.top_k]);
        }
    }
    WEFT_FN u32 token(u32 c) const { return first + (start + c * warp_lanes) / S.top_k; }
    WEFT_FN bool in_tile(u32 c) const {
        return start + c * warp_lanes < entries && token(c) < S.tokens;
    }
    WEFT_FN u32 group(u32 c) const {
        return in_tile(c) && token(c) < arrived && expert[c] < G.groups ? expert[c] : no_group;
    }
};

// Counts the tile of this CTA and stores each entry's rank in it.
template <Shape S, Grouping G>
WEFT_FN void count_tile(const Block& team, const GroupArgs& a, const TileEntries<S, G>& tile,
                        Scratch<S, G>& scratch) {
    constexpr u32 chunks = TileEntries<S, G>::chunks;
    u32 group[chunks], within[chunks];
#pragma unroll
    for (u32 c = 0; c < chunks; ++c) group[c] = tile.group(c);
    for (u32 g = team.warp_lane(); g < G.groups; g += warp_lanes) scratch.count[team.warp()][g] = 0;
    __syncwarp();
    rank_entries(group, within, scratch.count[team.warp()], team.warp_lane());
    __syncthreads();
    for (u32 g = team.lane(); g < G.groups; g += team.lanes())
        a.before[blockIdx.x * G.groups + g] = scan_column(scratch.count, g);
    __syncthreads();
    i32* out = a.within + (u64(tile.source) * S.tokens + tile.first) * S.top_k;
#pragma unroll
    for (u32 c = 0; c < chunks; ++c)
        if (group[c] != no_group)
            out[tile.start + c * warp_lanes] =
                i32(within[c] + scratch.count[team.warp()][group[c]]);
}

// Marks every row as unused; gather overwrites those that are used.
template <Shape S, Grouping G>
WEFT_FN void clear_row_metadata(const Block& team, const GroupArgs& a) {
    const u32 first = blockIdx.x * team.lanes() + team.lane(), step = gridDim.x * team.lanes();
    for (u32 row = first; row < G.total(); row += step) {
        a.slot[row] = -1;
        a.weight[row] = 0.0f;
        if constexpr (S.combine == Combine::gemm_push) a.dst_addr[row] = 0;
    }
}

// Calls visit(count of a tile, for one group) over a segment of the tiles, in order. Eight loads
// are in flight before the first visit.
template <Shape S, Grouping G, class Visit>
WEFT_FN void for_tiles(u32* before, u32 segment, u32 group, Visit visit) {
    using Sizes = Scratch<S, G>;
    constexpr u32 in_flight = 8;
    const u32 first = segment * Sizes::tiles_each;
    const u32 end =
        first + Sizes::tiles_each < Sizes::tiles ? first + Sizes::tiles_each : Sizes::tiles;
    for (u32 tile = first; tile < end; tile += in_flight) {
        u32* at = before + u64(tile) * G.groups + group;
        u32 count[in_flight];
#pragma unroll
        for (u32 i = 0; i < in_flight; ++i) count[i] = tile + i < end ? at[i * G.groups] : 0;
#pragma unroll
        for (u32 i = 0; i < in_flight; ++i)
            if (tile + i < end) visit(at + i * G.groups, count[i]);
    }
}

// Turns the counts of tiles into the number of entries before each tile, and sums them into
// scratch.total.
template <Shape S, Grouping G>
WEFT_FN void scan_tiles(const Block& team, const GroupArgs& a, Scratch<S, G>& scratch) {
    constexpr u32 segments = Scratch<S, G>::segments, items = segments * G.groups;
    for (u32 i = team.lane(); i < items; i += team.lanes()) {
        u32 sum = 0;
        for_tiles<S, G>(a.before, i / G.groups, i % G.groups, [&](u32*, u32 n) { sum += n; });
        scratch.partial[i / G.groups][i % G.groups] = sum;
    }
    __syncthreads();
    for (u32 g = team.lane(); g < G.groups; g += team.lanes())
        scratch.total[g] = scan_column(scratch.partial, g);
    __syncthreads();
    for (u32 i = team.lane(); i < items; i += team.lanes()) {
        u32 sum = scratch.partial[i / G.groups][i % G.groups];
        for_tiles<S, G>(a.before, i / G.groups, i % G.groups, [&](u32* at, u32 n) {
            *at = sum;
            sum += n;
        });
    }
}

// One warp writes the offset and the number of rows of each group, clamped to the buffer.
template <Shape S, Grouping G>
WEFT_FN void compute_offsets(const GroupArgs& a, const Scratch<S, G>& scratch, u32 lane) {
    Header& header = own_share<S>(a.site).header;
    const u32 rows = limit_of(a, G, 0);
    u32 begin = 0;
    bool reported = false;
    for (u32 first = 0; first < G.groups; first += warp_lanes) {
        const u32 g = first + lane, count = g < G.groups ? scratch.total[g] : 0;
        u32 end = G.padded(count);
#pragma unroll
        for (u32 step = 1; step < warp_lanes; step *= 2) {
            const u32 earlier = __shfl_up_sync(all_lanes, end, step);
            if (lane >= step) end += earlier;
        }
        u32 at = begin + end - G.padded(count);
        begin += __shfl_sync(all_lanes, end, warp_lanes - 1);
        if constexpr (G.packing == Packing::contiguous) {
            at = at < rows ? at : rows;
        } else {
            at = g * G.rows;
            const u32 full = __ballot_sync(all_lanes, count > G.rows);
            if (!reported && full != 0 && lane == __ffs(full) - 1)
                refuse_rows(header, a.site, G.rows, count, g);
            reported = reported || full != 0;
        }
        if (g >= G.groups) continue;
        const u32 room = limit_of(a, G, g) - at;
        a.offsets[g] = i32(at);
        a.counts[g] = i32(count < room ? count : room);
    }
    if (lane != 0) return;
    if (G.packing == Packing::contiguous && begin > rows)
        refuse_rows(header, a.site, rows, begin, 0);
    a.offsets[G.groups] = i32(G.packing != Packing::contiguous ? G.total()
                              : begin < rows                   ? begin
                                                               : rows);
}

template <Shape S, Grouping G> WEFT_FN void group(const GroupArgs& a) {
    static_assert(G.groups >= 1 && G.groups <= max_groups && G.rows % G.align == 0);
    const Block team;
    __shared__ Scratch<S, G> scratch;
    griddep_wait();
    launch_dependents();
    const u32 failed = load_early(&own_share<S>(a.site).header.state.failed);
    const TileEntries<S, G> tile(team, a);
    if (team.any(failed != 0)) return;  // the barrier keeps the loads before it
    count_tile<S, G>(team, a, tile, scratch);
    clear_row_metadata<S, G>(team, a);
    if (!team.is_last_cta(a.arrived)) return;
    scan_tiles<S, G>(team, a, scratch);
    if (team.warp() == 0) compute_offsets<S, G>(a, scratch, team.warp_lane());
}

}  // namespace weft
