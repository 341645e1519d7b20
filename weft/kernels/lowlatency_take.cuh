// The takers of a low-latency dispatch: rows out of the inbox, as they come, into their places by
// expert. A warp takes 2 KiB of a row at a time.
#pragma once
#include <weft/kernels/arrival.cuh>

namespace weft {

constexpr u32 taken_vectors = 4;  // of a row, in each lane

// How many tokens each source brings, and where its rows of each expert begin.
template <LowShape S> struct TakeScratch {
    u32 first[S.ranks][S.local];
    u32 tokens[S.ranks];
};

template <LowShape S>
WEFT_FN bool learn(const Block& team, const LowDispatchArgs& a, u64 wanted, bool leads,
                   TakeScratch<S>& scratch) {
    LowShare<S>& own = own_share<S>(a.site);
    const u32 lane = team.lane();
    bool came = true;
    if (lane < S.ranks) {
        if (leads) fault(own.header, Point::before_poll, lane, wanted);
        u32 tokens = 0;
        came =
            await_flag(own.header, a.site, &own.inbox.hello[lane], lane, Phase::dispatch, wanted) &&
            await_tagged(own.header, a.site, &own.inbox.tokens[lane], lane, wanted, tokens);
        scratch.tokens[lane] = came ? believed<S>(tokens) : 0;
        if (leads && came) mark_arrived(team, own.header, Phase::dispatch, wanted, lane);
        if (leads) a.ledger.brought[lane] = i32(scratch.tokens[lane]);
    }
    for (u32 i = lane; came && i < S.ranks * a.own_experts; i += team.lanes()) {
        const u32 source = i / a.own_experts, e = i % a.own_experts;
        came = await_tagged(own.header, a.site, &own.inbox.count[source][e], source, wanted,
                            scratch.first[source][e]);
    }
    if (!team.all(came)) return false;
    for (u32 e = lane; e < a.own_experts; e += team.lanes()) {
        u32 total = 0;
        for (u32 source = 0; source < S.ranks; ++source) {
            const u32 rows = believed<S>(scratch.first[source][e]);
            scratch.first[source][e] = total;
            if (leads) {
                a.ranges[2 * (e * S.ranks + source)] = i32(total);
                a.ranges[2 * (e * S.ranks + source) + 1] = i32(rows);
            }
            total += rows;
        }
        if (leads) a.counts[e] = i32(total);
    }
    __syncthreads();
    return true;
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

// Waits until the choices are there: lane k's, or 0. False when they do not come.
template <LowShape S>
WEFT_FN bool await_choices(const Site& site, u64 wanted, u32 source, u32 token, Taken<S>& taken) {
    LowShare<S>& own = own_share<S>(site);
    const u32 lane = threadIdx.x % warp_lanes;
    Patience patience;
    while (!__all_sync(all_lanes, lane >= S.top_k || is_of(taken.word, wanted))) {
        const Wait wait{source, Phase::dispatch, wanted, taken.word >> tagged_bits};
        if (!__all_sync(all_lanes, patience.lasts(own.header, site, wait))) return false;
        if (lane < S.top_k) taken.word = load_relaxed(&own.inbox.choices[source][token][lane]);
    }
    return true;
}

// Waits for this warp's part of a row, and leaves its place blank. False when it does not come.
// While a lane waits it asks for one vector alone, and for all when that one is there: others need
// the cache, too.
template <LowShape S>
WEFT_FN bool await_row(const Site& site, u64 wanted, u32 source, u32 token, u32 unit,
                       Taken<S>& taken) {
    LowShare<S>& own = own_share<S>(site);
    uint4* row = reinterpret_cast<uint4*>(own.inbox.sent_row(source, token));
    const auto missing = [&] {
        u32 found = 0;
#pragma unroll
        for (u32 i = 0; i < taken_vectors; ++i)
            if (Taken<S>::place(unit, i) < S.sent_vectors() && !has_come(taken.v[i]))
                found |= 1u << i;
        return found;
    };
    const auto ask = [&](u32 which) {
#pragma unroll
        for (u32 i = 0; i < taken_vectors; ++i)
            if (which >> i & 1) taken.v[i] = poll_vector(row + Taken<S>::place(unit, i));
    };
    Patience patience;
    for (u32 left = missing(); !__all_sync(all_lanes, left == 0); left = missing()) {
        const Wait wait{source, Phase::dispatch, wanted, wanted};
        if (!__all_sync(all_lanes, patience.lasts(own.header, site, wait))) return false;
        ask(left & (0u - left));
        if (missing() != left) ask(missing());
    }
#pragma unroll
    for (u32 i = 0; i < taken_vectors; ++i)
        if (Taken<S>::place(unit, i) < S.sent_vectors())
            leave_blank(row + Taken<S>::place(unit, i));
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
    if (!await_choices<S>(a.site, wanted, source, token, taken)) return false;
    const u32 k = threadIdx.x % warp_lanes, word = value_of(taken.word);
    // Lanes without a choice hold the word 0, which is no expert's.
    const auto [e, row] = seat_of<S>(word, a.own_experts, scratch.first[source]);
    const u64 slot = (u64(source) * S.tokens + token) * S.top_k;
    if (unit % Taken<S>::units == 0 && k < S.top_k) {
        a.ledger.position[slot + k] = e < 0 ? -1 : i32(u32(e) * S.rows() + row);
        if (e >= 0) a.source[u64(u32(e)) * S.rows() + row] = i32(source * S.tokens + token);
    }
    u32 wanting = __ballot_sync(all_lanes, e >= 0);
    if (wanting == 0) return true;
    if (!await_row<S>(a.site, wanted, source, token, unit, taken)) return false;
    diary.waited(since, source);
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

// All rows of all sources in the order (token, source), each rank starting with its own.
template <LowShape S>
WEFT_FN bool take_rows(const LowDispatchArgs& a, u64 wanted, Turns turns,
                       const TakeScratch<S>& scratch, Diary& diary) {
    LowShare<S>& own = own_share<S>(a.site);
    u32 most = 0;
#pragma unroll
    for (u32 source = 0; source < S.ranks; ++source) most = max(most, scratch.tokens[source]);
    for (u32 unit = turns.first; unit < most * S.ranks * Taken<S>::units; unit += turns.step) {
        const u32 slot = unit / Taken<S>::units, token = slot / S.ranks;
        const u32 source = (slot + a.site.rank) % S.ranks;
        if (token >= scratch.tokens[source]) continue;
        Taken<S> taken = look<S>(own.inbox, source, token, unit);
        if (!take_row<S>(a, wanted, source, token, unit, scratch, taken, diary)) return false;
        diary.worked();
    }
    return true;
}

}  // namespace weft
