// SPDX-License-Identifier: Apache-2.0
// The metadata of a low-latency dispatch: the masks of tokens by expert, which metadata CTAs send,
// and with each row its choices among the receiver's experts. Masks need no counters, so the CTAs
// are independent.
#pragma once
#include <weft/lowlatency/rank_state.cuh>

namespace weft {

constexpr u32 max_threads = 256, min_threads = 128;  // of a CTA of the low-latency kernels
static_assert(max_ranks + warp_lanes <= min_threads, "a lane for each peer, also after one warp");

template <LowLatencyShape S> struct MetadataScratch {
    u32 mask[S.experts];  // bit t: by token t of the chunk
};

template <LowLatencyShape S>
WEFT_FN void clear_masks(const Block& team, MetadataScratch<S>& scratch) {
    for (u32 e = team.lane(); e < S.experts; e += team.lanes()) scratch.mask[e] = 0;
    __syncthreads();
}

// Builds the masks of a metadata CTA's chunk. An expert that a token names twice gets one bit.
template <LowLatencyShape S>
WEFT_FN void build_masks(const Block& team, const LowLatencyDispatchArgs& a, u32 chunk,
                         MetadataScratch<S>& scratch) {
    for (u32 i = team.lane(); i < chunk_tokens * S.top_k; i += team.lanes()) {
        const u32 bit = i / S.top_k, token = chunk * chunk_tokens + bit;
        if (token >= a.tokens) return;
        const i32 id = known_id<S>(a, token, i % S.top_k);
        if (id >= 0) atomicOr(scratch.mask + id, 1u << bit);
    }
}

// Sends the first word of a dispatch, by one lane to one peer: its token count, for which all
// receivers wait. Returns the fault that is planned for the flag that follows.
template <LowLatencyShape S>
WEFT_FN Action send_token_count(const LowLatencyDispatchArgs& a, u64 epoch, u32 peer) {
    const Action planned = fault(own_share<S>(a.site).header, Point::before_flag, peer, epoch);
    if (planned != Action::drop)
        store_relaxed(&share_of<S>(a.site, peer).inbox.tokens[a.site.rank],
                      tagged(epoch, a.tokens));
    return planned;
}

// Sends the flag that a dispatch has begun. It orders nothing; only the coordinator reads it.
template <LowLatencyShape S>
WEFT_FN void send_dispatch_begun(const LowLatencyDispatchArgs& a, u64 epoch, u32 peer,
                                 Action planned) {
    if (planned == Action::drop) return;
    const u64 lie = planned == Action::lie ? 1ull << 40 : 0;
    const u32 generation = own_share<S>(a.site).header.generation;
    store_relaxed(&share_of<S>(a.site, peer).inbox.dispatch_begun[a.site.rank],
                  make_flag(generation, u32(a.call.hash), epoch) ^ lie);
}

template <LowLatencyShape S>
WEFT_FN void send_metadata(const Block& team, const LowLatencyDispatchArgs& a,
                           const RankState& state, u64 epoch, u32 chunk,
                           const MetadataScratch<S>& scratch) {
    Header& header = own_share<S>(a.site).header;
    const bool announces = chunk == 0 && state.is_living_peer<S>(team.lane());
    Action planned = Action::drop;
    if (announces) planned = send_token_count<S>(a, epoch, team.lane());
    for (u32 expert = team.lane(); expert < S.experts; expert += team.lanes()) {
        const ExpertLocation location = locate_expert<S>(a.placement, expert);
        if (!has(state.living, location.rank)) continue;
        LowLatencyInbox<S>& to = share_of<S>(a.site, location.rank).inbox;
        store_relaxed(&to.token_masks[a.site.rank][chunk][location.local],
                      tagged(epoch, scratch.mask[expert]));
    }
    if (chunk != 0) return;
    if (team.lane() == 0) header.call = a.call;
    mark_sent(team, header, Phase::dispatch, epoch);
    if (announces) send_dispatch_begun<S>(a, epoch, team.lane(), planned);
    mark_published(team, header, Phase::dispatch, epoch);
}

// One warp per token, lane k for entry k: sends to every living rank which of its experts are
// chosen, reports invalid ids, and records which rows combine will return.
template <LowLatencyShape S>
WEFT_FN void send_choices(const LowLatencyDispatchArgs& a, RankSet living, u64 epoch, u32 token,
                          i32 id) {
    Header& header = own_share<S>(a.site).header;
    const u32 lane = threadIdx.x % warp_lanes;
    if (lane < S.top_k && id < 0) {
        const i64 raw = id_at(a.ids, a.ids_bytes, u64(token) * S.top_k + lane);
        if (raw != -1) refuse_id(header, a.site, S.experts, raw, token, lane);
    }
    const u32 same = __match_any_sync(all_lanes, id);
    const bool repeats = id >= 0 && (same & ((1u << lane) - 1)) != 0;
    if (repeats) refuse_duplicate(header, a.site, token, lane, id);
    bool kept = id >= 0 && !repeats;
    ExpertLocation location{S.ranks, 0};
    if (kept) location = locate_expert<S>(a.placement, u32(id));
    if (kept && !has(living, location.rank)) {
        refuse_gone(header, a.site, location.rank, id, token, lane);
        kept = false;
    }
    if (lane < S.top_k)
#pragma unroll 8
        for (u32 i = 0; i < S.ranks; ++i) {
            const u32 peer = next_rank<S>(a.site.rank, i);
            if (!has(living, peer)) continue;
            store_relaxed(&share_of<S>(a.site, peer).inbox.choices[a.site.rank][token][lane],
                          tagged(epoch, location.rank == peer ? location.local + 1 : 0));
        }
    const u32 choices = __ballot_sync(all_lanes, kept);
    const RankSet ranks = union_of_lanes(kept ? only(location.rank) : RankSet{});
    if (lane == 0) save_returned_rows(a.routing, token, choices, ranks);
}

}  // namespace weft
