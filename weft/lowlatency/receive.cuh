// The takers of a low-latency dispatch: rows out of the inbox, as they come, into their places by
// expert. A warp takes 2 KiB of a row at a time.
#pragma once
#include <weft/lowlatency/arrival.cuh>

namespace weft {

constexpr u32 taken_vectors = 4;  // of a row, in each lane

constexpr u32 told_together = 4;  // words that a thread asks for at once

// Where each source's rows of each expert begin, chunk by chunk of its tokens; and the bits of the
// chunks, where there is room. Where there is not, entries are kept for spans of chunks, and bits
// are read again from the inbox.
template <LowShape S> struct TakeScratch {
    static constexpr u32 most_entries = 8192, most_bits = 3072;  // 44 KiB
    static constexpr u32 pairs = S.ranks * S.local;
    static constexpr u32 fitting = most_entries / pairs > 0 ? most_entries / pairs : 1;
    static constexpr u32 span = (S.chunks() + fitting - 1) / fitting;
    static constexpr u32 entries = (S.chunks() + span - 1) / span;
    static constexpr bool holds_bits = S.chunks() * pairs <= most_bits;

    u32 first[S.ranks][entries][S.local];
    u32 bits[holds_bits ? S.ranks : 1][holds_bits ? S.chunks() : 1][S.local];
    u32 tokens[S.ranks];

    WEFT_FN u32 bits_of(LowInbox<S>& inbox, u32 source, u32 chunk, u32 e) const {
        if constexpr (holds_bits) return bits[source][chunk][e];
        return value_of(load_relaxed(&inbox.chosen[source][chunk][e]));
    }
};

// How many tokens a source brings, and with it the first of its words on one of my experts: asked
// for together, because they come together. False when they do not.
template <LowShape S>
WEFT_FN bool hear_first(const LowDispatchArgs& a, u64 wanted, u32 source, u32 e, u32& tokens,
                        u64& word) {
    LowShare<S>& own = own_share<S>(a.site);
    Patience patience;
    for (;;) {
        const u64 said = load_relaxed(&own.inbox.tokens[source]);
        word = load_relaxed(&own.inbox.chosen[source][0][e]);
        tokens = believed<S>(value_of(said));
        const bool alone = tokens == 0 || a.own_experts == 0;
        const bool heard = is_of(said, wanted);
        if (heard && (alone || is_of(word, wanted))) return true;
        const u64 seen = epoch_in(heard ? word : said, wanted);
        const Wait wait{source, Phase::dispatch, wanted, seen};
        if (!patience.lasts(own.header, a.site, wait)) return false;
    }
}

// One source's rows of one of my experts, as it tells them: in the first entry how many, in the
// others where they begin among its own. By one thread; false when a word does not come.
template <LowShape S>
WEFT_FN bool hear_chosen(const LowDispatchArgs& a, u64 wanted, u32 source, u32 e,
                         TakeScratch<S>& scratch) {
    LowShare<S>& own = own_share<S>(a.site);
    const auto at = [&](u32 chunk) { return &own.inbox.chosen[source][chunk][e]; };
    u64 word[told_together] = {};
    u32 tokens = 0, total = 0;
#pragma unroll
    for (u32 j = 1; j < told_together; ++j)
        if (j < S.chunks()) word[j] = load_relaxed(at(j));
    if (!hear_first<S>(a, wanted, source, e, tokens, word[0])) return false;
    const u32 chunks = a.own_experts == 0 ? 0 : chunks_of(tokens);
    for (u32 c = 0; c < chunks; c += told_together) {
        if (c != 0)
#pragma unroll
            for (u32 j = 0; j < told_together; ++j)
                if (c + j < chunks) word[j] = load_relaxed(at(c + j));
#pragma unroll
        for (u32 j = 0; j < told_together; ++j) {
            if (c + j >= chunks) break;
            u32 bits = value_of(word[j]);
            if (!is_of(word[j], wanted) &&
                !await_tagged(own.header, a.site, Phase::dispatch, at(c + j), source, wanted, bits))
                return false;
            bits &= valid_bits(tokens, c + j);
            if constexpr (TakeScratch<S>::holds_bits) scratch.bits[source][c + j][e] = bits;
            if ((c + j) % TakeScratch<S>::span == 0)
                scratch.first[source][(c + j) / TakeScratch<S>::span][e] = total;
            total += bits_in(bits);
        }
    }
    scratch.first[source][0][e] = total;
    if (e == 0) scratch.tokens[source] = tokens;
    return true;
}

template <LowShape S>
WEFT_FN bool hear_all(const Block& team, const LowDispatchArgs& a, u64 wanted, bool leads,
                      TakeScratch<S>& scratch) {
    if (leads && team.lane() < S.ranks)
        fault(own_share<S>(a.site).header, Point::before_poll, team.lane(), wanted);
    bool came = true;
    // A rank without experts still hears how many tokens there are.
    const u32 told = max(1u, a.own_experts);
    for (u32 i = team.lane(); came && i < S.ranks * told; i += team.lanes())
        came = hear_chosen<S>(a, wanted, i / told, i % told, scratch);
    return came;
}

// From each source's own numbers to places among all: rows stand by source, then token.
template <LowShape S>
WEFT_FN void lay_out(const Block& team, const LowDispatchArgs& a, bool leads,
                     TakeScratch<S>& scratch) {
    constexpr u32 span = TakeScratch<S>::span;
    for (u32 e = team.lane(); e < a.own_experts; e += team.lanes()) {
        u32 total = 0;
        for (u32 source = 0; source < S.ranks; ++source) {
            const u32 rows = scratch.first[source][0][e];
            const u32 entries = (chunks_of(scratch.tokens[source]) + span - 1) / span;
            scratch.first[source][0][e] = total;
            for (u32 i = 1; i < entries; ++i) scratch.first[source][i][e] += total;
            if (leads) {
                a.ranges[2 * (e * S.ranks + source)] = i32(total);
                a.ranges[2 * (e * S.ranks + source) + 1] = i32(rows);
            }
            total += rows;
        }
        if (leads) a.counts[e] = i32(total);
    }
    if (leads && team.lane() < S.ranks)
        a.ledger.brought[team.lane()] = i32(scratch.tokens[team.lane()]);
    __syncthreads();
}

template <LowShape S>
WEFT_FN Seat find_seat(const LowDispatchArgs& a, const TakeScratch<S>& scratch, u32 source,
                       u32 token, u32 choice) {
    constexpr u32 span = TakeScratch<S>::span;
    LowInbox<S>& inbox = own_share<S>(a.site).inbox;
    const i32 expert = local_of(choice, a.own_experts);
    if (expert < 0) return {-1, 0};
    const u32 e = u32(expert), chunk = token / chunk_tokens;
    u32 first = scratch.first[source][chunk / span][e];
    for (u32 c = chunk / span * span; c < chunk; ++c)
        first += bits_in(scratch.bits_of(inbox, source, c, e));
    const Seat seat = seat_of(expert, token, first, scratch.bits_of(inbox, source, chunk, e));
    return seat.row < S.rows() ? seat : Seat{-1, 0};
}

// One warp's part of one row that may come.
template <LowShape S> struct Taken {
    uint4 v[taken_vectors];
    u64 word;  // lane k: the k-th choice

    static constexpr u32 span = warp_lanes * taken_vectors;
    static constexpr u32 units = (S.sent_vectors() + span - 1) / span;  // of a row

    WEFT_FN static u32 place(u32 unit, u32 i) {
        return unit % units * span + i * warp_lanes + threadIdx.x % warp_lanes;
    }
};

// Where one unit of a taker's work stands. Each rank starts with its own rows.
template <LowShape S> struct Stand {
    u32 source, token;

    WEFT_FN static Stand of(u32 unit, u32 rank) {
        const u32 slot = unit / Taken<S>::units;
        return {(slot + rank) % S.ranks, slot / S.ranks};
    }
};

// Reads choices and row at once: when the one has come, the other most often has, too.
template <LowShape S> WEFT_FN Taken<S> look(LowInbox<S>& inbox, u32 source, u32 token, u32 unit) {
    Taken<S> taken{};
    const u32 lane = threadIdx.x % warp_lanes;
    taken.word = 0;
    if (lane < S.top_k) taken.word = load_relaxed(&inbox.choices[source][token][lane]);
    const uint4* row = reinterpret_cast<const uint4*>(inbox.sent_row(source, token));
#pragma unroll
    for (u32 i = 0; i < taken_vectors; ++i)
        if (Taken<S>::place(unit, i) < S.sent_vectors())
            taken.v[i] = poll_vector(row + Taken<S>::place(unit, i));
    return taken;
}

// Waits for a token's choices, and for this warp's part of its row where one of them is mine; the
// place of the row is left blank, whatever became of the choices. `mine`: there is a row. False
// when a word does not come.
template <LowShape S>
WEFT_FN bool await_row(const LowDispatchArgs& a, u64 wanted, u32 source, u32 token, u32 unit,
                       Taken<S>& taken, bool& mine) {
    LowShare<S>& own = own_share<S>(a.site);
    const u32 lane = threadIdx.x % warp_lanes;
    uint4* row = reinterpret_cast<uint4*>(own.inbox.sent_row(source, token));
    const auto missing = [&] {
        u32 found = 0;
#pragma unroll
        for (u32 i = 0; i < taken_vectors; ++i)
            if (Taken<S>::place(unit, i) < S.sent_vectors() && !is_ready(taken.v[i]))
                found |= 1u << i;
        return found;
    };
    const auto ask = [&](u32 which) {
#pragma unroll
        for (u32 i = 0; i < taken_vectors; ++i)
            if (which >> i & 1) taken.v[i] = poll_vector(row + Taken<S>::place(unit, i));
    };
    Patience patience;
    for (;;) {
        const bool told = lane >= S.top_k || is_of(taken.word, wanted);
        const u32 left = missing();
        const bool all_told = __all_sync(all_lanes, told);
        if (all_told) {
            mine = __any_sync(all_lanes, value_of(taken.word) != 0);
            if (!mine) return true;
            if (__all_sync(all_lanes, left == 0)) break;
        }
        // Until all is told, nobody knows whether the row is to come.
        const bool waits = all_told ? left != 0 : !told;
        const u64 seen = all_told ? epoch_before(wanted) : epoch_in(taken.word, wanted);
        const Wait wait{source, Phase::dispatch, wanted, seen};
        const bool lasts = !waits || patience.lasts(own.header, a.site, wait);
        if (!__all_sync(all_lanes, lasts)) return false;
        if (!told) taken.word = load_relaxed(&own.inbox.choices[source][token][lane]);
        const u32 next = asked_next(left, a.tokens);
        ask(next);
        if (next != left && missing() != left) ask(missing());
    }
#pragma unroll
    for (u32 i = 0; i < taken_vectors; ++i)
        if (Taken<S>::place(unit, i) < S.sent_vectors())
            restore_sentinel(row + Taken<S>::place(unit, i));
    return true;
}

// One vector of a row into one of its places by expert.
template <LowShape S>
WEFT_FN void put_vector(const LowDispatchArgs& a, u32 e, u32 row, u32 v, uint4 data) {
    if (v < S.number_vectors()) {
        store(static_cast<uint4*>(a.rows) + (u64(e) * S.rows() + row) * S.number_vectors() + v,
              data);
    } else if (v < S.number_vectors() + S.scale_vectors()) {
        const u32 block = 4 * (v - S.number_vectors());
        const u32 word[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            if (block + i < S.blocks()) put_scale<S>(a.scales, e, row, block + i, word[i]);
    }
}

template <LowShape S>
WEFT_FN void keep_weights(const LowDispatchArgs& a, u64 slot, u32 v, uint4 data) {
    constexpr u32 first = S.number_vectors() + S.scale_vectors();
    if (v < first || v >= S.sent_vectors()) return;
    const u32 word[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 k = 4 * (v - first) + i;
        if (k < S.top_k) a.ledger.weights[slot + k] = __uint_as_float(word[i]);
    }
}

// One warp's part of one row: where it belongs, and there.
template <LowShape S>
WEFT_FN bool take_row(const LowDispatchArgs& a, u64 wanted, u32 source, u32 token, u32 unit,
                      const TakeScratch<S>& scratch, Taken<S>& taken, Diary& diary) {
    const u64 since = diary.waits();
    bool mine = false;
    if (!await_row<S>(a, wanted, source, token, unit, taken, mine)) return false;
    const u32 k = threadIdx.x % warp_lanes;
    // Lanes without a choice hold the word 0, which is no expert's.
    const auto [e, row] = find_seat<S>(a, scratch, source, token, value_of(taken.word));
    const u64 slot = (u64(source) * S.tokens + token) * S.top_k;
    if (unit % Taken<S>::units == 0 && k < S.top_k) {
        const u64 at = u64(u32(e)) * S.rows() + row;
        if constexpr (!S.homes) a.ledger.position[slot + k] = e < 0 ? -1 : i32(at);
        if (e >= 0) a.source[at] = i32(source * S.tokens + token);
        if constexpr (S.homes)
            if (e >= 0) a.ledger.home[at] = home_of<S>(a.site, source, token, k);
    }
    if (!mine) return true;
    diary.waited(since, source);
    u32 wanting = __ballot_sync(all_lanes, e >= 0);
    for (; wanting != 0; wanting &= wanting - 1) {
        const u32 from = u32(__ffs(i32(wanting)) - 1);
        const u32 to_e = u32(__shfl_sync(all_lanes, e, from)),
                  to_row = __shfl_sync(all_lanes, row, from);
#pragma unroll
        for (u32 i = 0; i < taken_vectors; ++i)
            put_vector<S>(a, to_e, to_row, Taken<S>::place(unit, i), taken.v[i]);
    }
    if constexpr (S.reduce == Reduce::sender)
#pragma unroll
        for (u32 i = 0; i < taken_vectors; ++i)
            keep_weights<S>(a, slot, Taken<S>::place(unit, i), taken.v[i]);
    return true;
}

// Looks for a warp's first row, on the way while places are laid out.
template <LowShape S> WEFT_FN Taken<S> look_first(const LowDispatchArgs& a, u32 unit) {
    const auto [source, token] = Stand<S>::of(unit, a.site.rank);
    if (token >= S.tokens) return {};
    return look<S>(own_share<S>(a.site).inbox, source, token, unit);
}

// All rows of all sources in the order (token, source).
template <LowShape S>
WEFT_FN bool take_rows(const LowDispatchArgs& a, u64 wanted, Turns turns,
                       const TakeScratch<S>& scratch, Taken<S> taken, Diary& diary) {
    LowShare<S>& own = own_share<S>(a.site);
    u32 most = 0;
#pragma unroll
    for (u32 source = 0; source < S.ranks; ++source) most = max(most, scratch.tokens[source]);
    for (u32 unit = turns.first; unit < most * S.ranks * Taken<S>::units; unit += turns.step) {
        const auto [source, token] = Stand<S>::of(unit, a.site.rank);
        if (token >= scratch.tokens[source]) continue;
        if (unit != turns.first) taken = look<S>(own.inbox, source, token, unit);
        if (!take_row<S>(a, wanted, source, token, unit, scratch, taken, diary)) return false;
        diary.worked();
    }
    return true;
}

}  // namespace weft
