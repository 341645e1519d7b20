// Low-latency combine: experts' rows go straight to the owners of their tokens, who add them as
// they come, in top-k order. Or each rank first adds what its own experts made of a token, and one
// row of each rank goes home. One launch, or two halves; a warp is the unit of work.
#pragma once
#include <weft/kernels/arrival.cuh>

namespace weft {

constexpr u32 awaited_rows = 8;  // of one token, in each lane

// The rows of a token that this rank's experts made, as a warp sees them: lane k has the k-th
// choice's place, or -1.
template <LowShape S> struct Errand {
    u32 source, token, v;
    u32 position, brought;  // as they were loaded
    float weight;

    static constexpr u32 turns = S.hidden / lane_columns;
    static constexpr u32 units = (turns + warp_lanes - 1) / warp_lanes;  // of a row

    WEFT_FN static Errand of(const LowCombineArgs& a, u32 unit) {
        const u32 lane = threadIdx.x % warp_lanes, slot = unit / units;
        Errand errand{.source = (slot + a.site.rank) % S.ranks,
                      .token = slot / S.ranks,
                      .v = unit % units * warp_lanes + lane,
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

template <LowShape S> WEFT_FN Columns<S.number> load_columns(const void* rows, u32 row, u32 v) {
    constexpr u32 width = Columns<S.number>::vectors;
    Columns<S.number> columns{};
    const uint4* from = static_cast<const uint4*>(rows) + u64(row) * (S.out_bytes() / 16);
    if (v < S.hidden / lane_columns)
#pragma unroll
        for (u32 i = 0; i < width; ++i) columns.v[i] = load_input(from + v * width + i);
    return columns;
}

// Sixteen columns of a lane as FP8, eight lanes a block; all lanes of the warp take part. Behind
// the last scale nothing is written: nobody waits for those words at home, so one could come when
// the row has been taken, and then stand where the next dispatch's row belongs.
template <LowShape S> WEFT_FN void send_fp8_home(u8* row, u32 v, const float (&x)[lane_columns]) {
    const u32 amax = block_amax_bits<scale_columns>(x);
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
WEFT_FN void send_plain_home(u8* row, u32 v, const Columns<S.number>& columns) {
    constexpr u32 width = Columns<S.number>::vectors;
    if (v >= S.hidden / lane_columns) return;
#pragma unroll
    for (u32 i = 0; i < width; ++i)
        post_vector(reinterpret_cast<uint4*>(row) + v * width + i,
                    presentable<S.number>(columns.v[i]));
}

// Every row of a token by itself.
template <LowShape S>
WEFT_FN void send_choices(const LowCombineArgs& a, const Errand<S>& errand, u32 mine) {
    LowInbox<S>& home = low_share<S>(a.site, errand.source).inbox;
    for (u32 left = mine; left != 0; left &= left - 1) {
        const u32 k = u32(__ffs(i32(left)) - 1);
        const u32 position = __shfl_sync(all_lanes, errand.position, k);
        const Columns<S.number> columns = load_columns<S>(a.y, position, errand.v);
        u8* row = home.back_row(errand.token, k);
        if constexpr (S.fp8_back) {
            float x[lane_columns];
            columns.widen(x);
            send_fp8_home<S>(row, errand.v, x);
        } else {
            send_plain_home<S>(row, errand.v, columns);
        }
    }
}

// All rows of a token that are this rank's, as one: weighted, in top-k order, in fp32.
template <LowShape S>
WEFT_FN void send_sum(const LowCombineArgs& a, const Errand<S>& errand, u32 mine) {
    float sum[lane_columns] = {};
    for (u32 left = mine; left != 0; left &= left - 1) {
        const u32 k = u32(__ffs(i32(left)) - 1);
        const u32 position = __shfl_sync(all_lanes, errand.position, k);
        const float weight = __shfl_sync(all_lanes, errand.weight, k);
        float x[lane_columns];
        load_columns<S>(a.y, position, errand.v).widen(x);
#pragma unroll
        for (u32 i = 0; i < lane_columns; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, x[i]));
    }
    u8* row = low_share<S>(a.site, errand.source).inbox.back_row(errand.token, a.site.rank);
    if constexpr (S.fp8_back) {
        send_fp8_home<S>(row, errand.v, sum);
    } else {
        constexpr u32 width = numbers_in_vector(S.number);
        Columns<S.number> columns;
#pragma unroll
        for (u32 i = 0; i < lane_columns / width; ++i)
            columns.v[i] =
                round_vector<S.number>(reinterpret_cast<const float (&)[width]>(sum[i * width]));
        send_plain_home<S>(row, errand.v, columns);
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

// One lane's columns of one row that comes home.
template <LowShape S> struct Piece {
    uint4 v;
    u32 scale;  // of its block, in the block's first lane

    static constexpr u32 columns = S.fp8_back ? lane_columns : numbers_in_vector(S.number);
    static constexpr u32 turns = S.hidden / columns;
    static constexpr u32 units = (turns + warp_lanes - 1) / warp_lanes;  // of a token
    static constexpr u32 lanes = scale_columns / lane_columns;

    WEFT_FN static u32* scale_at(u8* row, u32 at) {
        return reinterpret_cast<u32*>(row + S.hidden) + at / lanes;
    }
    WEFT_FN void load(u8* row, u32 at) {
        v = poll_vector(reinterpret_cast<const uint4*>(row) + at);
        if constexpr (S.fp8_back)
            if (at % lanes == 0) scale = load_relaxed(scale_at(row, at));
    }
    WEFT_FN bool came(u32 at) const {
        if constexpr (S.fp8_back)
            if (at % lanes == 0 && scale == absent) return false;
        return has_come(v);
    }
    WEFT_FN void blank(u8* row, u32 at) const {
        leave_blank(reinterpret_cast<uint4*>(row) + at);
        if constexpr (S.fp8_back)
            if (at % lanes == 0) store_relaxed(scale_at(row, at), absent);
    }
    // All lanes of the warp take part.
    WEFT_FN void add_to(float (&sum)[columns], float weight) const {
        float x[columns] = {};
        if constexpr (S.fp8_back) {
            const float block = __uint_as_float(
                __shfl_sync(all_lanes, scale, threadIdx.x % warp_lanes / lanes * lanes));
            add_e4m3(x, v, block);
        } else {
            add_vector<S.number>(x, v);
        }
#pragma unroll
        for (u32 i = 0; i < columns; ++i) {
            const float part = S.reduce == Reduce::sender ? x[i] : __fmul_rn(weight, x[i]);
            sum[i] = __fadd_rn(sum[i], part);
        }
    }
};

// Rows first .. first + 7 of a token, those in `expected`: waits for them, leaves their places
// blank, adds them. False when one does not come.
template <LowShape S, u32 n>
WEFT_FN bool add_rows(const LowCombineArgs& a, u64 wanted, u32 token, u32 at, u32 first,
                      u32 expected, float lane_weight, float (&sum)[n], Diary& diary) {
    constexpr u32 count = S.back_rows() < awaited_rows ? S.back_rows() : awaited_rows;
    LowShare<S>& own = own_share<S>(a.site);
    const bool valid = at < Piece<S>::turns;
    Piece<S> piece[count];
#pragma unroll
    for (u32 i = 0; i < count; ++i)
        if (valid && (expected >> (first + i) & 1))
            piece[i].load(own.inbox.back_row(token, first + i), at);
    const auto missing = [&] {
        u32 found = 0;
#pragma unroll
        for (u32 i = 0; i < count; ++i)
            if (valid && (expected >> (first + i) & 1) && !piece[i].came(at)) found |= 1u << i;
        return found;
    };
    const auto ask = [&](u32 which) {
#pragma unroll
        for (u32 i = 0; i < count; ++i)
            if (which >> i & 1) piece[i].load(own.inbox.back_row(token, first + i), at);
    };
    Patience patience;
    const u64 since = diary.waits();
    for (u32 left = missing(); !__all_sync(all_lanes, left == 0); left = missing()) {
        u32 peer = a.site.rank;
        if (left != 0 && patience.is_asked_next())
            peer = missing_rank<S>(a, token, first + u32(__ffs(i32(left)) - 1));
        const Wait wait{peer, Phase::combine, wanted, wanted};
        const bool lasts = left == 0 || patience.lasts(own.header, a.site, wait);
        if (!__all_sync(all_lanes, lasts)) return false;
        const u32 next = a.tokens > few_tokens ? left & (0u - left) : left;
        ask(next);
        if (next != left && missing() != left) ask(missing());
    }
    diary.waited(since, a.site.rank);
#pragma unroll
    for (u32 i = 0; i < count; ++i)
        if (expected >> (first + i) & 1) {
            const float weight = __shfl_sync(all_lanes, lane_weight, first + i);
            if (valid) piece[i].blank(own.inbox.back_row(token, first + i), at);
            piece[i].add_to(sum, weight);
        }
    return true;
}

// out[token] = its rows in order, weighted, in fp32, then `add`, rounded once: one warp's columns.
template <LowShape S>
WEFT_FN bool sum_columns(const LowCombineArgs& a, u64 wanted, u32 token, u32 unit, Diary& diary) {
    constexpr u32 width = numbers_in_vector(S.number), parts = Piece<S>::columns / width;
    const u32 lane = threadIdx.x % warp_lanes;
    const u32 at = unit % Piece<S>::units * warp_lanes + lane;
    const u32 expected = a.ledger.expected[2 * token + (S.reduce == Reduce::sender)];
    float weight = 1.0f;
    if (S.reduce == Reduce::receiver && a.weights != nullptr && lane < S.top_k)
        weight = a.weights[u64(token) * S.top_k + lane];
    float sum[Piece<S>::columns] = {};
#pragma unroll
    for (u32 first = 0; first < S.back_rows(); first += awaited_rows)
        if (!add_rows<S>(a, wanted, token, at, first, expected, weight, sum, diary)) return false;
    if (at >= Piece<S>::turns) return true;
    const u64 vector = u64(token) * (S.out_bytes() / 16) + at * parts;
#pragma unroll
    for (u32 i = 0; i < parts; ++i) {
        float (&part)[width] = reinterpret_cast<float (&)[width]>(sum[i * width]);
        if (a.add != nullptr)
            add_vector<S.number>(part, load_input(static_cast<const uint4*>(a.add) + vector + i));
        static_cast<uint4*>(a.out)[vector + i] = round_vector<S.number>(part);
    }
    return true;
}

template <LowShape S>
WEFT_FN bool sum_tokens(const LowCombineArgs& a, u64 wanted, Turns turns, Diary& diary) {
    constexpr u32 units = Piece<S>::units;
    for (u32 unit = turns.first; unit < a.tokens * units; unit += turns.step) {
        if (!sum_columns<S>(a, wanted, unit / units, unit, diary)) return false;
        diary.worked();
    }
    return true;
}

// What the herald does besides granting: do all ranks combine the same dispatch? A warp says which
// one it is here, another hears the peers.
template <LowShape S, Part part>
WEFT_FN void compare_answers(const Block& team, const LowCombineArgs& a, const Standing& standing,
                             u64 wanted) {
    const u32 peer = team.warp_lane();
    if (peer >= S.ranks) return;
    if (part != Part::receive && team.warp() == 2 &&
        await_grant<S>(a.site, standing.progress, Phase::combine, peer))
        send_answer<S>(a, wanted, peer);
    if (part != Part::send && team.warp() == 3) same_answer<S>(a, wanted, peer);
}

template <LowShape S, Part part = Part::whole> WEFT_FN void low_combine(const LowCombineArgs& a) {
    __shared__ Track page;
    const Block team;
    LowShare<S>& own = own_share<S>(a.site);
    const Crew crew{0, part == Part::receive ? 0 : a.senders};
    wait_for_predecessor();
    admit_successor();
    const Standing standing = Standing::read<S>(own);
    Errand<S> errand{};
    if (crew.sends()) errand = Errand<S>::of(a, crew.of_senders().first);
    const u64 start = start_of(team, crew);
    const u64 done =
        part == Part::receive ? standing.progress.combined : standing.progress.returned;
    const u64 wanted = (done + 1) & epoch_mask;
    Diary diary(team, page, !crew.heralds());

    if constexpr (part != Part::receive) {
        const Action planned = fault(own.header, Point::combine_enter, a.site.rank, wanted);
        if (planned == Action::stay_away) return;
    }
    if (crew.sends()) fault(own.header, Point::before_ready, a.site.rank, wanted);
    if (!standing.admitted<S>(team, a.site, Phase::combine, crew.sends())) return;
    diary.granted();
    // Whoever sends counts itself behind that.
    const auto count = [&] {
        if (team.lane() != team.lanes() - 1 || !counts_last(own.header)) return;
        if constexpr (part != Part::receive) own.progress.returned = wanted;
        if constexpr (part != Part::send) own.progress.combined = wanted;
    };
    if (!crew.sends()) count();
    if (crew.heralds()) {
        grant_all<S>(team, a.site, standing.progress);
        if constexpr (part != Part::receive)
            mark_start(team, own.header, Phase::combine, wanted, start);
        compare_answers<S, part>(team, a, standing, wanted);
    } else if (crew.sends()) {
        send_back<S>(a, crew.of_senders(), errand, diary);
        count();
    } else {
        fault(own.header, Point::before_read, a.site.rank, wanted);
        if (!sum_tokens<S>(a, wanted, crew.of_takers(), diary)) return;
        if (crew.takes_first() && team.lane() == 0) {
            keep_record(own.header, Phase::combine, wanted, start, a.tokens);
            mark_end(own.header, Phase::combine, wanted);
        }
    }
    diary.ended(team, a.tracks, Phase::combine, wanted, crew.role(), blockIdx.x);
}

}  // namespace weft
