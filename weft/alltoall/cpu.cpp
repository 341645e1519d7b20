// The CPU backend of an all-to-all: the same protocol with a team of one thread. A generated entry
// includes this file and opens it through extern "C" doors.
#include <weft/alltoall/combine_fp8_cpu.hpp>
#include <weft/alltoall/exports.cuh>
#include <weft/device/cpu.hpp>

namespace weft {

template <Shape S, Quant quant> void quantize_row(const u8* row, u8* numbers, u8* scales) {
    constexpr u32 columns = quant == Quant::mxfp8 ? mx_columns : scale_columns;
    for (u32 block = 0; block < S.hidden / columns; ++block) {
        float x[columns];
        read_block<S.number>(x, row, block * columns);
        quantize_block<quant>(x, block, numbers, scales);
    }
}

// The first payload as FP8 with its scales, where the Shape asks for it.
template <Shape S> void quantize_payload(const DispatchArgs& a, Inbox<S>& to, u32 token) {
    const u8* row = static_cast<const u8*>(a.payload[0]) + u64(token) * S.out_bytes();
    quantize_row<S, S.quant>(row, plane<0>(to.payload).row[a.site.rank][token],
                             plane<1>(to.payload).row[a.site.rank][token]);
}

template <Shape S, u32 P> void copy_planes(const DispatchArgs& a, Inbox<S>& to, u32 token) {
    if constexpr (P < S.planes) {
        const u8* from = static_cast<const u8*>(a.payload[P]) + u64(token) * S.row_bytes[P];
        std::memcpy(plane<P>(to.payload).row[a.site.rank][token], from, S.row_bytes[P]);
        copy_planes<S, P + 1>(a, to, token);
    }
}

// One token to every rank that owns one of its experts; its route to every rank. Returns those
// ranks as bits.
template <Shape S> u32 send_token(const DispatchArgs& a, u32 token) {
    Share<S>& own = mine<S>(a.site);
    u32 destinations = 0;
    Place places[S.top_k];
    i32 ids[S.top_k];
    for (u32 k = 0; k < S.top_k; ++k) {
        ids[k] = expert_id<S>(a, raw_id<S>(a, token, k), token, k, true);
        if (ids[k] < 0) continue;
        for (u32 j = 0; j < k; ++j)
            if (ids[j] == ids[k]) refuse_duplicate(own.header, a.site, token, k, ids[k]);
        places[k] = place_of<S>(a, u32(ids[k]));
        destinations |= 1u << places[k].rank;
    }
    if constexpr (S.way == Way::choices)
        for (u32 k = 0; k < S.top_k; ++k) {
            own.choices.rank[token][k] = ids[k] < 0 ? max_ranks : places[k].rank;
            own.choices.weight[token][k] = a.weights ? a.weights[u64(token) * S.top_k + k] : 1.0f;
        }
    for (u32 peer = 0; peer < S.ranks; ++peer) {
        Inbox<S>& to = share<S>(a.site, peer).inbox;
        Route<S>& route = to.route[a.site.rank][token];
        for (u32 k = 0; k < S.top_k; ++k) {
            const bool here = ids[k] >= 0 && places[k].rank == peer;
            route.expert[k] = here ? i32(places[k].local) : -1;
            route.weight[k] = !here ? 0.0f : a.weights ? a.weights[u64(token) * S.top_k + k] : 1.0f;
        }
        if (!(destinations >> peer & 1)) continue;
        if constexpr (S.quant != Quant::none) quantize_payload<S>(a, to, token);
        copy_planes<S, S.quant == Quant::none ? 0 : 2>(a, to, token);
    }
    return destinations;
}

template <Shape S> void clear_rows(const DispatchArgs& a, u32 from, u32 until) {
    for (u32 peer = 0; peer < S.ranks; ++peer)
        for (u32 token = from; token < until; ++token)
            for (u32 k = 0; k < S.top_k; ++k)
                share<S>(a.site, peer).inbox.route[a.site.rank][token].expert[k] = -1;
}

// This rank's numbers to every rank.
template <Shape S> void send_stats(const DispatchArgs& a) {
    if constexpr (S.stats != 0)
        for (u32 peer = 0; peer < S.ranks; ++peer)
            std::memcpy(share<S>(a.site, peer).inbox.stats.row[a.site.rank], a.stats, 4 * S.stats);
}

template <Shape S, Part part = Part::whole> void dispatch(const DispatchArgs& a) {
    Share<S>& own = mine<S>(a.site);
    const Turn turn = own.header.turn;
    if (turn.failed != 0) return;
    const u64 start = now_ns(), wanted = (turn.epoch + 1) & epoch_mask;
    if constexpr (part != Part::receive) {
        mark_start(Solo{}, own.header, Phase::dispatch, wanted, start);
        if (fault(own.header, Point::dispatch_enter, a.site.rank, wanted) == Action::stay_away)
            return;
        const u32 count = token_count<S>(a, true);
        for (u32 token = 0; token < a.tokens; ++token)
            own.destinations[token] = token < count ? send_token<S>(a, token) : 0;
        clear_rows<S>(a, count, turn.rows);
        send_stats<S>(a);
        fault(own.header, Point::after_payload, a.site.rank, wanted);
        publish<S>(Solo{}, a.site, Phase::dispatch, wanted, count);
        own.header.sending = count;
    }
    if constexpr (part != Part::send) {
        if (!await_all<S>(Solo{}, a.site, Phase::dispatch, wanted)) return;
        own.header.turn = {wanted, 0, own.header.sending};
        keep_record(own.header, Phase::dispatch, wanted, start, own.header.sending);
        mark_end(own.header, Phase::dispatch, wanted);
    }
}

constexpr u32 block_numbers = 256;  // of one partial sum: it stays in the first-level cache

// The rows of the choices that one peer holds, summed and rounded as if by that peer.
template <Shape S, u32 count>
void add_choices(float (&sum)[count], const Site& site, u32 peer, u32 token, u32 at) {
    using Element = Bits<S.number>;
    const Share<S>& own = mine<S>(site);
    float part[count] = {};
    for (u32 k = 0; k < S.top_k; ++k) {
        if (own.choices.rank[token][k] != peer) continue;
        const u8* row = own.inbox.returned.row[token][k];
        add_weighted<S.number>(part, own.choices.weight[token][k],
                               reinterpret_cast<const Element*>(row) + at);
    }
    for (u32 i = 0; i < count; ++i) sum[i] += widen<S.number>(narrow<S.number>(part[i]));
}

// One peer's row, wherever the Shape's way has left it; false if it does not come.
template <Shape S, u32 count>
bool add_row(float (&sum)[count], const Site& site, u32 peer, u32 token, u32 at) {
    if constexpr (S.way == Way::pull) {
        const u8* row = share<S>(site, peer).outbox.row[site.rank][token];
        add_block<S.number>(sum, reinterpret_cast<const Bits<S.number>*>(row) + at);
    } else if constexpr (S.way == Way::choices) {
        add_choices<S>(sum, site, peer, token, at);
    } else if constexpr (S.way == Way::push) {
        const u8* row = mine<S>(site).inbox.returned.row[peer][token];
        add_block<S.number>(sum, reinterpret_cast<const Bits<S.number>*>(row) + at);
    } else {
        return add_fp8<S>(sum, site, peer, token, at);
    }
    return true;
}

// Numbers `at` .. `at` + count of one row. The loops over `count` are the inner ones and their
// length is a constant, so that compilers vectorise them at -O2: combining 128 tokens of 7168 bf16
// takes 0.2 ms, and took 2.3 ms with the loop over peers inside (2 ranks, 2-core CI machine,
// 2026-11-20).
template <Shape S, u32 count> bool reduce_block(const CombineArgs& a, u32 token, u32 at) {
    using Element = Bits<S.number>;
    const u32 destinations = mine<S>(a.site).destinations[token];
    const u64 in_output = u64(token) * S.hidden + at;
    float sum[count] = {};
    for (u32 peer = 0; peer < S.ranks; ++peer)
        if ((destinations >> peer & 1) && !add_row<S>(sum, a.site, peer, token, at)) return false;
    if (a.add) add_block<S.number>(sum, static_cast<const Element*>(a.add) + in_output);
    Element* out = static_cast<Element*>(a.out) + in_output;
    for (u32 i = 0; i < count; ++i) out[i] = narrow<S.number>(sum[i]);
    return true;
}

// out[token] = the sum of its ranks' rows in rank order, in fp32, then `add`, rounded once.
template <Shape S> bool reduce_token(const CombineArgs& a, u32 token) {
    constexpr u32 rest = S.hidden % block_numbers, whole = S.hidden - rest;
    for (u32 at = 0; at < whole; at += block_numbers)
        if (!reduce_block<S, block_numbers>(a, token, at)) return false;
    if constexpr (rest != 0) return reduce_block<S, rest>(a, token, whole);
    return true;
}

template <Shape S> bool reduce_tokens(const CombineArgs& a) {
    for (u32 token = 0; token < a.tokens; ++token)
        if (!reduce_token<S>(a, token)) return false;
    return true;
}

// A row as FP8 to its owner.
template <Shape S> void post_row(const u8* from, u8* row) {
    for (u32 block = 0; block < S.hidden / scale_columns; ++block) {
        float x[scale_columns];
        read_block<S.number>(x, from, block * scale_columns);
        post_block<S>(x, block, row);
    }
}

// The rows that this rank's experts made, into the inboxes of the tokens' owners.
template <Shape S> void push_rows(const Site& site) {
    Share<S>& own = mine<S>(site);
    for (u32 source = 0; source < S.ranks; ++source)
        for (u32 token = 0, count = tokens_from<S>(own.inbox, source); token < count; ++token) {
            bool is_for_me = false;
            for (u32 k = 0; k < S.top_k; ++k)
                is_for_me = is_for_me || own.inbox.route[source][token].expert[k] >= 0;
            if (!is_for_me) continue;
            const u8* from = own.outbox.row[source][token];
            u8* to = share<S>(site, source).inbox.returned.row[site.rank][token];
            if constexpr (S.way == Way::fp8)
                post_row<S>(from, to);
            else
                std::memcpy(to, from, S.out_bytes());
        }
}

template <Shape S, Part part = Part::whole> void combine(const CombineArgs& a) {
    Share<S>& own = mine<S>(a.site);
    const Turn turn = own.header.turn;
    if (turn.failed != 0) return;
    const u64 start = now_ns();
    if constexpr (part != Part::receive) {
        mark_start(Solo{}, own.header, Phase::combine, turn.epoch, start);
        if (fault(own.header, Point::combine_enter, a.site.rank, turn.epoch) == Action::stay_away)
            return;
        if constexpr (S.way == Way::push || S.way == Way::fp8) push_rows<S>(a.site);
        publish<S>(Solo{}, a.site, Phase::combine, turn.epoch, 0);
    }
    if constexpr (part != Part::send) {
        // Rows in FP8 are summed as they come; that the peers have read their inboxes is heard
        // last.
        if (S.way == Way::fp8 && !reduce_tokens<S>(a)) return;
        if (!await_all<S>(Solo{}, a.site, Phase::combine, turn.epoch)) return;
        if (S.way != Way::fp8 && !reduce_tokens<S>(a)) return;
        keep_record(own.header, Phase::combine, turn.epoch, start, a.tokens);
        mark_end(own.header, Phase::combine, turn.epoch);
    }
}

}  // namespace weft
