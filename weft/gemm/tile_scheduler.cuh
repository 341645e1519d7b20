// Which tile a cluster computes next.
//
// Static persistent scheduling: one warp of each CTA reads the counts, sorts groups of M-blocks by
// height and numbers their M-blocks; from then on every warp finds its tiles by itself.
#pragma once
#include <weft/device/team.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>

namespace weft {

// One tile of a cluster: rows of one expert by 256 weight rows (128 columns of a gated result).
struct Tile {
    u32 expert, n_block, first_row;
    u32 valid_m, m;  // rows, and rows with padding

    // Whether each CTA has half of the rows and all weights of the tile, or all rows and half of
    // the weights.
    template <GemmShape S> WEFT_FN bool is_split() const { return S.has_split_m() && m == split_m; }
};

// Reads each expert's count and first row. A count or a start that reaches outside the tensor is
// cut to the rows that lie inside.
template <GemmShape S> WEFT_FN void read_counts(const GemmArgs& a, GemmShared<S>& smem, u32 lane) {
    for (u32 e = lane; e < S.experts; e += warp_lanes) {
        const volatile i32* const starts = a.starts;
        const i64 first = starts == nullptr ? i64(e) * a.max_rows : starts[e];
        const i64 room = first < 0 ? 0 : max(i64(a.rows) - first, i64(0));
        // Volatile: bypasses this SM's L1, which may hold what the counts were before.
        const i32 count = *const_cast<const volatile i32*>(a.counts + e);
        smem.counts[e] = u32(min(min(max(i64(count), i64(0)), i64(a.max_rows)), room));
        smem.first_rows[e] = u32(first);
    }
    __syncwarp();
}

// M-blocks of an expert with `count` rows.
template <GemmShape S> WEFT_FN u32 m_blocks_of(u32 count) {
    constexpr u32 spare = S.block_m - S.full_m();  // what the last block may have more
    const u32 blocks = (max(count, spare) - spare + S.full_m() - 1) / S.full_m();
    return blocks == 0 && count != 0 ? 1 : blocks;
}

// M-blocks of one expert that are sorted as one: those of one height in FP8, otherwise all.
enum class GroupKind : u32 { full, before_tail, last, all };
constexpr u32 fp8_kinds = 3;

struct TileGroup {
    u32 first, blocks, height;
};

template <GemmShape S> constexpr bool has_short_tail(u32 count, u32 m_blocks) {
    return S.has_split_m() && m_blocks > 1 && count - (m_blocks - 1) * S.full_m() <= max_tail_m;
}

// M-blocks of a kind of an expert with `count` rows; there may be none.
template <GemmShape S> WEFT_FN TileGroup group_of_kind(u32 count, GroupKind kind) {
    const u32 m_blocks = m_blocks_of<S>(count);
    if (kind == GroupKind::all) return {0, m_blocks, count / max(m_blocks, 1u)};
    if (m_blocks == 0) return {0, 0, 0};
    const u32 tail = has_short_tail<S>(count, m_blocks), last = m_blocks - 1;
    if (kind == GroupKind::full) return {0, last - tail, S.full_m()};
    if (kind == GroupKind::before_tail) return {last - tail, tail, S.full_m() - normal_m};
    return {last, 1, count - last * S.full_m() + tail * normal_m};
}

WEFT_FN u32 pack_group(u32 expert, GroupKind kind) { return expert | u32(kind) << 16; }
template <GemmShape S> WEFT_FN TileGroup unpack_group(const GemmShared<S>& smem, u32 group) {
    return group_of_kind<S>(smem.counts[group & 0xffff], GroupKind(group >> 16));
}

// Lists the groups that have M-blocks, by expert, with their heights in block_ends; returns how
// many.
template <GemmShape S> WEFT_FN u32 list_groups(GemmShared<S>& smem, u32 lane) {
    constexpr bool by_height = S.groups_of_expert() != 1;
    constexpr u32 first_kind = u32(by_height ? GroupKind::full : GroupKind::all);
    constexpr u32 kinds = by_height ? fp8_kinds : 1;
    u32 listed = 0;
    for (u32 base = 0; base < S.experts; base += warp_lanes) {
        const u32 e = base + lane, count = e < S.experts ? smem.counts[e] : 0;
        TileGroup group[kinds];
        u32 own = 0;
#pragma unroll
        for (u32 i = 0; i < kinds; ++i) {
            group[i] = group_of_kind<S>(count, GroupKind(first_kind + i));
            own += group[i].blocks != 0;
        }
        u32 end = own;
#pragma unroll
        for (u32 step = 1; step < warp_lanes; step *= 2) {
            const u32 before = __shfl_up_sync(all_lanes, end, step);
            if (lane >= step) end += before;
        }
        u32 at = listed + end - own;
#pragma unroll
        for (u32 i = 0; i < kinds; ++i) {
            if (group[i].blocks == 0) continue;
            smem.groups[at] = pack_group(e, GroupKind(first_kind + i));
            smem.block_ends[at++] = group[i].height;
        }
        listed += __shfl_sync(all_lanes, end, warp_lanes - 1);
    }
    __syncwarp();
    return listed;
}

// Sorts groups by height, highest first, so that clusters share their tiles out evenly: by expert,
// with a few heights in turn, some clusters would get the high ones of every round. (Simulated, 32
// experts of about 512 rows by chance: the busiest of 66 clusters has 14 % more than the mean by
// expert, 2 % by height.) Groups of more than 64 experts stay in their order.
template <GemmShape S> WEFT_FN void sort_groups(GemmShared<S>& smem, u32 listed, u32 lane) {
    if constexpr (S.sorts_groups()) {
        constexpr u32 most = (S.tile_groups() + warp_lanes - 1) / warp_lanes;
        u32 group[most], position[most];
#pragma unroll
        for (u32 i = 0; i < most; ++i) {
            const u32 at = i * warp_lanes + lane;
            if (at >= listed) continue;
            group[i] = smem.groups[at];
            position[i] = 0;
            const u32 height = smem.block_ends[at];
#pragma unroll 8
            for (u32 other = 0; other < listed; ++other) {
                const u32 theirs = smem.block_ends[other];
                position[i] += theirs > height || (theirs == height && other < at);
            }
        }
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < most; ++i)
            if (i * warp_lanes + lane < listed) smem.groups[position[i]] = group[i];
    }
    __syncwarp();
}

// The inclusive prefix sum of M-blocks over the sorted groups.
template <GemmShape S> WEFT_FN void count_m_blocks(GemmShared<S>& smem, u32 listed, u32 lane) {
    u32 end = 0;
    for (u32 base = 0; base < S.tile_groups(); base += warp_lanes) {
        const u32 position = base + lane;
        u32 blocks = position < listed ? unpack_group(smem, smem.groups[position]).blocks : 0;
#pragma unroll
        for (u32 step = 1; step < warp_lanes; step *= 2) {
            const u32 before = __shfl_up_sync(all_lanes, blocks, step);
            if (lane >= step) blocks += before;
        }
        if (position < S.tile_groups()) smem.block_ends[position] = end + blocks;
        end += __shfl_sync(all_lanes, blocks, warp_lanes - 1);
    }
}

// By one warp, before anybody asks for a tile.
template <GemmShape S>
WEFT_FN void schedule_tiles(const GemmArgs& a, GemmShared<S>& smem, u32 lane) {
    read_counts(a, smem, lane);
    const u32 listed = list_groups(smem, lane);
    sort_groups(smem, listed, lane);
    count_m_blocks(smem, listed, lane);
}

// This cluster's tiles in order. Tiles are sorted by height and dealt to clusters in boustrophedon
// order (0..n-1, n-1..0, ...), so the cluster that got the highest tile of one round gets the
// lowest of the next. M-blocks of a group that share weights are adjacent, for L2 reuse.
template <GemmShape S> struct TileScheduler {
    const GemmShared<S>& smem;
    u32 position = 0, round = 0;

    WEFT_FN bool next(Tile& tile) {
        constexpr u32 n_blocks = S.n_blocks();
        const u32 clusters = gridDim.x / 2, self = blockIdx.x / 2;
        const u32 tile_idx = round * clusters + (round % 2 == 0 ? self : clusters - 1 - self);
        ++round;
        if (tile_idx >= smem.block_ends[S.tile_groups() - 1] * n_blocks) return false;
        while (tile_idx >= smem.block_ends[position] * n_blocks) ++position;
        const u32 before = position == 0 ? 0 : smem.block_ends[position - 1];
        const u32 offset = tile_idx - before * n_blocks;
        const TileGroup group = unpack_group(smem, smem.groups[position]);
        tile.expert = smem.groups[position] & 0xffff;
        tile.n_block = offset / group.blocks;
        const u32 m_block = group.first + offset % group.blocks;
        const u32 count = smem.counts[tile.expert], m_blocks = m_blocks_of<S>(count);
        const u32 full_m = S.is_fp8()
                               ? S.full_m()
                               : round_up((count + m_blocks - 1) / m_blocks, block_m_granularity);
        u32 begin = m_block * full_m, end = m_block + 1 == m_blocks ? count : begin + full_m;
        if constexpr (S.has_split_m()) {
            // A short tail is hardly worth reading weights for: the last split tile keeps half of
            // its rows, and the tail takes over the others.
            const bool short_tail = has_short_tail<S>(count, m_blocks);
            if (short_tail && m_block + 1 == m_blocks) begin -= normal_m;
            if (short_tail && m_block + 2 == m_blocks) end -= normal_m;
        }
        tile.first_row = smem.first_rows[tile.expert] + begin;
        tile.valid_m = end - begin;
        tile.m = S.has_split_m() && tile.valid_m > S.cta_m()
                     ? split_m
                     : round_up(tile.valid_m, S.m_granularity(tile.valid_m));
        return true;
    }
};

}  // namespace weft
