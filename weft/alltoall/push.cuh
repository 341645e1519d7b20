// SPDX-License-Identifier: Apache-2.0
// The sender of combine by push: stores every row of this rank's experts into the inbox of the
// token's owner, slot (this rank, token). For FP8 rows see combine_fp8.cuh.
#pragma once
#include <weft/alltoall/phases.cuh>
#include <weft/device/copy.cuh>
#include <weft/device/team.cuh>

namespace weft {

// One slot, and whether this rank has a row to push for it.
struct RowToPush {
    u32 source, token;
    bool has_row;  // the token has an expert on this rank
};

// Slots in the order (token, source), each rank starting with itself, so that ranks do not store to
// the same peer at once. The loads of a later slot start before an earlier one is pushed.
template <Shape S>
WEFT_FN RowToPush find_row(const Block& team, const CombineArgs& a, u32 i, u32 max_tokens) {
    const Share<S>& own = own_share<S>(a.site);
    const u32 token = i / S.ranks, source = (a.site.rank + i) % S.ranks, k = team.warp_lane();
    if (token >= max_tokens) return {source, token, false};
    const Route<S>& route = own.inbox.route[slot_of(a.source_rows, source, token)];
    const bool local = k < S.top_k && route.expert[k] >= 0;
    const bool used = token < tokens_from<S>(own.inbox, source);
    return {source, token, __any_sync(all_lanes, local && used) != 0};
}

template <Shape S>
WEFT_FN void push_row(const Block& team, const CombineArgs& a, const RowToPush& row) {
    constexpr u32 vectors = S.out_bytes() / 16;
    const u32 slot = slot_of(a.source_rows, row.source, row.token);
    const uint4* from = reinterpret_cast<const uint4*>(own_share<S>(a.site).outbox.row[slot]);
    uint4* to = reinterpret_cast<uint4*>(
        share<S>(a.site, row.source).inbox.returned.row[a.site.rank][row.token]);
    const u32 step = gridDim.y * team.lanes();
    for (u32 v = blockIdx.y * team.lanes() + team.lane(); v < vectors; v += step)
        store(to + v, load_peer_row(from + v));
}

template <Shape S> WEFT_FN void push_rows(const Block& team, const CombineArgs& a) {
    u32 max_tokens = 0;
#pragma unroll
    for (u32 source = 0; source < S.ranks; ++source)
        max_tokens = max(max_tokens, tokens_from<S>(own_share<S>(a.site).inbox, source));
    RowToPush row = find_row<S>(team, a, blockIdx.x, max_tokens);
    for (u32 i = blockIdx.x; i < max_tokens * S.ranks; i += gridDim.x) {
        const RowToPush next = find_row<S>(team, a, i + gridDim.x, max_tokens);
        if (row.has_row) push_row<S>(team, a, row);
        row = next;
    }
}

}  // namespace weft
