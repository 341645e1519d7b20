// The sender of combine by push: every row that this rank's experts made is stored into the inbox
// of the token's owner, slot (this rank, token). Rows in FP8: combine_fp8.cuh.
#pragma once
#include <weft/alltoall/phases.cuh>
#include <weft/device/copy.cuh>
#include <weft/device/team.cuh>

namespace weft {

// One inbox slot, and whether this rank has a row to push for it.
struct RowToPush {
    u32 source, token;
    bool wanted;  // the token has an expert here
};

// Slots in the order (token, source), each rank starting with itself, so that ranks do not store to
// the same peer at once. The loads of a later slot start before an earlier one is pushed.
template <Shape S>
WEFT_FN RowToPush find_row(const Block& team, const Site& site, u32 slot, u32 max_tokens) {
    const Share<S>& own = mine<S>(site);
    const u32 token = slot / S.ranks, source = (site.rank + slot) % S.ranks, k = team.warp_lane();
    if (token >= max_tokens) return {source, token, false};
    const bool local = k < S.top_k && own.inbox.route[source][token].expert[k] >= 0;
    const bool used = token < tokens_from<S>(own.inbox, source);
    return {source, token, __any_sync(all_lanes, local && used) != 0};
}

template <Shape S>
WEFT_FN void push_row(const Block& team, const Site& site, const RowToPush& row) {
    constexpr u32 vectors = S.out_bytes() / 16;
    const uint4* from =
        reinterpret_cast<const uint4*>(mine<S>(site).outbox.row[row.source][row.token]);
    uint4* to = reinterpret_cast<uint4*>(
        share<S>(site, row.source).inbox.returned.row[site.rank][row.token]);
    const u32 step = gridDim.y * team.lanes();
    for (u32 v = blockIdx.y * team.lanes() + team.lane(); v < vectors; v += step)
        store(to + v, load_shared_row(from + v));
}

template <Shape S> WEFT_FN void push_rows(const Block& team, const Site& site) {
    u32 max_tokens = 0;
#pragma unroll
    for (u32 source = 0; source < S.ranks; ++source)
        max_tokens = max(max_tokens, tokens_from<S>(mine<S>(site).inbox, source));
    RowToPush row = find_row<S>(team, site, blockIdx.x, max_tokens);
    for (u32 slot = blockIdx.x; slot < max_tokens * S.ranks; slot += gridDim.x) {
        const RowToPush next = find_row<S>(team, site, slot + gridDim.x, max_tokens);
        if (row.wanted) push_row<S>(team, site, row);
        row = next;
    }
}

}  // namespace weft
