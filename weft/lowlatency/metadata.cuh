// What a low-latency dispatch tells of its choices: by expert, which tokens chose it (the tellers),
// and with each row, which of the receiver's experts it is for. Neither counts: a bit needs no
// other bits, so no CTA looks at another one's tokens.
#pragma once
#include <weft/lowlatency/arrival.cuh>

namespace weft {

constexpr u32 most_threads = 256;  // of a CTA of the low-latency kernels

template <LowShape S> struct TellScratch {
    u32 chosen[S.experts];  // bit t: by token t of the chunk
};

template <LowShape S> WEFT_FN void clear_chosen(const Block& team, TellScratch<S>& scratch) {
    for (u32 e = team.lane(); e < S.experts; e += team.lanes()) scratch.chosen[e] = 0;
    __syncthreads();
}

// The choices of a teller's chunk. An expert that a token names twice gets one bit.
template <LowShape S>
WEFT_FN void tally(const Block& team, const LowDispatchArgs& a, u32 chunk,
                   TellScratch<S>& scratch) {
    for (u32 i = team.lane(); i < chunk_tokens * S.top_k; i += team.lanes()) {
        const u32 bit = i / S.top_k, token = chunk * chunk_tokens + bit;
        if (token >= a.tokens) return;
        const i32 id = known_id<S>(a, token, i % S.top_k);
        if (id >= 0) atomicOr(scratch.chosen + id, 1u << bit);
    }
}

// The first word of a dispatch, by one lane for one peer: how many tokens it has. All takers wait
// for it. What is planned for the flag that follows.
template <LowShape S> WEFT_FN Action send_size(const LowDispatchArgs& a, u64 wanted, u32 peer) {
    const Action planned = fault(own_share<S>(a.site).header, Point::before_flag, peer, wanted);
    if (planned != Action::drop)
        store_relaxed(&low_share<S>(a.site, peer).inbox.tokens[a.site.rank],
                      tagged(wanted, a.tokens));
    return planned;
}

// That a dispatch has begun. It orders nothing, and only the herald hears it.
template <LowShape S>
WEFT_FN void send_hello(const LowDispatchArgs& a, u64 wanted, u32 peer, Action planned) {
    if (planned == Action::drop) return;
    const u64 lie = planned == Action::lie ? 1ull << 40 : 0;
    const u32 generation = own_share<S>(a.site).header.generation;
    store_relaxed(&low_share<S>(a.site, peer).inbox.hello[a.site.rank],
                  make_flag(generation, a.site.descriptor, wanted) ^ lie);
}

template <LowShape S>
WEFT_FN void tell(const Block& team, const LowDispatchArgs& a, u64 wanted, u32 chunk,
                  const TellScratch<S>& scratch) {
    Header& header = own_share<S>(a.site).header;
    const bool greets = chunk == 0 && team.lane() < S.ranks;
    Action planned = Action::drop;
    if (greets) planned = send_size<S>(a, wanted, team.lane());
    for (u32 expert = team.lane(); expert < S.experts; expert += team.lanes()) {
        const Place place = place_in<S>(a.placement, expert);
        LowInbox<S>& to = low_share<S>(a.site, place.rank).inbox;
        store_relaxed(&to.chosen[a.site.rank][chunk][place.local],
                      tagged(wanted, scratch.chosen[expert]));
    }
    if (chunk != 0) return;
    mark_sent(team, header, Phase::dispatch, wanted);
    if (greets) send_hello<S>(a, wanted, team.lane(), planned);
    mark_published(team, header, Phase::dispatch, wanted);
}

// One warp for one token, lane k for the k-th choice: tells every rank which of its experts are
// chosen, reports ids that are wrong, and keeps what combine expects home.
template <LowShape S>
WEFT_FN void send_choices(const LowDispatchArgs& a, u64 wanted, u32 token, i32 id) {
    Header& header = own_share<S>(a.site).header;
    const u32 lane = threadIdx.x % warp_lanes;
    if (lane < S.top_k && id < 0) {
        const i64 raw = id_at(a.ids, a.ids_bytes, u64(token) * S.top_k + lane);
        if (raw != -1) refuse_id(header, a.site, S.experts, raw, token, lane);
    }
    const u32 same = __match_any_sync(all_lanes, id);
    const bool repeats = id >= 0 && (same & ((1u << lane) - 1)) != 0;
    if (repeats) refuse_duplicate(header, a.site, token, lane, id);
    const bool kept = id >= 0 && !repeats;
    Place place{S.ranks, 0};
    if (kept) place = place_in<S>(a.placement, u32(id));
    if (lane < S.top_k)
#pragma unroll 8
        for (u32 i = 0; i < S.ranks; ++i) {
            const u32 peer =
                a.site.rank + i < S.ranks ? a.site.rank + i : a.site.rank + i - S.ranks;
            store_relaxed(&low_share<S>(a.site, peer).inbox.choices[a.site.rank][token][lane],
                          tagged(wanted, place.rank == peer ? place.local + 1 : 0));
        }
    const u32 choices = __ballot_sync(all_lanes, kept);
    const u32 ranks = __reduce_or_sync(all_lanes, kept ? 1u << place.rank : 0);
    if (lane == 0) {
        a.ledger.expected[2 * token] = choices;
        a.ledger.expected[2 * token + 1] = ranks;
    }
}

}  // namespace weft
