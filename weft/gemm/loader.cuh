// SPDX-License-Identifier: Apache-2.0
// The loading warpgroup: one thread loads weights and rows by TMA, one to three warps
// load scales.
#pragma once
#include <weft/device/tma.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/publish.cuh>
#include <weft/gemm/shape.cuh>
#include <weft/gemm/tile_scheduler.cuh>

namespace weft {

// Loads this CTA's two units of a k block of MXFP4 weights, unless its columns are beyond n.
template <GemmShape S>
WEFT_FN void load_units(const GemmArgs& a, u8* to, const Tile& tile, u32 rank, u32 k_block,
                        Mbarrier& full, u64 hint) {
    constexpr u32 units = S.n / unit_n, apart = S.gated() ? units / 2 : 1;
    const u32 first = S.gated() ? tile.n_block * 2 + rank : tile.n_block * 4 + rank * 2;
    const bool exists = first + apart < units;
    full.arrive_expect_tx((exists ? 2 * unit_bytes : 0) + tile.m * block_k_bytes);
    if (!exists) return;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u64 unit = u64(tile.expert) * units + first + i * apart;
        bulk_load_hinted(to + i * unit_bytes,
                         a.weights + (unit * S.k_blocks() + k_block) * unit_bytes, unit_bytes, full,
                         hint);
    }
}

WEFT_FN void load_box(u8* to, const TensorMap& map, u32 x, u32 y, Mbarrier& full, u64 hint,
                      bool both_ctas) {
    if (both_ctas)
        tma_load_2d_multicast(3, to, map, x, y, full, hint);
    else
        tma_load_2d(to, map, x, y, full, hint);
}

// Loads a k block of 256 weight rows: of both blocks, which are gate and up if the kernel gates.
template <GemmShape S>
WEFT_FN void load_wide_weights(const GemmArgs& a, u8* to, const Tile& tile, u32 k_block,
                               Mbarrier& full, u64 hint) {
    constexpr u32 apart = S.gated() ? S.n / 2 : block_n;  // from the first block to the second
    constexpr u32 box = S.gated() ? gated_block_n : block_n;
    if (!tile.has_weights<S>()) return;
    const u32 first = tile.expert * S.n + tile.n_block * (S.gated() ? block_n : cluster_n);
#pragma unroll
    for (u32 row = 0; row < cluster_n; row += box)
        tma_load_2d(to + row * block_k_bytes, a.weights_map, k_block * block_k_bytes,
                    first + row / block_n * apart + row % block_n, full, hint);
}

// Loads a k block of this CTA's weights, for both CTAs if the tile is split.
template <GemmShape S>
WEFT_FN void load_weight_tile(const GemmArgs& a, u8* to, const Tile& tile, u32 rank, u32 k_block,
                              Mbarrier& full, u64 hint) {
    const u32 x = k_block * block_k_bytes, expert_row = tile.expert * S.n;
    const bool split = tile.is_split<S>();
    if (S.has_wide_n() && !split) return load_wide_weights<S>(a, to, tile, k_block, full, hint);
    u8* const own_tile = to + (split ? rank * weight_tile_bytes : 0);
    if constexpr (S.gated() && !S.is_fp8()) {
        tma_load_5d(to, a.weights_map, x, (tile.n_block * block_n + rank * gated_block_n) / 8,
                    tile.expert, full, hint);
    } else if constexpr (S.gated()) {
        // Boxes of 64 rows: gate and up, or in a split tile both halves of one of them.
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const u32 up = split ? rank : i, half = split ? i : rank;
            load_box(own_tile + i * (weight_tile_bytes / 2), a.weights_map, x,
                     expert_row + up * (S.n / 2) + tile.n_block * block_n + half * gated_block_n,
                     full, hint, split);
        }
    } else {
        load_box(own_tile, a.weights_map, x, expert_row + tile.n_block * cluster_n + rank * block_n,
                 full, hint, split);
    }
}

// Loads this CTA's weights of a stage. The expected bytes also include the rows and, in a split
// tile, the weights that the other CTA loads.
template <GemmShape S>
WEFT_FN void load_weights(const GemmArgs& a, GemmShared<S>& smem, u8* tiles, u32 stage,
                          const Tile& tile, u32 rank, u32 k) {
    const u64 hint = tile.valid_m == smem.counts[tile.expert] ? l2_evict_first : l2_evict_last;
    u8* const to = tiles + stage * S.stage_bytes();
    Mbarrier& full = smem.full[stage];
    if constexpr (S.is_mxfp4()) return load_units<S>(a, to, tile, rank, k, full, hint);
    const u32 weight_bytes = tile.has_weights<S>() ? S.weight_bytes() : 0;
    full.arrive_expect_tx(weight_bytes + tile.cta_m<S>() * block_k_bytes);
    load_weight_tile<S>(a, to, tile, rank, k, full, hint);
}

// Loads a k block of rows: half of them for both CTAs or, where the CTAs do not share rows, all of
// this CTA's.
template <GemmShape S>
WEFT_FN void load_rows(const GemmArgs& a, GemmShared<S>& smem, u8* tiles, u32 stage,
                       const Tile& tile, u32 rank, u32 k_block) {
    u8* const to = tiles + stage * S.stage_bytes() + S.weight_bytes();
    Mbarrier& full = smem.full[stage];
    if constexpr (S.has_split_m()) {
        if (tile.is_split<S>()) {
            constexpr u32 box = row_boxes - 1, m = 8 << box;
#pragma unroll
            for (u32 r = 0; r < normal_m; r += m)
                tma_load_2d(to + r * block_k_bytes, a.rows_map[box], k_block * block_k_bytes,
                            tile.first_row + rank * normal_m + r, full, l2_evict_last);
            return;
        }
    }
    u32 r = S.shares_rows() ? rank * (tile.m / 2) : 0, left = tile.m / (S.shares_rows() ? 2 : 1);
#pragma unroll
    for (u32 box = row_boxes; box-- > 0;)
        for (const u32 m = 8 << box; left >= m; left -= m, r += m)
            load_box(to + r * block_k_bytes, a.rows_map[box], k_block * block_k_bytes,
                     tile.first_row + r, full, l2_evict_last, S.shares_rows());
}

// Waits for the other CTA's last arrivals, which need this CTA's mbarriers.
template <GemmShape S>
WEFT_FN void await_empty_stages(GemmShared<S>& smem, PipelineState<S.stages>& pipeline) {
    for (u32 i = 0; i < S.stages; ++i, pipeline.advance())
        smem.empty[pipeline.stage].wait(pipeline.parity ^ 1);
}

// With PDL, fills stages with weights while the previous kernel still runs; returns their number.
template <GemmShape S>
WEFT_FN u32 prefetch_weights(const GemmArgs& a, GemmShared<S>& smem, u8* tiles, u32 rank) {
    TileScheduler<S> scheduler{smem};
    Tile tile;
    u32 filled = 0;
    while (filled < S.stages && scheduler.next(tile)) {
        for (u32 k = 0; k < S.k_blocks() && filled < S.stages; ++k, ++filled)
            load_weights(a, smem, tiles, filled, tile, rank, k);
        if (S.draws_tickets()) break;  // the previous kernel may still use the counter
    }
    return filled;
}

// Loads weights and rows of every k block of a GEMM into the stages. prefetched: stages that have
// their weights. num_up_tiles: of MlpState, for the second GEMM of a kernel.
template <GemmShape S>
WEFT_FN void load_gemm(const GemmArgs& a, GemmShared<S>& smem, u8* tiles, u32 rank,
                       TileScheduler<S>& scheduler, PipelineState<S.stages>& pipeline,
                       Tickets<S>& tickets, u32 prefetched, u32* num_up_tiles = nullptr) {
    Tile tile;
    while (scheduler.next(tile)) {
        if constexpr (S.draws_tickets()) tickets.draw(smem, rank);
        for (u32 k = 0; k < S.k_blocks(); ++k, pipeline.advance()) {
            // Before the last loads, so that the other CTA's loader does not wait for the ticket.
            if constexpr (S.draws_tickets())
                if (k + 1 == S.k_blocks()) tickets.send(smem, rank, scheduler.tile_idx);
            if (prefetched != 0) {
                --prefetched;
            } else {
                smem.empty[pipeline.stage].wait(pipeline.parity ^ 1);
                load_weights(a, smem, tiles, pipeline.stage, tile, rank, k);
            }
            if (S.part == Part::down && k == 0) {
                await_up_tiles<S>(smem, scheduler, tile, num_up_tiles);
                fence_for_bulk();  // math warps of other CTAs wrote the rows with generic stores
            }
            load_rows(a, smem, tiles, pipeline.stage, tile, rank, k);
        }
    }
}

// Loads the tiles of a kernel of one GEMM; run by one thread. `counters`: those of the kernel, or
// null if it draws no tickets.
template <GemmShape S>
WEFT_FN void load_tiles(const GemmArgs& a, GemmShared<S>& smem, u8* tiles, u32 rank,
                        TicketCounter* counters) {
    u32 prefetched = 0;
    if constexpr (S.prefetch_weights) {
        prefetched = prefetch_weights(a, smem, tiles, rank);
        pdl_wait();
    }
    TileScheduler<S> scheduler{smem};
    PipelineState<S.stages> pipeline;
    Tickets<S> tickets{a.ticket_slot == 0 ? nullptr : counters + a.ticket_slot};
    fence_for_bulk();  // the previous kernel wrote the rows with generic-proxy stores
    load_gemm(a, smem, tiles, rank, scheduler, pipeline, tickets, prefetched);
    if constexpr (S.draws_tickets()) tickets.finish(rank);
    await_empty_stages(smem, pipeline);
}

template <u32 n> struct alignas(n * sizeof(float)) FloatVector {
    float at[n];
};

// Loads n scales that are `stride` apart: as one vector if they are adjacent and aligned, else one
// by one with zeros from `left` on.
template <u32 n>
WEFT_FN void load_scale_vector(float (&to)[n], const float* from, i64 stride, u32 left,
                               bool vector) {
    if (vector) {
        const FloatVector<n> v = *reinterpret_cast<const FloatVector<n>*>(from);
#pragma unroll
        for (u32 i = 0; i < n; ++i) to[i] = v.at[i];
    } else {
#pragma unroll
        for (u32 i = 0; i < n; ++i) to[i] = i < left ? from[i * stride] : 0.0f;
    }
}

// A lane's scales for scale_k_blocks k blocks: of its rows and of the blocks of weights.
template <GemmShape S> struct ScaleRegisters {
    static constexpr u32 lanes = S.scale_warps() * warp_lanes;
    static constexpr u32 rows_per_lane = (S.cta_m() + lanes - 1) / lanes;
    static constexpr u32 k_blocks = S.k_blocks(), ahead = scale_k_blocks;
    float row[rows_per_lane][ahead], weights[S.scales_of_row()][ahead];

    WEFT_FN static u32 row_of(u32 i) { return i * lanes + threadIdx.x - warp_lanes; }

    // Padding rows take the scales of the last valid row.
    WEFT_FN void load(const GemmArgs& a, const Tile& tile, u32 rank, u32 k) {
        constexpr bool whole = k_blocks % ahead == 0;
        const bool aligned =
            reinterpret_cast<u64>(a.row_scales) % 16 == 0 && a.row_scale_stride % 4 == 0;
        const u32 block =
            tile.expert * (S.n / scale_block) +
            (S.gated() ? tile.n_block : tile.n_block * 2 + (S.has_wide_n() ? 0 : rank));
        // The distance from gate to up, or to the second block.
        constexpr u32 step = S.gated() ? S.n / 2 / scale_block : 1;
        const float* const at = a.weight_scales + u64(block) * k_blocks + k;
        if (S.is_fp8() && tile.has_weights<S>())
#pragma unroll
            for (u32 i = 0; i < S.scales_of_row(); ++i)
                load_scale_vector(weights[i], at + i * step * k_blocks, 1, k_blocks - k,
                                  whole && reinterpret_cast<u64>(a.weight_scales) % 16 == 0);
        const u32 first = tile.first_row_of<S>(rank);
#pragma unroll
        for (u32 i = 0; i < rows_per_lane; ++i) {
            const u32 r = tile.first_row + min(first + row_of(i), tile.valid_m - 1);
            load_scale_vector(
                row[i], a.row_scales + i64(r) * a.row_scale_stride + k * a.k_scale_stride,
                a.k_scale_stride, k_blocks - k, whole && a.k_scale_stride == 1 && aligned);
        }
    }
    // Stores the scales of m rows for k block n of those in registers.
    WEFT_FN void store(StageScales<S>& to, u32 m, u32 n) const {
#pragma unroll
        for (u32 i = 0; i < rows_per_lane; ++i)
            if (row_of(i) < m)
#pragma unroll
                for (u32 w = 0; w < S.scales_of_row(); ++w)
                    to.rows[w][scale_slot(row_of(i))] =
                        S.is_fp8() ? __fmul_rn(row[i][n], weights[w][n]) : row[i][n];
    }
};

template <GemmShape S>
WEFT_FN void load_tile_scales(const GemmArgs& a, GemmShared<S>& smem,
                              PipelineState<S.stages>& pipeline, const Tile& tile, u32 rank) {
    for (u32 k = 0; k < S.k_blocks(); k += scale_k_blocks) {
        ScaleRegisters<S> scales;
        scales.load(a, tile, rank, k);
#pragma unroll
        for (u32 n = 0; n < scale_k_blocks; ++n, pipeline.advance()) {
            if (k + n >= S.k_blocks()) break;
            smem.empty[pipeline.stage].wait(pipeline.parity ^ 1);
            scales.store(smem.scales[pipeline.stage], tile.cta_m<S>(), n);
            __syncwarp();
            if (threadIdx.x % warp_lanes == 0) smem.full[pipeline.stage].arrive();
        }
    }
}

// Loads the scales of every k block, each row's multiplied by that of its FP8 weights; run by the
// scale warps. num_up_tiles: see load_gemm.
template <GemmShape S>
WEFT_FN void load_gemm_scales(const GemmArgs& a, GemmShared<S>& smem, u32 rank,
                              TileScheduler<S>& scheduler, PipelineState<S.stages>& pipeline,
                              u32* num_up_tiles = nullptr) {
    Tile tile;
    while (scheduler.next(tile)) {
        if constexpr (S.part == Part::down) await_up_tiles<S>(smem, scheduler, tile, num_up_tiles);
        load_tile_scales<S>(a, smem, pipeline, tile, rank);
    }
}

template <GemmShape S> WEFT_FN void load_scales(const GemmArgs& a, GemmShared<S>& smem, u32 rank) {
    if constexpr (S.prefetch_weights) pdl_wait();
    TileScheduler<S> scheduler{smem};
    PipelineState<S.stages> pipeline;
    load_gemm_scales(a, smem, rank, scheduler, pipeline);
}

}  // namespace weft
