// Packed rows go to their tokens' owners, slot (token, this rank) of an all-to-all whose experts
// are the ranks and whose rows are stored by the kernel that has them (gemm_push). A warp takes 512
// columns of one row at a time. The last CTA publishes the flags.
#pragma once
#include <weft/compat/return_layout.cuh>
#include <weft/grouping/send.cuh>

namespace weft {

// Rows in the order (place among its source's, source), each rank starting with itself, so that
// ranks do not store to the same peer at once. Lane s holds where source s's rows are.
template <Shape S> WEFT_FN void return_strips(const Block& team, const ReturnArgs& a) {
    constexpr u32 pieces = Strip<S>::pieces;
    const u32 lane = team.warp_lane(), warps = team.lanes() / warp_lanes;
    const SourceRows held =
        lane < S.ranks ? SourceRows::of<S>(a, lane) : SourceRows{.first = 0, .count = 0};
    u32 most = 0;
    for (u32 source = 0; source < S.ranks; ++source)
        most = max(most, __shfl_sync(all_lanes, held.count, source));
    for (u64 unit = u64(blockIdx.x) * warps + team.warp(); unit < u64(most) * S.ranks * pieces;
         unit += u64(gridDim.x) * warps) {
        const u32 slot = u32(unit / pieces), place = slot / S.ranks;
        const u32 source = (a.site.rank + slot) % S.ranks;
        const u32 row = __shfl_sync(all_lanes, held.first, source) + place;
        if (place >= __shfl_sync(all_lanes, held.count, source)) continue;
        const Strip<S> strip{u32(unit % pieces) * Strip<S>::warp_vectors, lane};
        const u32 token = u32(a.tokens[row]);
        uint4 data[Strip<S>::vectors];
        strip.load(data, a.rows, row);
        if (token < S.tokens)
            strip.store_row(data, share<S>(a.site, source).inbox.returned.row[token][a.site.rank]);
    }
}

template <Shape S> WEFT_FN void return_rows(const ReturnArgs& a) {
    static_assert(S.combine == Combine::gemm_push && S.top_k == S.ranks);
    const Block team;
    Header& header = mine<S>(a.site).header;
    wait_for_predecessor();
    admit_successor();
    const EpochState state = header.state;
    if (state.failed != 0) return;
    mark_start(team, header, Phase::combine, state.epoch, team.lane() == 0 ? now_ns() : 0);
    if (fault(header, Point::combine_enter, a.site.rank, state.epoch) == Action::stay_away) return;
    for (u32 token = blockIdx.x * team.lanes() + team.lane(); token < a.own_tokens;
         token += gridDim.x * team.lanes())
        save_ranks<S>(a, token);
    return_strips<S>(team, a);
    if (!team.last_of(a.arrived)) return;
    publish<S>(team, a.site, Phase::combine, state.epoch, 0);
}

}  // namespace weft
