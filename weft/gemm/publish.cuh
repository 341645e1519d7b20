// SPDX-License-Identifier: Apache-2.0
// The order between the GEMMs of a kernel of two: a down tile is loaded once all up tiles of its
// expert are stored, which MlpState counts.
//
// The math warps must not wait for a release at GPU scope. One thread of each CTA waits for their
// arrivals at `stored` and publishes the tile for them.
#pragma once
#include <weft/device/order.cuh>
#include <weft/gemm/math_warps.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>
#include <weft/gemm/tile_scheduler.cuh>

namespace weft {

constexpr u32 no_expert = ~0u;

// Tells the publishing thread that this warp has stored its results of an up tile or, with
// no_expert, that it has no more. tile: number of earlier ones.
template <GemmShape S> WEFT_FN void announce_up_tile(GemmShared<S>& smem, u32 expert, u32 tile) {
    __syncwarp();
    if (math_thread() % warp_lanes != 0) return;
    if (tile != 0) smem.published.wait((tile - 1) % 2);  // stored_expert has been read
    if (math_thread() == 0) smem.stored_expert = expert;
    smem.stored.arrive();
}

// Publishes this CTA's up tiles; run by one thread.
template <GemmShape S> WEFT_FN void publish_up_tiles(GemmShared<S>& smem, u32* num_up_tiles) {
    for (u32 tile = 0;; ++tile) {
        smem.stored.wait(tile % 2);
        const u32 expert = smem.stored_expert;
        if (expert == no_expert) return;
        add_acq_rel(&num_up_tiles[expert], 1);
        smem.published.arrive();
    }
}

WEFT_FN void await_count(u32* at, u32 count) {
    while (load_acquire_local(at) < count) {
    }
}

// Waits until all up tiles of a down tile's expert are stored, by both CTAs of their clusters. They
// were drawn before this tile by clusters that run, and no up tile waits for another one, so the
// wait ends.
template <GemmShape S>
WEFT_FN void await_up_tiles(const GemmShared<S>& smem, const TileScheduler<S>& scheduler,
                            const Tile& tile, u32* num_up_tiles) {
    const u32 up = scheduler.position - S.first_position();
    const u32 tiles = smem.tile_ends[up] - (up == 0 ? 0 : smem.tile_ends[up - 1]);
    await_count(&num_up_tiles[tile.expert], 2 * tiles);
}

}  // namespace weft
