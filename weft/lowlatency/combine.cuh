// Low-latency combine: experts' rows go straight to the owners of their tokens, who add them as
// they come, in top-k order. Or each rank first adds what its own experts made of a token, and one
// row of each rank goes home. One launch, or two halves; a warp is the unit of work.
#pragma once
#include <weft/lowlatency/combine_send.cuh>

namespace weft {

constexpr u32 awaited_rows = 8;  // of one token, in each lane

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
            if (at % lanes == 0 && scale == sentinel) return false;
        return is_ready(v);
    }
    WEFT_FN void blank(u8* row, u32 at) const {
        restore_sentinel(reinterpret_cast<uint4*>(row) + at);
        if constexpr (S.fp8_back)
            if (at % lanes == 0) store_relaxed(scale_at(row, at), sentinel);
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
        const Wait wait{peer, Phase::combine, wanted, epoch_before(wanted)};
        const bool lasts = left == 0 || patience.lasts(own.header, a.site, wait);
        if (!__all_sync(all_lanes, lasts)) return false;
        const u32 next = asked_next(left, a.tokens);
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
    if (S.homes || peer >= S.ranks) return;
    if (part != Part::receive && team.warp() == 2 &&
        await_grant<S>(a.site, standing.progress, Phase::combine, peer))
        send_answer<S>(a, wanted, peer);
    if (part != Part::send && team.warp() == 3) same_answer<S>(a, wanted, peer);
}

// By the herald: a product that comes again before the next dispatch has nowhere to store.
template <LowShape S> WEFT_FN void forget_homes(const Block& team, const LowCombineArgs& a) {
    const u32 warps = team.lanes() / warp_lanes;
    for (u32 e = team.warp(); e < a.own_experts; e += warps)
        for (u32 row = team.warp_lane(); row < min(u32(a.counts[e]), S.rows()); row += warp_lanes)
            a.ledger.home[u64(e) * S.rows() + row] = 0;
}

template <LowShape S, Part part = Part::whole> WEFT_FN void low_combine(const LowCombineArgs& a) {
    __shared__ Track page;
    const Block team;
    LowShare<S>& own = own_share<S>(a.site);
    const Crew crew{0, S.homes || part == Part::receive ? 0 : a.senders};
    wait_for_predecessor();
    admit_successor();
    const Standing standing = Standing::read<S>(own);
    Errand<S> errand{};
    if (crew.sends()) errand = Errand<S>::of(a, crew.of_senders().first);
    const u64 start = start_of(team, crew);
    const u64 done =
        part == Part::receive ? standing.progress.combined : standing.progress.returned;
    const u64 wanted = (done + 1) & epoch_mask;
    Diary diary(team, page, !crew.heralds(), start);
    u64 end = 0;

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
        if constexpr (S.homes) forget_homes<S>(team, a);
    } else if (crew.sends()) {
        send_back<S>(a, crew.of_senders(), errand, diary);
        count();
    } else {
        fault(own.header, Point::before_read, a.site.rank, wanted);
        if (!sum_tokens<S>(a, wanted, crew.of_takers(), diary)) return;
        if (crew.takes_first() && team.lane() == 0) {
            end = keep_record(own.header, Phase::combine, wanted, start, a.tokens);
            mark_end(own.header, Phase::combine, wanted, end);
        }
    }
    diary.ended(team, a.tracks, Phase::combine, wanted, crew.role(), blockIdx.x, end);
}

}  // namespace weft
