// Low-latency combine on a CPU.
#pragma once
#include <cstring>

#include <weft/lowlatency/dispatch_cpu.hpp>

namespace weft {

// The row of one choice, or of all choices of one token that are mine, as it goes home.
template <LowShape S>
void make_row(const LowCombineArgs& a, const i32* position, const float* weights, u32 choices,
              u8* row) {
    const u8* y = static_cast<const u8*>(a.y);
    if constexpr (S.reduce == Reduce::receiver && !S.fp8_back) {
        present_row<S>(row, y + u64(position[__builtin_ctz(choices)]) * S.out_bytes());
    } else {
        float sum[S.hidden] = {};
        for (u32 left = choices; left != 0; left &= left - 1) {
            const u32 k = u32(__builtin_ctz(left));
            float x[S.hidden];
            read_block<S.number>(x, y + u64(position[k]) * S.out_bytes(), 0);
            for (u32 i = 0; i < S.hidden; ++i)
                sum[i] = S.reduce == Reduce::sender ? sum[i] + weights[k] * x[i] : x[i];
        }
        if constexpr (S.fp8_back) {
            quantize_numbers<S, scale_columns, true>(row, sum);
        } else {
            Bits<S.number> rounded[S.hidden];
            for (u32 i = 0; i < S.hidden; ++i) rounded[i] = narrow<S.number>(sum[i]);
            present_row<S>(row, reinterpret_cast<const u8*>(rounded));
        }
    }
}

template <LowShape S> bool send_back(const LowCombineArgs& a, const Progress& progress) {
    const u64 wanted = (progress.returned + 1) & epoch_mask;
    Track page;
    Diary diary(Solo{}, page, true);
    if (!await_grants<S>(a.site, progress, Phase::combine)) return false;
    diary.granted();
    for (u32 peer = 0; peer < S.ranks; ++peer) send_answer<S>(a, wanted, peer);
    alignas(16) u8 row[S.back_vectors() * 16] = {};
    for (u32 i = 0; i < S.ranks; ++i) {
        const u32 source = (a.site.rank + i) % S.ranks;
        LowInbox<S>& home = low_share<S>(a.site, source).inbox;
        for (u32 token = 0; token < u32(a.ledger.brought[source]); ++token) {
            const u64 slot = (u64(source) * S.tokens + token) * S.top_k;
            const i32* position = a.ledger.position + slot;
            const float* weights = a.ledger.weights + slot;
            u32 mine = 0;
            for (u32 k = 0; k < S.top_k; ++k) mine |= u32(position[k] >= 0) << k;
            for (u32 left = mine; left != 0; left &= left - 1) {
                const u32 which =
                    S.reduce == Reduce::sender ? a.site.rank : u32(__builtin_ctz(left));
                const u32 choices = S.reduce == Reduce::sender ? left : left & -left;
                make_row<S>(a, position, weights, choices, row);
                send_words(home.back_row(token, which), row, sizeof(row));
                diary.worked();
                if (S.reduce == Reduce::sender) break;
            }
        }
    }
    diary.ended(Solo{}, a.tracks, Phase::combine, wanted, 1, 0, profiled_now());
    return true;
}

// Adds one row that has come home.
template <LowShape S> void add_home(float (&sum)[S.hidden], const u8* row, float weight) {
    float x[S.hidden];
    if constexpr (S.fp8_back) {
        const float* scale = reinterpret_cast<const float*>(row + S.hidden);
        for (u32 i = 0; i < S.hidden; ++i) x[i] = from_e4m3(row[i]) * scale[i / scale_columns];
    } else {
        read_block<S.number>(x, row, 0);
    }
    for (u32 i = 0; i < S.hidden; ++i)
        sum[i] = S.reduce == Reduce::sender ? sum[i] + x[i] : sum[i] + weight * x[i];
}

// out[token] = its rows in order, weighted, in fp32, then `add`, rounded once.
template <LowShape S> bool sum_token(const LowCombineArgs& a, u64 wanted, u32 token) {
    LowShare<S>& own = own_share<S>(a.site);
    const u32 expected = a.ledger.expected[2 * token + (S.reduce == Reduce::sender)];
    float sum[S.hidden] = {};
    for (u32 left = expected; left != 0; left &= left - 1) {
        const u32 which = u32(__builtin_ctz(left));
        alignas(16) u8 row[S.back_vectors() * 16];
        const Wait wait{missing_rank<S>(a, token, which), Phase::combine, wanted,
                        epoch_before(wanted)};
        if (!take_words(own.header, a.site, wait, own.inbox.back_row(token, which), row,
                        sizeof(row)))
            return false;
        const u64 at = u64(token) * S.top_k + which;
        add_home<S>(sum, row, S.reduce == Reduce::receiver && a.weights ? a.weights[at] : 1.0f);
    }
    using Element = Bits<S.number>;
    if (a.add) add_block<S.number>(sum, static_cast<const Element*>(a.add) + u64(token) * S.hidden);
    Element* out = static_cast<Element*>(a.out) + u64(token) * S.hidden;
    for (u32 i = 0; i < S.hidden; ++i) out[i] = narrow<S.number>(sum[i]);
    return true;
}

// A product that comes again before the next dispatch has nowhere to store.
template <LowShape S> void forget_homes(const LowCombineArgs& a) {
    for (u32 e = 0; e < a.own_experts; ++e)
        for (u32 row = 0; row < u32(a.counts[e]); ++row) a.ledger.home[u64(e) * S.rows() + row] = 0;
}

template <LowShape S, Part part = Part::whole> void low_combine(const LowCombineArgs& a) {
    LowShare<S>& own = own_share<S>(a.site);
    const Progress progress = own.progress;
    if (own.header.turn.failed != 0) return;
    const u64 start = now_ns();
    const u64 wanted =
        ((part == Part::receive ? progress.combined : progress.returned) + 1) & epoch_mask;
    grant_all<S>(a.site, progress);
    if constexpr (part != Part::receive) {
        mark_start(Solo{}, own.header, Phase::combine, wanted, start);
        if (fault(own.header, Point::combine_enter, a.site.rank, wanted) == Action::stay_away)
            return;
        fault(own.header, Point::before_ready, a.site.rank, wanted);
        if constexpr (S.homes)
            forget_homes<S>(a);
        else if (!send_back<S>(a, progress))
            return;
        own.progress.returned = wanted;
    }
    if constexpr (part != Part::send) {
        fault(own.header, Point::before_read, a.site.rank, wanted);
        for (u32 peer = 0; !S.homes && peer < S.ranks; ++peer)
            if (!same_answer<S>(a, wanted, peer)) return;
        Track page;
        Diary diary(Solo{}, page, true);
        for (u32 token = 0; token < a.tokens; ++token, diary.worked())
            if (!sum_token<S>(a, wanted, token)) return;
        diary.ended(Solo{}, a.tracks, Phase::combine, wanted, 2, 1, profiled_now());
        own.progress.combined = wanted;
        keep_record(own.header, Phase::combine, wanted, start, a.tokens);
        mark_end(own.header, Phase::combine, wanted);
    }
}

}  // namespace weft
