// Combine by FP8: rows that bring their own news. Some CTAs push this rank's rows home and wait for
// nobody; others, behind them in the grid, sum rows as they come and leave their places blank. So
// the link never waits for a sum, nor a sum for the last row. A warp is the unit of work. The first
// CTA is the herald: it tells the peers when their inboxes here have been read, and hears the same.
#pragma once
#include <weft/alltoall/phases.cuh>
#include <weft/device/quantize_warp.cuh>
#include <weft/device/roles.cuh>
#include <weft/device/sentinel_vector.cuh>

namespace weft {

constexpr u32 blocks_in_strip = warp_lanes * lane_columns / scale_columns;
constexpr u32 most_strips = warp_lanes / blocks_in_strip;  // of one leg: a lane for each scale
constexpr u32 rows_in_flight = 8;                          // of one token, in each lane

// A row in strips of 512 columns, sixteen for each lane of a warp.
template <Shape S> struct Strips {
    static constexpr u32 vectors = S.hidden / lane_columns, blocks = S.hidden / scale_columns;
    static constexpr u32 count = (vectors + warp_lanes - 1) / warp_lanes;

    WEFT_FN static u32 vector(u32 strip) { return strip * warp_lanes + threadIdx.x % warp_lanes; }
    WEFT_FN static u32* scales(u8* row) { return reinterpret_cast<u32*>(row + S.hidden); }
};

// Up to a.strips strips of one slot, at most most_strips, as they were loaded before anybody knew
// whether the row is wanted: cold loads share one round trip. Slots come in the order (token,
// source), each rank starting with itself, so that peers are not hit in step.
template <Shape S> struct Leg {
    u32 source, token, strip, end;
    u32 expert, brought;        // lane k: the k-th choice; the tokens of the source
    Columns<S.number> columns;  // of the first strip

    WEFT_FN static Columns<S.number> load(const Site& site, u32 source, u32 token, u32 strip) {
        constexpr u32 width = Columns<S.number>::vectors;
        const u32 v = Strips<S>::vector(strip);
        Columns<S.number> columns{};
        const auto* row =
            reinterpret_cast<const uint4*>(mine<S>(site).outbox.row[source][token]) + v * width;
        if (v < Strips<S>::vectors)
#pragma unroll
            for (u32 i = 0; i < width; ++i) columns.v[i] = load_shared_row(row + i);
        return columns;
    }

    WEFT_FN static Leg of(const CombineArgs& a, u32 unit) {
        const u32 legs = (Strips<S>::count + a.strips - 1) / a.strips, slot = unit / legs;
        const u32 strip = unit % legs * a.strips, lane = threadIdx.x % warp_lanes;
        Leg leg{.source = (a.site.rank + slot) % S.ranks,
                .token = slot / S.ranks,
                .strip = strip,
                .end = min(strip + a.strips, Strips<S>::count),
                .expert = ~0u,
                .brought = 0,
                .columns = {}};
        if (leg.token >= S.tokens) return leg;
        Inbox<S>& inbox = mine<S>(a.site).inbox;
        leg.brought = load_early(&inbox.counts[leg.source]);
        if (lane < S.top_k)
            leg.expert = load_early(&inbox.route[leg.source][leg.token].expert[lane]);
        leg.columns = load(a.site, leg.source, leg.token, strip);
        return leg;
    }

    // All lanes of the warp take part.
    WEFT_FN bool wanted() const {
        return __any_sync(all_lanes, i32(expert) >= 0 && token < brought) != 0;
    }
};

// Pushes one leg. Its scales go together at its end, a word for each lane: stores of four bytes for
// each block would be packets of their own, some 6 % of a row's time on the link.
template <Shape S> WEFT_FN void push_leg(const CombineArgs& a, const Leg<S>& leg) {
    constexpr u32 lanes = scale_columns / lane_columns;
    const u32 lane = threadIdx.x % warp_lanes;
    u8* row = share<S>(a.site, leg.source).inbox.returned.row[a.site.rank][leg.token];
    Columns<S.number> ahead = leg.columns;
    u32 scale = 0;  // of the leg's block that is this lane's
    for (u32 strip = leg.strip; strip < leg.end; ++strip) {
        const Columns<S.number> columns = ahead;
        if (strip + 1 < leg.end) ahead = Leg<S>::load(a.site, leg.source, leg.token, strip + 1);
        float x[lane_columns];
        columns.widen(x);
        const u32 amax = block_amax_bits<scale_columns>(x), v = Strips<S>::vector(strip);
        const BlockScale block = block_scale(amax);
        if (v < Strips<S>::vectors)
            post_vector(reinterpret_cast<uint4*>(row) + v,
                        quantize(x, block.inverse, amax >= infinity_bits));
        const u32 found =
            __shfl_sync(all_lanes, __float_as_uint(block.scale), lane % blocks_in_strip * lanes);
        if (lane / blocks_in_strip == strip - leg.strip) scale = found;
    }
    const u32 at = leg.strip * blocks_in_strip + lane;
    if (at < min(leg.end * blocks_in_strip, Strips<S>::blocks))
        store_relaxed(Strips<S>::scales(row) + at, scale);
}

// Tokens of the source that brought most, asked for before anything is decided.
template <Shape S> WEFT_FN u32 most_brought(const Site& site) {
    u32 brought[S.ranks], most = 0;
#pragma unroll
    for (u32 i = 0; i < S.ranks; ++i) brought[i] = load_early(&mine<S>(site).inbox.counts[i]);
#pragma unroll
    for (u32 i = 0; i < S.ranks; ++i) most = max(most, brought[i]);
    return min(most, S.tokens);
}

// All legs of one CTA; `leg` is each warp's first, loaded already. Before the last ones the CTA
// counts itself: by then it has read all that it reads of the inbox.
// Order: the barrier gathers the CTA's loads to lane 0, whose add releases them to the herald.
template <Shape S>
WEFT_FN void push_legs(const Block& team, const CombineArgs& a, Turns turns, Leg<S> leg, u32 most) {
    const u32 legs = (Strips<S>::count + a.strips - 1) / a.strips, end = most * S.ranks * legs;
    for (bool last = false; !last; turns.first += turns.step) {
        last = turns.first - team.warp() + turns.step >= end;  // the same in all warps
        const bool wanted = leg.wanted();
        const Leg<S> now = leg;
        if (last) {
            __syncthreads();
            if (team.lane() == 0) add_acq_rel(&mine<S>(a.site).header.arrived, 1);
        } else {
            leg = Leg<S>::of(a, turns.first + turns.step);
        }
        if (wanted) push_leg<S>(a, now);
    }
}

// One strip of the rows of peers first .. first + 7, and the scales of its blocks: a lane has one.
template <Shape S> struct Harvest {
    static constexpr u32 count = S.ranks < rows_in_flight ? S.ranks : rows_in_flight;
    uint4 v[count];
    u32 scale;
    u8* row;     // of peer `first`
    u32 vector;  // of each row
    u32 block;   // whose scale is this lane's, of peer first + holder
    u32 wanted;  // the peers, as bits

    WEFT_FN static u64 step() { return sizeof(Returned<S>::row[0]); }
    WEFT_FN u32 holder() const { return threadIdx.x % warp_lanes / blocks_in_strip; }
    WEFT_FN bool holds() const {
        return (wanted >> holder() & 1) != 0 && block < Strips<S>::blocks;
    }
    WEFT_FN bool valid(u32 i) const {
        return (wanted >> i & 1) != 0 && vector < Strips<S>::vectors;
    }
    WEFT_FN const uint4* place(u32 i) const {
        return reinterpret_cast<const uint4*>(row + i * step()) + vector;
    }
    WEFT_FN u32* scale_place() const { return Strips<S>::scales(row + holder() * step()) + block; }

    WEFT_FN Harvest(const CombineArgs& a, u32 token, u32 strip, u32 first, u32 destinations)
        : scale(sentinel),
          row(mine<S>(a.site).inbox.returned.row[first][token]),
          vector(Strips<S>::vector(strip)),
          block(strip * blocks_in_strip + threadIdx.x % blocks_in_strip),
          wanted(destinations >> first & ((1u << count) - 1)) {}

    WEFT_FN void ask(u32 which) {
#pragma unroll
        for (u32 i = 0; i < count; ++i)
            if ((which >> i & 1) != 0 && valid(i)) v[i] = poll_vector(place(i));
        if (holds() && scale == sentinel) scale = load_relaxed(scale_place());
    }
    // Peers of whose row this lane still lacks something.
    WEFT_FN u32 missing() const {
        u32 found = holds() && scale == sentinel ? 1u << holder() : 0;
#pragma unroll
        for (u32 i = 0; i < count; ++i)
            if (valid(i) && !is_ready(v[i])) found |= 1u << i;
        return found;
    }
    WEFT_FN void blank() const {
#pragma unroll
        for (u32 i = 0; i < count; ++i)
            if (valid(i)) restore_sentinel(const_cast<uint4*>(place(i)));
        if (holds()) store_relaxed(scale_place(), sentinel);
    }
    // In rank order. All lanes of the warp take part.
    WEFT_FN void add_to(float (&sum)[lane_columns]) const {
        constexpr u32 lanes = scale_columns / lane_columns;
#pragma unroll
        for (u32 i = 0; i < count; ++i) {
            const u32 theirs = __shfl_sync(all_lanes, scale,
                                           i * blocks_in_strip + threadIdx.x % warp_lanes / lanes);
            if (wanted >> i & 1) add_e4m3(sum, v[i], __uint_as_float(theirs));
        }
    }
};

// Waits for what a warp has asked for; false, for all its lanes, when it does not come.
template <Shape S>
WEFT_FN bool await_rows(const CombineArgs& a, u64 wanted, u32 first, Harvest<S>& rows) {
    Header& header = mine<S>(a.site).header;
    Patience patience;
    for (u32 left = rows.missing(); !__all_sync(all_lanes, left == 0); left = rows.missing()) {
        const u32 peer = left != 0 ? first + u32(__ffs(i32(left)) - 1) : a.site.rank;
        const Wait wait{peer, Phase::combine, wanted, (wanted - 1) & epoch_mask};
        const bool lasts = left == 0 || patience.lasts(header, a.site, wait);
        if (!__all_sync(all_lanes, lasts)) return false;
        const u32 next = a.tokens > few_tokens ? left & (0u - left) : left;
        rows.ask(next);
        if (next != left && rows.missing() != left) rows.ask(rows.missing());
    }
    return true;
}

// out[token] = the sum of its ranks' rows in rank order, in fp32, then `add`, rounded once: one
// warp's columns.
template <Shape S>
WEFT_FN bool sum_strip(const CombineArgs& a, u64 wanted, u32 token, u32 strip, u32 destinations) {
    constexpr u32 width = numbers_in_vector(S.number), parts = lane_columns / width;
    float sum[lane_columns] = {};
#pragma unroll 1
    for (u32 first = 0; first < S.ranks; first += rows_in_flight) {
        Harvest<S> rows(a, token, strip, first, destinations);
        rows.ask(~0u);
        if (!await_rows<S>(a, wanted, first, rows)) return false;
        rows.blank();
        rows.add_to(sum);
    }
    const u32 v = Strips<S>::vector(strip);
    if (v >= Strips<S>::vectors) return true;
    const u64 at = u64(token) * (S.out_bytes() / 16) + v * parts;
#pragma unroll
    for (u32 i = 0; i < parts; ++i) {
        float (&part)[width] = reinterpret_cast<float (&)[width]>(sum[i * width]);
        if (a.add)
            add_vector<S.number>(part, load_input(static_cast<const uint4*>(a.add) + at + i));
        static_cast<uint4*>(a.out)[at + i] = round_vector<S.number>(part);
    }
    return true;
}

template <Shape S> WEFT_FN bool sum_tokens(const CombineArgs& a, u64 wanted, Turns turns) {
    const u32 *peers = mine<S>(a.site).destinations, end = a.tokens * Strips<S>::count;
    u32 next = turns.first < end ? load_early(peers + turns.first / Strips<S>::count) : 0;
    for (u32 unit = turns.first; unit < end; unit += turns.step) {
        const u32 destinations = next, after = unit + turns.step;
        if (after < end) next = load_early(peers + after / Strips<S>::count);
        if (!sum_strip<S>(a, wanted, unit / Strips<S>::count, unit % Strips<S>::count,
                          destinations))
            return false;
    }
    return true;
}

// The herald's first half: once every pushing CTA has read its last route, nobody here reads the
// inbox any more. It has stored no row itself.
// Order: lane 0 acquires all warps' counts, the barrier gathers that to the lanes that release.
template <Shape S>
WEFT_FN bool tell_when_read(const Block& team, const CombineArgs& a, const Turn& turn) {
    Header& header = mine<S>(a.site).header;
    bool read = true;
    if (team.lane() == 0) {
        Patience patience;
        const Wait wait{a.site.rank, Phase::combine, turn.epoch, turn.epoch};
        while (read && load_acquire_local(&header.arrived) != a.pushers)
            read = patience.lasts(header, a.site, wait);
        if (read) header.arrived = 0;
    }
    if (!team.all(read)) return false;
    publish<S>(team, a.site, Phase::combine, turn.epoch, 0);
    return true;
}

template <Shape S, Part part> WEFT_FN void combine_as_they_come(const CombineArgs& a) {
    const Block team;
    Header& header = mine<S>(a.site).header;
    const Crew crew{0, part == Part::receive ? 0 : a.pushers};
    wait_for_predecessor();
    admit_successor();
    Leg<S> leg{};
    u32 most = 0;
    if (crew.sends()) {
        leg = Leg<S>::of(a, crew.of_senders().first);
        most = most_brought<S>(a.site);
    }
    const Turn turn = header.turn;
    if (turn.failed != 0) return;
    const u64 start = team.lane() == 0 ? now_ns() : 0;
    if (fault(header, Point::combine_enter, a.site.rank, turn.epoch) == Action::stay_away) return;

    if (crew.sends()) return push_legs<S>(team, a, crew.of_senders(), leg, most);
    if (crew.heralds()) {
        if constexpr (part != Part::receive) {
            mark_start(team, header, Phase::combine, turn.epoch, start);
            if (!tell_when_read<S>(team, a, turn)) return;
        }
        if (part == Part::send || !await_all<S>(team, a.site, Phase::combine, turn.epoch)) return;
        if (team.lane() == 0) keep_record(header, Phase::combine, turn.epoch, start, a.tokens);
    } else if constexpr (part != Part::send) {
        if (!sum_tokens<S>(a, turn.epoch, crew.of_takers())) return;
    }
    if (team.lane() == 0) mark_end(header, Phase::combine, turn.epoch);
}

}  // namespace weft
