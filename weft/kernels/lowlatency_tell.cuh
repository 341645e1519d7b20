// The tellers of a low-latency dispatch: which expert's rank gets how many rows of this rank, and
// where among them each token stands. A teller takes a batch of tokens; it counts all earlier ones
// for itself, so that no teller waits for another.
#pragma once
#include <weft/kernels/arrival.cuh>

namespace weft {

constexpr u32 most_threads = 256;  // of a CTA of the low-latency kernels

template <LowShape S> struct TellScratch {
    u32 chosen[S.experts];  // how often, by earlier tokens
    i32 id[most_threads];   // of the batch
    i32 kept[most_threads];
};

// All choices of one earlier token, each expert once. Ids are read again rather than kept: 32 of
// them would not stay in registers.
template <LowShape S> WEFT_FN void tally(const LowDispatchArgs& a, u32 token, u32* chosen) {
    for (u32 k = 0; k < S.top_k; ++k) {
        const i32 id = known_id<S>(a, token, k);
        bool repeats = false;
        for (u32 j = 0; j < k; ++j) repeats = repeats || known_id<S>(a, token, j) == id;
        if (id >= 0 && !repeats) atomicAdd(chosen + id, 1u);
    }
}

// The first words of a dispatch: that it has begun, and how many tokens it has.
template <LowShape S>
WEFT_FN void send_hello(const Block& team, const LowDispatchArgs& a, u64 wanted) {
    Header& header = own_share<S>(a.site).header;
    mark_sent(team, header, Phase::dispatch, wanted);
    if (team.lane() < S.ranks) {
        const u32 peer = team.lane();
        const Action planned = fault(header, Point::before_flag, peer, wanted);
        if (planned != Action::drop) {
            const u64 lie = planned == Action::lie ? 1ull << 40 : 0;
            LowInbox<S>& to = low_share<S>(a.site, peer).inbox;
            store_relaxed(&to.tokens[a.site.rank], tagged(wanted, a.tokens));
            store_release(&to.hello[a.site.rank],
                          make_flag(header.generation, a.site.descriptor, wanted) ^ lie);
        }
    }
    mark_published(team, header, Phase::dispatch, wanted);
}

// One entry of the batch, in its thread: the id, -1 where it names no expert or one that an earlier
// choice of the token names.
template <LowShape S>
WEFT_FN i32 keep_id(const LowDispatchArgs& a, TellScratch<S>& scratch, u32 token, u32 k,
                    bool valid) {
    Header& header = own_share<S>(a.site).header;
    const u32 i = threadIdx.x;
    i64 raw = -1;
    if (valid) raw = id_at(a.ids, a.ids_bytes, u64(token) * S.top_k + k);
    const i32 id = raw >= 0 && raw < i64(S.experts) ? i32(raw) : -1;
    if (id < 0 && raw != -1) refuse_id(header, a.site, S.experts, raw, token, k);
    scratch.id[i] = id;
    __syncthreads();
    bool repeats = false;
    for (u32 j = i - k; valid && j < i; ++j) repeats = repeats || (id >= 0 && scratch.id[j] == id);
    if (repeats) refuse_duplicate(header, a.site, token, k, id);
    const i32 kept = repeats ? -1 : id;
    scratch.kept[i] = kept;
    __syncthreads();
    return kept;
}

// What combine expects home, kept by the thread of a token's first choice.
template <LowShape S>
WEFT_FN void keep_expected(const LowDispatchArgs& a, const TellScratch<S>& scratch, u32 token) {
    u32 choices = 0, ranks = 0;
    for (u32 k = 0; k < S.top_k; ++k) {
        const i32 id = scratch.kept[threadIdx.x + k];
        if (id < 0) continue;
        choices |= 1u << k;
        ranks |= 1u << place_in<S>(a.placement, u32(id)).rank;
    }
    a.ledger.expected[2 * token] = choices;
    a.ledger.expected[2 * token + 1] = ranks;
}

template <LowShape S>
WEFT_FN void send_counts(const LowDispatchArgs& a, u64 wanted, const u32* chosen) {
    for (u32 expert = threadIdx.x; expert < S.experts; expert += blockDim.x) {
        const Place place = place_in<S>(a.placement, expert);
        store_relaxed(&low_share<S>(a.site, place.rank).inbox.count[a.site.rank][place.local],
                      tagged(wanted, chosen[expert]));
    }
}

// One thread's entry of the batch: a choice of a token, and what its expert's rank is to hear.
struct Told {
    u32 token, k, owner, word;
    i32 kept;
    bool valid;
};

// Everything that needs no peer; the first half of what a teller does.
template <LowShape S>
WEFT_FN Told prepare(const Block& team, const LowDispatchArgs& a, TellScratch<S>& scratch) {
    const u32 batch = team.lanes() / S.top_k, first = blockIdx.x * batch, i = team.lane();
    for (u32 e = i; e < S.experts; e += team.lanes()) scratch.chosen[e] = 0;
    __syncthreads();
    for (u32 token = i; token < first && token < a.tokens; token += team.lanes())
        tally<S>(a, token, scratch.chosen);
    Told told{.token = first + i / S.top_k,
              .k = i % S.top_k,
              .owner = S.ranks,
              .word = 0,
              .kept = -1,
              .valid = false};
    told.valid = i < batch * S.top_k && told.token < a.tokens;
    told.kept = keep_id<S>(a, scratch, told.token, told.k, told.valid);
    if (told.kept >= 0) {
        u32 within = scratch.chosen[told.kept];
        for (u32 j = 0; j < i - told.k; ++j) within += scratch.kept[j] == told.kept;
        const Place place = place_in<S>(a.placement, u32(told.kept));
        told.owner = place.rank;
        told.word = choice(place.local, within);
    }
    if (told.valid && told.k == 0) keep_expected<S>(a, scratch, told.token);
    return told;
}

// One entry to every rank: a choice to the expert's, nothing to the others.
template <LowShape S>
WEFT_FN void send_choice(const LowDispatchArgs& a, u64 wanted, const Told& told) {
#pragma unroll
    for (u32 i = 0; i < S.ranks; ++i) {
        const u32 peer = a.site.rank + i < S.ranks ? a.site.rank + i : a.site.rank + i - S.ranks;
        store_relaxed(&low_share<S>(a.site, peer).inbox.choices[a.site.rank][told.token][told.k],
                      tagged(wanted, told.owner == peer ? told.word : 0));
    }
}

// The other half: to every rank what it needs to know.
template <LowShape S>
WEFT_FN void tell(const Block& team, const LowDispatchArgs& a, u64 wanted, u32 tellers,
                  const Told& told, TellScratch<S>& scratch) {
    if (blockIdx.x == 0) send_hello<S>(team, a, wanted);
    if (told.valid) send_choice<S>(a, wanted, told);
    if (blockIdx.x != tellers - 1) return;
    __syncthreads();
    if (told.kept >= 0) atomicAdd(scratch.chosen + told.kept, 1u);
    __syncthreads();
    send_counts<S>(a, wanted, scratch.chosen);
}

}  // namespace weft
