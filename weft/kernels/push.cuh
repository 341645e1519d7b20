// The pushing half of combine: every row that this rank's experts made goes straight into the inbox
// of the token's owner, slot (this rank, token), as it is or as block-scaled FP8.
#pragma once
#include <weft/kernels/quant.cuh>

namespace weft {

// Does the token in this slot have an expert here? The same answer in every lane of a warp.
template <Shape S>
WEFT_FN bool is_for_me(const Block& team, const Share<S>& own, u32 source, u32 token) {
    const u32 k = team.warp_lane();
    const bool local = k < S.top_k && own.inbox.route[source][token].expert[k] >= 0;
    return __any_sync(all_lanes, local);
}

template <Shape S> WEFT_FN void push_plain(const Block& team, const uint4* from, uint4* to) {
    constexpr u32 vectors = S.out_bytes() / 16;
    for (u32 v = blockIdx.y * team.lanes() + team.lane(); v < vectors;
         v += gridDim.y * team.lanes())
        store(to + v, load_shared_row(from + v));
}

// Eight lanes make a block of 128 columns; a warp's four scales leave as one 16-byte store where
// the row's length allows it. Whole warps stay together, because they share their maxima.
template <Shape S> WEFT_FN void push_fp8(const Block& team, const uint4* from, u64 to) {
    constexpr u32 turns = S.hidden / lane_columns;
    using Source = Columns<S.number>;
    const u32 step = gridDim.y * team.lanes();
    for (u32 first = blockIdx.y * team.lanes() + team.warp() * warp_lanes; first < turns;
         first += step) {
        const u32 v = first + team.warp_lane();
        Source source{};
        if (v < turns)
#pragma unroll
            for (u32 i = 0; i < Source::vectors; ++i)
                source.v[i] = load_shared_row(from + v * Source::vectors + i);
        float x[lane_columns];
        source.widen(x);
        const u32 amax = block_amax_bits<scale_columns>(x);
        const BlockScale block = block_scale(amax);
        if (v >= turns) continue;
        store(reinterpret_cast<uint4*>(to) + v, quantize(x, block.inverse, amax >= infinity_bits));
        if (v % (scale_columns / lane_columns) == 0)
            store(reinterpret_cast<float*>(to + S.hidden) + v * lane_columns / scale_columns,
                  block.scale);
    }
}

// Slots are taken source by source, starting at this rank, so that peers are not hit in step.
template <Shape S> WEFT_FN void push_rows(const Block& team, const Site& site) {
    Share<S>& own = mine<S>(site);
    u32 most = 0;
#pragma unroll
    for (u32 source = 0; source < S.ranks; ++source)
        most = max(most, min(u32(own.inbox.counts[source]), S.tokens));
    for (u32 slot = blockIdx.x; slot < most * S.ranks; slot += gridDim.x) {
        const u32 token = slot / S.ranks, source = (site.rank + slot) % S.ranks;
        if (token >= u32(own.inbox.counts[source]) || !is_for_me<S>(team, own, source, token))
            continue;
        const uint4* from = reinterpret_cast<const uint4*>(own.outbox.row[source][token]);
        u8* to = share<S>(site, source).inbox.returned.row[site.rank][token];
        if constexpr (S.way == Way::fp8)
            push_fp8<S>(team, from, u64(to));
        else
            push_plain<S>(team, from, reinterpret_cast<uint4*>(to));
    }
}

}  // namespace weft
