// `scatter` and the sender of combine in one kernel: experts' results go straight to the tokens'
// owners, without a trip through the outbox. A warp takes 512 columns of one token at a time, sums
// its rows of y and stores the sum into the owner's inbox; with gemm_push it copies the rows one by
// one. The last CTA publishes the flags.
#pragma once
#include <weft/device/quantize_warp.cuh>
#include <weft/grouping/rows.cuh>

namespace weft {

// The vectors of a row that one warp takes, 16 columns per lane: neighbouring ones with push_fp8,
// whose blocks lie in neighbouring lanes; otherwise a warp's width apart, so that a warp's store is
// one run of 512 bytes.
template <Shape S> struct Strip {
    static constexpr u32 width = elements_in_vector(S.dtype), vectors = lane_columns / width;
    static constexpr u32 warp_vectors = warp_lanes * vectors, row_vectors = S.out_bytes() / 16;
    static constexpr u32 pieces = (row_vectors + warp_vectors - 1) / warp_vectors;  // of a row
    u32 first, lane;

    WEFT_FN u32 at(u32 i) const {
        return first +
               (S.combine == Combine::push_fp8 ? lane * vectors + i : i * warp_lanes + lane);
    }
    WEFT_FN bool holds(u32 i) const { return at(i) < row_vectors; }
    WEFT_FN void load(uint4 (&v)[vectors], const void* rows, u64 row) const {
#pragma unroll
        for (u32 i = 0; i < vectors; ++i)
            if (holds(i))
                v[i] = load_input(static_cast<const uint4*>(rows) + row * row_vectors + at(i));
    }
    WEFT_FN void store_row(const uint4 (&v)[vectors], u8* row) const {
#pragma unroll
        for (u32 i = 0; i < vectors; ++i)
            if (holds(i)) store(reinterpret_cast<uint4*>(row) + at(i), v[i]);
    }
};

// What one warp sends: one strip of one token. Lane k holds its k-th entry and that entry's row.
struct StripTask {
    TokenSlot at;
    u32 piece;
    Entry entry;
    i32 row;
};

// Tokens in the order (token, source), each rank starting with itself, so that ranks do not store
// to the same peer at once. Behind the last token there are no entries.
template <Shape S, Grouping G> WEFT_FN StripTask find_task(const GroupArgs& a, u32 unit, u32 k) {
    constexpr u32 pieces = Strip<S>::pieces;
    const u32 slot = unit / pieces, token = slot / S.ranks, source = (a.site.rank + slot) % S.ranks;
    StripTask d{
        .at = {source, token}, .piece = unit % pieces, .entry = {no_group, 0.0f}, .row = -1};
    if (token >= tokens_from<S>(own_share<S>(a.site).inbox, source)) return d;
    d.entry = load_entry<S, G>(a, d.at, k);
    if (k < S.top_k) d.row = a.position[(u64(source) * S.tokens + token) * S.top_k + k];
    return d;
}

// The sum of the rows of the lanes in `left`, in their order, rounded once: the bits of `scatter`.
// Two rows are in flight before the first is added.
template <Shape S>
WEFT_FN void sum_strip(const Strip<S>& strip, const void* y, const StripTask& d, u32 left,
                       uint4 (&out)[Strip<S>::vectors]) {
    constexpr u32 vectors = Strip<S>::vectors;
    float sum[vectors][Strip<S>::width] = {};
    while (left != 0) {
        uint4 data[2][vectors];
        float weight[2];
        const bool pair = (left & (left - 1)) != 0;
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const u32 lane = (__ffs(left) - 1) % warp_lanes;
            const u64 row = u64(u32(__shfl_sync(all_lanes, d.row, lane)));
            weight[i] = __shfl_sync(all_lanes, d.entry.weight, lane);
            if (left != 0) strip.load(data[i], y, row);
            left &= left - 1;
        }
#pragma unroll
        for (u32 i = 0; i < vectors; ++i) {
            if (strip.holds(i)) add_weighted<S.dtype>(sum[i], weight[0], data[0][i]);
            if (strip.holds(i) && pair) add_weighted<S.dtype>(sum[i], weight[1], data[1][i]);
        }
    }
#pragma unroll
    for (u32 i = 0; i < vectors; ++i) out[i] = round_vector<S.dtype>(sum[i]);
}

// Eight lanes make a block of 128 columns. Whole warps come here, because the lanes of a block
// share their maximum.
template <Shape S>
WEFT_FN void store_fp8(const Strip<S>& strip, const uint4 (&v)[Strip<S>::vectors], u8* row) {
    Columns<S.dtype> columns;
#pragma unroll
    for (u32 i = 0; i < Strip<S>::vectors; ++i) columns.v[i] = v[i];
    float x[lane_columns];
    columns.widen(x);
    const u32 amax = block_amax_bits<scale_columns>(x), row_lane = strip.at(0) / Strip<S>::vectors;
    if (!strip.holds(0)) return;
    const BlockScale block = block_scale(amax);
    post_vector(reinterpret_cast<uint4*>(row) + row_lane,
                quantize(x, block.inverse, amax >= infinity_bits));
    if (row_lane % (scale_columns / lane_columns) == 0)
        store_relaxed(
            reinterpret_cast<u32*>(row + S.hidden) + row_lane * lane_columns / scale_columns,
            __float_as_uint(block.scale));
}

// Copies each row to its entry's slot. Two rows are loaded before the first is stored.
template <Shape S>
WEFT_FN void copy_rows(const Strip<S>& strip, const GroupArgs& a, const StripTask& d, u32 left) {
    while (left != 0) {
        uint4 data[2][Strip<S>::vectors];
        u32 choice[2] = {warp_lanes, warp_lanes};
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const u32 k = (__ffs(left) - 1) % warp_lanes;
            const u64 row = u64(u32(__shfl_sync(all_lanes, d.row, k)));
            if (left == 0) continue;
            strip.load(data[i], a.y, row);
            choice[i] = k;
            left &= left - 1;
        }
#pragma unroll
        for (u32 i = 0; i < 2; ++i)
            if (choice[i] < warp_lanes)
                strip.store_row(data[i],
                                dst_addr_of<S>(a.site, d.at.source, d.at.token, choice[i]));
    }
}

// Sends to its owner what a token's experts made here.
template <Shape S> WEFT_FN void send_strip(const GroupArgs& a, const StripTask& d, u32 lane) {
    const Strip<S> strip{d.piece * Strip<S>::warp_vectors, lane};
    const u32 wanted = __ballot_sync(all_lanes, d.row >= 0);
    if constexpr (S.combine == Combine::gemm_push) {
        copy_rows<S>(strip, a, d, wanted);
    } else {
        u8* to = share<S>(a.site, d.at.source).inbox.returned.row[a.site.rank][d.at.token];
        uint4 out[Strip<S>::vectors];
        sum_strip<S>(strip, a.y, d, wanted, out);
        if constexpr (S.combine == Combine::push_fp8)
            store_fp8<S>(strip, out, to);
        else
            strip.store_row(out, to);
    }
}

// Sends all tokens. The indices of the next strip are loaded before this one is sent.
template <Shape S, Grouping G> WEFT_FN void send_tokens(const Block& team, const GroupArgs& a) {
    static_assert(u64(S.tokens) * S.ranks * (S.hidden / 512 + 1) < 1ull << 31, "units are a u32");
    const u32 lane = team.warp_lane(), warps = team.lanes() / warp_lanes;
    u32 max_tokens = 0;
#pragma unroll
    for (u32 source = 0; source < S.ranks; ++source)
        max_tokens = max(max_tokens, tokens_from<S>(own_share<S>(a.site).inbox, source));
    u32 unit = blockIdx.x * warps + team.warp();
    StripTask next = find_task<S, G>(a, unit, lane);
    while (unit < max_tokens * S.ranks * Strip<S>::pieces) {
        const StripTask d = next;
        unit += gridDim.x * warps;
        next = find_task<S, G>(a, unit, lane);
        if (__any_sync(all_lanes, d.entry.group != no_group)) send_strip<S>(a, d, lane);
    }
}

template <Shape S, Grouping G> WEFT_FN void send(const GroupArgs& a) {
    const Block team;
    Header& header = own_share<S>(a.site).header;
    griddep_wait();
    launch_dependents();
    const EpochState state = header.state;
    if (state.failed != 0) return;
    mark_start(team, header, Phase::combine, state.epoch, team.lane() == 0 ? now_ns() : 0);
    if (fault(header, Point::combine_enter, a.site.rank, state.epoch) == Action::stay_away) return;
    send_tokens<S, G>(team, a);
    if (!team.is_last_cta(a.arrived)) return;
    publish<S>(team, a.site, Phase::combine, state.epoch, 0);
}

}  // namespace weft
