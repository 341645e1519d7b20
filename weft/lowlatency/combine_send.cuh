// The senders of a low-latency combine: experts' rows to the owners of their tokens, each by
// itself, or what this rank's experts made of a token as one. A warp sends 512 columns.
#pragma once
#include <weft/lowlatency/arrival.cuh>

namespace weft {

// The rows of a token that this rank's experts made, as a warp sees them: lane k has the k-th
// choice's place, or -1.
template <LowShape S> struct Errand {
    u32 source, token, part;
    u32 position, brought;  // as they were loaded
    float weight;

    static constexpr u32 turns = S.hidden / lane_columns;
    static constexpr u32 units = (turns + warp_lanes - 1) / warp_lanes;  // of a row

    WEFT_FN static Errand of(const LowCombineArgs& a, u32 unit) {
        const u32 lane = threadIdx.x % warp_lanes, slot = unit / units;
        Errand errand{.source = (slot + a.site.rank) % S.ranks,
                      .token = slot / S.ranks,
                      .part = unit % units,
                      .position = ~0u,
                      .brought = 0,
                      .weight = 1.0f};
        if (lane >= S.top_k || errand.token >= S.tokens) return errand;
        const u64 at = (u64(errand.source) * S.tokens + errand.token) * S.top_k + lane;
        errand.position = load_early(a.ledger.position + at);
        errand.brought = load_early(a.ledger.brought + errand.source);
        if constexpr (S.reduce == Reduce::sender)
            errand.weight = __uint_as_float(load_early(a.ledger.weights + at));
        return errand;
    }
    // Behind what was brought, positions are of earlier dispatches.
    WEFT_FN bool is_mine() const { return token < brought && i32(position) >= 0; }
};

// This warp's columns of one row of an expert's results.
template <LowShape S> WEFT_FN Columns<S.number> load_columns(const void* rows, u32 row, u32 part) {
    constexpr u32 vectors = S.out_bytes() / 16;
    Columns<S.number> columns{};
    const uint4* from = static_cast<const uint4*>(rows) + u64(row) * vectors;
#pragma unroll
    for (u32 i = 0; i < Columns<S.number>::vectors; ++i) {
        const u32 at = vector_of<S.number, S.fp8_back>(part, i);
        if (at < vectors) columns.v[i] = load_input(from + at);
    }
    return columns;
}

// Calls visit(choice, columns) for the choices of a token that are this rank's, in top-k order.
// Several rows are asked for before the first is looked at: a rank often has more than one.
template <LowShape S, class Visit>
WEFT_FN void for_choices(const LowCombineArgs& a, const Errand<S>& errand, u32 mine,
                         const Visit& visit) {
    // What is summed or quantised needs registers of its own.
    constexpr u32 vectors = S.fp8_back || S.reduce == Reduce::sender ? 4 : 8;
    constexpr u32 together = vectors / Columns<S.number>::vectors;
    while (mine != 0) {
        u32 choice[together];
        Columns<S.number> columns[together];
#pragma unroll
        for (u32 i = 0; i < together; ++i) {
            choice[i] = u32(__ffs(i32(mine)) - 1);
            if (mine == 0) continue;
            mine &= mine - 1;
            const u32 position = __shfl_sync(all_lanes, errand.position, choice[i]);
            columns[i] = load_columns<S>(a.y, position, errand.part);
        }
#pragma unroll
        for (u32 i = 0; i < together; ++i)
            if (choice[i] < warp_lanes) visit(choice[i], columns[i]);
    }
}

// Sixteen columns of a lane as FP8, eight lanes a block; all lanes of the warp take part. Behind
// the last scale nothing is written: nobody waits for those words at home, so one could come when
// the row has been taken, and then stand where the next dispatch's row belongs.
template <LowShape S>
WEFT_FN void send_fp8_home(u8* row, u32 part, const float (&x)[lane_columns]) {
    const u32 amax = block_amax_bits<scale_columns>(x),
              v = part * warp_lanes + threadIdx.x % warp_lanes;
    if (v >= S.hidden / lane_columns) return;
    const BlockScale scale = block_scale(amax);
    constexpr u32 lanes = scale_columns / lane_columns;
    post_vector(reinterpret_cast<uint4*>(row) + v,
                quantize(x, scale.inverse, amax >= infinity_bits));
    if (v % lanes == 0)
        store_relaxed(reinterpret_cast<u32*>(row + S.hidden) + v / lanes,
                      __float_as_uint(scale.scale));
}

template <LowShape S>
WEFT_FN void send_plain_home(u8* row, u32 part, const Columns<S.number>& columns) {
#pragma unroll
    for (u32 i = 0; i < Columns<S.number>::vectors; ++i) {
        const u32 at = vector_of<S.number, false>(part, i);
        if (at < S.out_bytes() / 16)
            post_vector(reinterpret_cast<uint4*>(row) + at, canonical<S.number>(columns.v[i]));
    }
}

// Every row of a token by itself.
template <LowShape S>
WEFT_FN void send_choices(const LowCombineArgs& a, const Errand<S>& errand, u32 mine) {
    LowInbox<S>& home = low_share<S>(a.site, errand.source).inbox;
    for_choices<S>(a, errand, mine, [&](u32 k, const Columns<S.number>& columns) {
        u8* row = home.back_row(errand.token, k);
        if constexpr (S.fp8_back) {
            float x[lane_columns];
            columns.widen(x);
            send_fp8_home<S>(row, errand.part, x);
        } else {
            send_plain_home<S>(row, errand.part, columns);
        }
    });
}

// All rows of a token that are this rank's, as one: weighted, in top-k order, in fp32.
template <LowShape S>
WEFT_FN void send_sum(const LowCombineArgs& a, const Errand<S>& errand, u32 mine) {
    float sum[lane_columns] = {};
    for_choices<S>(a, errand, mine, [&](u32 k, const Columns<S.number>& columns) {
        const float weight = __shfl_sync(all_lanes, errand.weight, k);
        float x[lane_columns];
        columns.widen(x);
#pragma unroll
        for (u32 i = 0; i < lane_columns; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, x[i]));
    });
    u8* row = low_share<S>(a.site, errand.source).inbox.back_row(errand.token, a.site.rank);
    if constexpr (S.fp8_back) {
        send_fp8_home<S>(row, errand.part, sum);
    } else {
        constexpr u32 width = numbers_in_vector(S.number);
        Columns<S.number> columns;
#pragma unroll
        for (u32 i = 0; i < lane_columns / width; ++i)
            columns.v[i] =
                round_vector<S.number>(reinterpret_cast<const float (&)[width]>(sum[i * width]));
        send_plain_home<S>(row, errand.part, columns);
    }
}

// Tokens of the source that brought most.
template <LowShape S> WEFT_FN u32 most_brought(const LowCombineArgs& a) {
    u32 most = 0;
#pragma unroll
    for (u32 source = 0; source < S.ranks; ++source)
        most = max(most, u32(a.ledger.brought[source]));
    return most;
}

template <LowShape S>
WEFT_FN void send_back(const LowCombineArgs& a, Turns turns, Errand<S> errand, Diary& diary) {
    u32 unit = turns.first, end = 0;
    do {
        const Errand<S> next = Errand<S>::of(a, unit + turns.step);
        const u32 mine = __ballot_sync(all_lanes, errand.is_mine());
        if (mine != 0) {
            if constexpr (S.reduce == Reduce::sender)
                send_sum<S>(a, errand, mine);
            else
                send_choices<S>(a, errand, mine);
            diary.worked();
        }
        errand = next;
        unit += turns.step;
        // Not before the first rows are on their way.
        if (end == 0) end = max(1u, most_brought<S>(a)) * S.ranks * Errand<S>::units;
    } while (unit < end);
}

}  // namespace weft
