// The pushing half of combine: every row that this rank's experts made goes straight into the inbox
// of the token's owner, slot (this rank, token), as it is. Rows in FP8: fp8_home.cuh.
#pragma once
#include <weft/alltoall/phases.cuh>
#include <weft/device/copy.cuh>
#include <weft/device/team.cuh>

namespace weft {

// One slot of the inbox whose row is to be pushed home, as a warp sees it.
struct Errand {
    u32 source, token;
    bool wanted;  // the token has an expert here
};

// Slots in the order (token, source), each rank starting with itself, so that peers are not hit in
// step. The loads of a later slot are started before an earlier one is pushed.
template <Shape S>
WEFT_FN Errand find_errand(const Block& team, const Site& site, u32 slot, u32 most) {
    const Share<S>& own = mine<S>(site);
    const u32 token = slot / S.ranks, source = (site.rank + slot) % S.ranks, k = team.warp_lane();
    if (token >= most) return {source, token, false};
    const bool local = k < S.top_k && own.inbox.route[source][token].expert[k] >= 0;
    const bool used = token < tokens_from<S>(own.inbox, source);
    return {source, token, __any_sync(all_lanes, local && used) != 0};
}

template <Shape S>
WEFT_FN void push_row(const Block& team, const Site& site, const Errand& errand) {
    constexpr u32 vectors = S.out_bytes() / 16;
    const uint4* from =
        reinterpret_cast<const uint4*>(mine<S>(site).outbox.row[errand.source][errand.token]);
    uint4* to = reinterpret_cast<uint4*>(
        share<S>(site, errand.source).inbox.returned.row[site.rank][errand.token]);
    const u32 step = gridDim.y * team.lanes();
    for (u32 v = blockIdx.y * team.lanes() + team.lane(); v < vectors; v += step)
        store(to + v, load_shared_row(from + v));
}

template <Shape S> WEFT_FN void push_rows(const Block& team, const Site& site) {
    u32 most = 0;
#pragma unroll
    for (u32 source = 0; source < S.ranks; ++source)
        most = max(most, tokens_from<S>(mine<S>(site).inbox, source));
    Errand errand = find_errand<S>(team, site, blockIdx.x, most);
    for (u32 slot = blockIdx.x; slot < most * S.ranks; slot += gridDim.x) {
        const Errand next = find_errand<S>(team, site, slot + gridDim.x, most);
        if (errand.wanted) push_row<S>(team, site, errand);
        errand = next;
    }
}

}  // namespace weft
