// SPDX-License-Identifier: Apache-2.0
// The tile scheduler.
//
// Static persistent scheduling: one warp of each CTA reads the counts, sorts experts by the height
// of their tiles and numbers their M-blocks. Then every warp finds its cluster's tiles on its own.
#pragma once
#include <weft/device/team.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>

namespace weft {

// One tile of a cluster: rows of one expert by 256 weight rows (128 columns of a gated result).
struct Tile {
    u32 expert, n_block, first_row;
    u32 valid_m, m;  // rows without and with padding

    // Whether each CTA has half of the rows and all weights of the tile. In other tiles, each CTA
    // has all rows and half of the weights.
    template <GemmShape S> WEFT_FN bool is_split() const { return S.has_split_m() && m == split_m; }

    // Whether two k blocks share a stage.
    template <GemmShape S> WEFT_FN bool is_paired() const {
        return S.has_pairs() && m <= max_paired_m;
    }
    // The number of k blocks in the stage that begins with k block k.
    template <GemmShape S> WEFT_FN u32 k_blocks_of_stage(u32 k) const {
        return is_paired<S>() && k + 1 < S.k_blocks() ? 2 : 1;
    }
};

// Reads each expert's count and first row. Counts are clamped to the rows inside the tensor.
template <GemmShape S> WEFT_FN void read_counts(const GemmArgs& a, GemmShared<S>& smem, u32 lane) {
    for (u32 e = lane; e < S.experts; e += warp_lanes) {
        const volatile i32* const starts = a.starts;
        const i64 first = starts == nullptr ? i64(e) * a.max_rows : starts[e];
        const i64 room = first < 0 ? 0 : max(i64(a.rows) - first, i64(0));
        // Volatile: bypasses this SM's L1, which may hold stale counts.
        const i32 count = *const_cast<const volatile i32*>(a.counts + e);
        smem.counts[e] = u32(min(min(max(i64(count), i64(0)), i64(a.max_rows)), room));
        smem.first_rows[e] = u32(first);
    }
    __syncwarp();
}

// The number of M-blocks of an expert with `count` rows.
template <GemmShape S> WEFT_FN u32 m_blocks_of(u32 count) {
    constexpr u32 spare = S.block_m - S.full_m();  // additional rows that the last block may have
    const u32 blocks = (max(count, spare) - spare + S.full_m() - 1) / S.full_m();
    return blocks == 0 && count != 0 ? 1 : blocks;
}

// Sorts experts by the mean height of their tiles, highest first, so that clusters get equal loads.
// More than 64 experts are not sorted.
template <GemmShape S> WEFT_FN void sort_experts(GemmShared<S>& smem, u32 lane) {
    u32* const height = smem.block_ends;  // free until count_m_blocks writes it
    for (u32 e = lane; e < S.experts; e += warp_lanes)
        height[e] = smem.counts[e] / max(m_blocks_of<S>(smem.counts[e]), 1u);
    __syncwarp();
    for (u32 e = lane; e < S.experts; e += warp_lanes) {
        u32 position = e;
        if constexpr (S.experts <= 64) {
            position = 0;
#pragma unroll 8
            for (u32 other = 0; other < S.experts; ++other)
                position += height[other] > height[e] || (height[other] == height[e] && other < e);
        }
        smem.expert_order[position] = e;
    }
    __syncwarp();
}

// Computes the inclusive prefix sum of M-blocks over the sorted experts.
template <GemmShape S> WEFT_FN void count_m_blocks(GemmShared<S>& smem, u32 lane) {
    u32 end = 0;
    for (u32 base = 0; base < S.experts; base += warp_lanes) {
        const u32 position = base + lane;
        u32 blocks =
            position < S.experts ? m_blocks_of<S>(smem.counts[smem.expert_order[position]]) : 0;
#pragma unroll
        for (u32 step = 1; step < warp_lanes; step *= 2) {
            const u32 before = __shfl_up_sync(all_lanes, blocks, step);
            if (lane >= step) blocks += before;
        }
        if (position < S.experts) smem.block_ends[position] = end + blocks;
        end += __shfl_sync(all_lanes, blocks, warp_lanes - 1);
    }
}

// Prepares the schedule; run by one warp before the first TileScheduler::next.
template <GemmShape S>
WEFT_FN void schedule_tiles(const GemmArgs& a, GemmShared<S>& smem, u32 lane) {
    read_counts(a, smem, lane);
    sort_experts(smem, lane);
    count_m_blocks(smem, lane);
}

// Enumerates this cluster's tiles. Experts are sorted by height, and tiles are dealt to clusters in
// boustrophedon order (0..n-1, n-1..0, ...), so the cluster with the highest tile of one round gets
// the lowest of the next. With several M-blocks per expert, heights alternate with a period that
// may divide the number of clusters, and some clusters would get only high tiles. In kernels with
// split tiles, each round therefore starts one cluster further. (In a simulation of 32 experts with
// random numbers of rows around 512, the busiest of 66 clusters has 5 % more than the mean, against
// 10 % in boustrophedon order.) M-blocks that share weights are adjacent, for L2 reuse. All
// M-blocks of an expert but the last have equal heights.
template <GemmShape S> struct TileScheduler {
    const GemmShared<S>& smem;
    u32 position = 0, round = 0;

    WEFT_FN bool next(Tile& tile) {
        constexpr u32 n_blocks = S.n_blocks();
        const u32 clusters = gridDim.x / 2, self = blockIdx.x / 2;
        u32 place = round % 2 == 0 ? self : clusters - 1 - self;
        if constexpr (S.has_split_m()) place = (self + round) % clusters;
        const u32 tile_idx = round * clusters + place;
        ++round;
        if (tile_idx >= smem.block_ends[S.experts - 1] * n_blocks) return false;
        while (tile_idx >= smem.block_ends[position] * n_blocks) ++position;
        const u32 before = position == 0 ? 0 : smem.block_ends[position - 1];
        const u32 m_blocks = smem.block_ends[position] - before;
        const u32 offset = tile_idx - before * n_blocks, m_block = offset % m_blocks;
        tile.expert = smem.expert_order[position];
        tile.n_block = offset / m_blocks;
        const u32 count = smem.counts[tile.expert];
        const u32 full_m = S.is_fp8()
                               ? S.full_m()
                               : round_up((count + m_blocks - 1) / m_blocks, block_m_granularity);
        const u32 begin = m_block * full_m;
        const u32 end = m_block + 1 == m_blocks ? count : begin + full_m;
        tile.first_row = smem.first_rows[tile.expert] + begin;
        tile.valid_m = end - begin;
        tile.m = S.has_split_m() && tile.valid_m > S.cta_m()
                     ? split_m
                     : round_up(tile.valid_m, S.m_granularity(tile.valid_m));
        return true;
    }
};

}  // namespace weft
