// SPDX-License-Identifier: Apache-2.0
// The tile scheduler.
//
// One warp of each CTA reads the counts, sorts experts by the height of their tiles and numbers
// their M-blocks. Then every warp finds its cluster's tiles on its own. Tiles are dealt to the
// clusters in turn or, in kernels with split tiles or of two GEMMs, drawn: one thread of a cluster
// draws a ticket, the index of the next tile, and sends it to both CTAs.
#pragma once
#include <weft/device/order.cuh>
#include <weft/device/team.cuh>
#include <weft/device/tma.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>

namespace weft {

// One tile of a cluster: rows of one expert by 256 weight rows (128 columns of a gated result). Of
// a wide tile, a CTA's half: the CTAs have the same rows.
struct Tile {
    u32 expert, n_block, first_row;
    u32 valid_m, m;  // rows without and with padding

    // Whether each CTA has half of the rows and all weights of the tile. In other tiles, each CTA
    // has all rows and half of the weights.
    template <GemmShape S> WEFT_FN bool is_split() const { return S.has_split_m() && m == split_m; }

    // Whether this CTA has weight rows: of the last wide tile, the second CTA may have none.
    template <GemmShape S> WEFT_FN bool has_weights() const {
        return !S.has_wide_n() || n_block < S.n / cluster_n;
    }
    // The first row of the tile that this CTA multiplies.
    template <GemmShape S> WEFT_FN u32 first_row_of(u32 rank) const {
        return is_split<S>() ? rank * normal_m : 0;
    }
    // The number of rows that this CTA multiplies, with padding.
    template <GemmShape S> WEFT_FN u32 cta_m() const { return is_split<S>() ? normal_m : m; }
};

constexpr u32 counts_in_flight = 8;  // per lane

// Reads each expert's count and first row. Counts are clamped to the rows inside the tensor. A
// lane's loads are all in flight at once: in turn, each would take a round trip to L2.
template <GemmShape S> WEFT_FN void read_counts(const GemmArgs& a, GemmShared<S>& smem, u32 lane) {
    constexpr u32 loads = (S.experts + warp_lanes - 1) / warp_lanes;
    constexpr u32 in_flight = loads < counts_in_flight ? loads : counts_in_flight;
    const bool has_starts = a.starts != nullptr;
    for (u32 base = lane; base < S.experts; base += in_flight * warp_lanes) {
        i32 count[in_flight], start[in_flight] = {};
#pragma unroll
        for (u32 i = 0; i < in_flight; ++i) {
            const u32 e = min(base + i * warp_lanes, S.experts - 1);
            // Volatile: bypasses this SM's L1, which may hold stale counts.
            count[i] = *const_cast<const volatile i32*>(a.counts + e);
            if (has_starts) start[i] = *const_cast<const volatile i32*>(a.starts + e);
        }
#pragma unroll
        for (u32 i = 0; i < in_flight; ++i) {
            const u32 e = base + i * warp_lanes;
            if (e >= S.experts) break;
            const i64 first = has_starts ? start[i] : i64(e) * a.max_rows;
            const i64 room = first < 0 ? 0 : max(i64(a.rows) - first, i64(0));
            smem.counts[e] = u32(min(min(max(i64(count[i]), i64(0)), i64(a.max_rows)), room));
            smem.first_rows[e] = u32(first);
        }
    }
    __syncwarp();
}

// The number of M-blocks of an expert with `count` rows.
template <GemmShape S> WEFT_FN u32 m_blocks_of(u32 count) {
    constexpr u32 spare = S.block_m - S.full_m();  // additional rows that the last block may have
    const u32 blocks = (max(count, spare) - spare + S.full_m() - 1) / S.full_m();
    return blocks == 0 && count != 0 ? 1 : blocks;
}

// The M-blocks of an expert in kernels with split tiles: `split` ones, and a wide one if at most
// 128 rows are left. For every 512 weight rows, it has two tiles for each split M-block and one for
// the wide one.
template <GemmShape S> struct SplitExpert {
    u32 split, wide;

    WEFT_FN explicit SplitExpert(u32 count)
        : split((count + normal_m - 1) / split_m), wide(m_blocks_of<S>(count) - split) {}
    WEFT_FN u32 tiles_of_wide_n() const { return 2 * split + wide; }
    WEFT_FN u32 tiles() const {
        constexpr u32 half = S.n % wide_n != 0;  // of the last 512 weight rows, 256 may exist
        return S.n / wide_n * tiles_of_wide_n() + half * (split + wide);
    }
};

// The number of tiles of an expert with `count` rows.
template <GemmShape S> WEFT_FN u32 tiles_of(u32 count) {
    if constexpr (S.has_split_m())
        return SplitExpert<S>(count).tiles();
    else
        return m_blocks_of<S>(count) * S.n_blocks();
}

// Sorts experts by the mean height of their tiles, highest first, so that clusters get equal loads.
template <GemmShape S> WEFT_FN void sort_by_height(GemmShared<S>& smem, u32 lane) {
    u32* const height = smem.tile_ends;  // free until count_tiles writes it
    for (u32 e = lane; e < S.experts; e += warp_lanes)
        height[e] = smem.counts[e] / max(m_blocks_of<S>(smem.counts[e]), 1u);
    __syncwarp();
    for (u32 e = lane; e < S.experts; e += warp_lanes) {
        u32 position = 0;
#pragma unroll 8
        for (u32 other = 0; other < S.experts; ++other)
            position += height[other] > height[e] || (height[other] == height[e] && other < e);
        smem.expert_order[position] = e;
    }
}

// Puts experts without rows last. With few tokens most experts have none, and TileScheduler would
// pass all of them on its way to the first tile.
template <GemmShape S> WEFT_FN void put_idle_last(GemmShared<S>& smem, u32 lane) {
    u32 busy = 0;
#pragma unroll 8
    for (u32 base = 0; base < S.experts; base += warp_lanes) {
        const u32 e = base + lane;
        const bool has_rows = e < S.experts && smem.counts[e] != 0;
        const u32 mask = __ballot_sync(all_lanes, has_rows);
        const u32 before = busy + __popc(mask & ((1u << lane) - 1));
        if (e < S.experts) smem.expert_order[has_rows ? before : S.experts - 1 - (e - before)] = e;
        busy += __popc(mask);
    }
}

// Sets the order of experts. A sort of more than 64 would take longer than it gains.
template <GemmShape S> WEFT_FN void order_experts(GemmShared<S>& smem, u32 lane) {
    if constexpr (S.experts <= 64)
        sort_by_height(smem, lane);
    else
        put_idle_last(smem, lane);
    __syncwarp();
}

// Computes the inclusive prefix sum of tiles over the sorted experts, and returns the last one.
// end: number of tiles of an earlier GEMM.
template <GemmShape S> WEFT_FN u32 count_tiles(GemmShared<S>& smem, u32 lane, u32 end = 0) {
#pragma unroll 8
    for (u32 base = 0; base < S.experts; base += warp_lanes) {
        const u32 position = base + lane;
        u32 tiles =
            position < S.experts ? tiles_of<S>(smem.counts[smem.expert_order[position]]) : 0;
#pragma unroll
        for (u32 step = 1; step < warp_lanes; step *= 2) {
            const u32 before = __shfl_up_sync(all_lanes, tiles, step);
            if (lane >= step) tiles += before;
        }
        if (position < S.experts) smem.tile_ends[S.first_position() + position] = end + tiles;
        end += __shfl_sync(all_lanes, tiles, warp_lanes - 1);
    }
    return end;
}

// Prepares the schedule; run by one warp before the first TileScheduler::next.
// Returns the number of tiles.
template <GemmShape S>
WEFT_FN u32 schedule_tiles(const GemmArgs& a, GemmShared<S>& smem, u32 lane) {
    read_counts(a, smem, lane);
    order_experts(smem, lane);
    return count_tiles(smem, lane);
}

// Enumerates this cluster's tiles. Experts are sorted by height, and tiles are dealt to clusters in
// boustrophedon order (0..n-1, n-1..0, ...), so the cluster with the highest tile of one round gets
// the lowest of the next. M-blocks that share weights are adjacent, for L2 reuse. All M-blocks of
// an expert but the last have equal heights.
//
// In kernels with split tiles heights differ most, and several M-blocks of an expert alternate with
// a period that may divide the number of clusters. There, tiles are drawn in the same order (see
// Tickets). In a simulation of 32 experts with Zipf-distributed rows, 256 on average, the busiest
// of 66 clusters then has 2 % more than the mean, against 15 % if the tiles are dealt.
//
// In a kernel of two GEMMs the tiles of the second follow those of the first, for experts in the
// same order. There all tiles are drawn: a cluster that waits for an up tile knows that a running
// cluster has it, even if others have no SM yet.
template <GemmShape S> struct TileScheduler {
    GemmShared<S>& smem;
    u32 position = S.first_position(), round = 0, tile_idx = 0;
    bool is_drawn = false;  // Part::down: whether tile_idx is drawn for the next tile

    WEFT_FN u32 await_ticket() {
        const u32 drawn = round - S.undrawn_tiles(), slot = drawn % S.ticket_ring();
        smem.ticket_full[slot].wait(drawn / S.ticket_ring() % 2);
        return smem.tickets[slot];
    }
    WEFT_FN void draw() {
        const u32 clusters = gridDim.x / 2, self = blockIdx.x / 2;
        if constexpr (S.draws_tickets())
            tile_idx = round < S.undrawn_tiles() ? self : await_ticket();
        else
            tile_idx = round * clusters + (round % 2 == 0 ? self : clusters - 1 - self);
        ++round;
    }
    WEFT_FN bool next(Tile& tile) {
        if (S.part != Part::down || !is_drawn) draw();
        if constexpr (S.part == Part::down) is_drawn = false;
        if (tile_idx >= smem.tile_ends[S.first_position() + S.experts - 1]) return false;
        while (tile_idx >= smem.tile_ends[position]) ++position;
        const u32 offset = tile_idx - (position == 0 ? 0 : smem.tile_ends[position - 1]);
        tile.expert = smem.expert_order[position - S.first_position()];
        const u32 count = smem.counts[tile.expert];
        if constexpr (S.has_split_m())
            set_split_or_wide(tile, SplitExpert<S>(count), offset, count);
        else
            set_blocks(tile, offset, count);
        return true;
    }

    // Sets the blocks of an expert's tile `offset`.
    WEFT_FN void set_blocks(Tile& tile, u32 offset, u32 count) const {
        const u32 m_blocks = m_blocks_of<S>(count), m_block = offset % m_blocks;
        const u32 full_m = S.is_fp8()
                               ? S.full_m()
                               : round_up((count + m_blocks - 1) / m_blocks, block_m_granularity);
        const u32 begin = m_block * full_m;
        const u32 end = m_block + 1 == m_blocks ? count : begin + full_m;
        tile.n_block = offset / m_blocks;
        if constexpr (S.has_wide_n()) tile.n_block = tile.n_block * 2 + blockIdx.x % 2;
        tile.first_row = smem.first_rows[tile.expert] + begin;
        tile.valid_m = end - begin;
        tile.m = round_up(tile.valid_m, S.m_granularity(tile.valid_m));
    }

    // The same in kernels with split tiles. For each 512 weight rows, the order is: split tiles of
    // the first half, the wide tile, split tiles of the second half.
    WEFT_FN void set_split_or_wide(Tile& tile, const SplitExpert<S>& expert, u32 offset,
                                   u32 count) const {
        const u32 pair = offset / expert.tiles_of_wide_n(), i = offset % expert.tiles_of_wide_n();
        const bool is_wide = expert.wide != 0 && i == expert.split;
        const bool second_half = i >= expert.split + expert.wide;
        const u32 m_block = second_half ? i - expert.split - expert.wide : i;
        const u32 begin = m_block * split_m;
        tile.n_block = pair * 2 + (is_wide ? blockIdx.x % 2 : second_half);
        tile.first_row = smem.first_rows[tile.expert] + begin;
        tile.valid_m = min(count - begin, split_m);
        tile.m = is_wide ? round_up(tile.valid_m, block_m_granularity) : split_m;
    }
};

// The tickets of a cluster, for the threads that load its tiles. The thread of CTA 0 draws the next
// one from a counter in global memory while it loads a tile, and sends it to both CTAs. Without a
// counter it deals the tiles in turn. A cluster's first tile needs no ticket, except in kernels of
// two GEMMs.
//
// A cluster draws until a ticket is beyond the last tile, and then counts itself. The last cluster
// resets the counter for the next launch, which draws after this one has ended. All clusters count,
// so the counter ends at 0 whatever it was and whatever numbers of rows the clusters have read.
template <GemmShape S> struct Tickets {
    TicketCounter* const counter;  // or null
    u32 drawn = 0;                 // number of tickets so far
    u32 value = 0;                 // what the counter was

    // Prepares this CTA for the next ticket, and draws it. `rank`: of the CTA in the cluster.
    WEFT_FN void draw(GemmShared<S>& smem, u32 rank) {
        smem.ticket_full[drawn % S.ticket_ring()].arrive_expect_tx(sizeof(u32));
        if (rank == 0 && counter != nullptr) value = add_relaxed(&counter->drawn, 1);
    }
    // Sends the ticket that was drawn. tile_idx: the tile that this cluster loads.
    WEFT_FN void send(GemmShared<S>& smem, u32 rank, u32 tile_idx) {
        const u32 slot = drawn++ % S.ticket_ring();
        if (rank != 0) return;
        const u32 clusters = gridDim.x / 2;
        // Dealt in turn, each round starts one cluster further: heights may alternate with a period
        // that divides the number of clusters.
        const u32 ticket = counter != nullptr
                               ? S.undrawn_tiles() * clusters + value
                               : (tile_idx / clusters + 1) * clusters + (tile_idx + 1) % clusters;
#pragma unroll
        for (u32 cta = 0; cta < 2; ++cta)
            store_remote(cta, &smem.tickets[slot], ticket, smem.ticket_full[slot]);
    }
    // Resets the counter in the last cluster; called after this cluster's last draw.
    WEFT_FN void finish(u32 rank) const {
        if (rank != 0 || counter == nullptr) return;
        if (add_acq_rel(&counter->finished, 1) + 1 == gridDim.x / 2) *counter = {};
    }
};

}  // namespace weft
