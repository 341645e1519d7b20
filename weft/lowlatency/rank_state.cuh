// SPDX-License-Identifier: Apache-2.0
// The state of the rank that every CTA of a low-latency kernel reads first, and the credits. See
// lowlatency/layout.cuh for the protocol.
#pragma once
#include <weft/device/roles.cuh>
#include <weft/device/row.cuh>
#include <weft/lowlatency/layout.cuh>

namespace weft {

// Sends the scale of one FP8 block at the end of a row. The words after the last scale are zeroed
// up to a whole vector.
template <u32 blocks> WEFT_FN void send_scale(u8* scales, u32 block, float scale) {
    u32* words = reinterpret_cast<u32*>(scales);
    store_relaxed(words + block, __float_as_uint(scale));
    if constexpr (blocks % 4 != 0)
        if (block == blocks - 1)
            for (u32 i = blocks; i < (blocks + 3) / 4 * 4; ++i) store_relaxed(words + i, 0u);
}

// The progress of this rank, and whether the group is broken. Every thread reads it, in the same
// round trip as its other first loads. After `may_start` no thread of the CTA reads it again or has
// a load of it in flight, so the CTA may count itself, and the last CTA to do so may advance the
// progress.
struct RankState {
    Progress progress;
    u32 failed, generation;
    RankSet living;

    template <LowLatencyShape S> WEFT_FN static RankState read(const LowLatencyShare<S>& own) {
        return {own.progress, own.header.state.failed, own.header.generation, own.header.living};
    }
    // Whether `peer` is a rank, and it is living.
    template <LowLatencyShape S> WEFT_FN bool is_living_peer(u32 peer) const {
        return peer < S.ranks && has(living, peer);
    }

    // True if the group is not broken and, for a CTA that stores, if the peers have emptied their
    // inboxes. A lane checks the peers `first` and, by recursion, 32, 64 ... after it.
    template <LowLatencyShape S, u32 first = 0>
    WEFT_FN bool may_start(const Block& team, const Site& site, Phase phase, bool stores) const {
        bool ok = true;
        if constexpr (first + warp_lanes < S.ranks)
            ok = may_start<S, first + warp_lanes>(team, site, phase, stores);
        // The last warp waits: in a metadata CTA of a small batch it has nothing else to wait for.
        const u32 before = team.lanes() - warp_lanes;
        if (stores && team.lane() >= before && is_living_peer<S>(team.lane() - before + first)) {
            const u32 peer = team.lane() - before + first;
            const u64 seen = load_acquire(credit_of<S>(site, phase, peer));
            // Usually the credit has arrived, and it is exactly this one.
            const u64 usual =
                make_flag(generation, site.descriptor, credit_needed(progress, phase));
            if (ok && failed == 0 && seen != usual)
                ok = await_credit<S>(site, progress, phase, peer);
        }
        if constexpr (first != 0) return ok;
        // Always true; it forces the values of all four loads before the barrier.
        const u64 words = progress.sent | progress.received | progress.returned | progress.combined;
        ok = ok && failed == 0 && words <= epoch_mask;
        return team.all(ok);
    }
};

// Counts CTAs that have read the state; true for the thread that counts the last one, which may
// then advance it. Called by one thread of each CTA.
WEFT_FN bool is_last_cta_relaxed(Header& header) {
    if (add_relaxed(&header.arrived, 1) != gridDim.x - 1) return false;
    header.arrived = 0;
    return true;
}

// The start of an operation, in the lane that records it. No other lane reads the rank's clock
// before its first store.
WEFT_FN u64 start_time(const Block& team, const CtaRoles& roles) {
    const bool keeps =
        roles.is_first_receiver() || (WEFT_PROFILE && roles.is<CtaRole::coordinator>());
    return keeps && team.lane() == 0 ? now_ns() : 0;
}

constexpr u64 largest(u64 a, u64 b) { return a > b ? a : b; }

// The coordinator of every operation sends credits before any wait. Each kind of credit has its own
// warp, because a release waits for the store before it.
template <LowLatencyShape S, u32 first = 0>
WEFT_FN void send_credits(const Block& team, const Site& site, const RankState& state) {
    if constexpr (first + warp_lanes < S.ranks)
        send_credits<S, first + warp_lanes>(team, site, state);
    if (team.warp() > 1 || first + team.warp_lane() >= S.ranks) return;
    const u32 peer = next_rank<S>(site.rank, first + team.warp_lane());
    if (!has(state.living, peer)) return;
    send_credit<S>(site, state.progress, team.warp() == 0 ? Phase::dispatch : Phase::combine, peer);
}

}  // namespace weft
