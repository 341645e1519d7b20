// SPDX-License-Identifier: Apache-2.0
// Low-latency dispatch on a CPU: the same protocol and layout with a team of one thread.
#pragma once
#include <weft/device/row.hpp>
#include <weft/lowlatency/layout.cuh>

namespace weft {

// Calls visit(peer) for every living rank; stops and returns false when a visit returns false.
template <LowLatencyShape S, class Visit> bool for_living(const Site& site, Visit visit) {
    for (u32 peer = 0; peer < S.ranks; ++peer)
        if (has(own_share<S>(site).header.living, peer) && !visit(peer)) return false;
    return true;
}

// Copies a row without sentinels among its words.
template <DType D> void copy_canonical(u8* to, const u8* from, u32 bytes) {
    for (u32 i = 0; i < bytes; i += 4) {
        u32 word;
        std::memcpy(&word, from + i, 4);
        word = canonical<D>(word);
        std::memcpy(to + i, &word, 4);
    }
}

// Stores a row as FP8 blocks followed by their scales. If the recipe divides, a CPU rounds the
// quotient once, as Triton's interpreter does; Triton's kernels and dispatch.cuh compute it to two
// ulp (div_full).
template <LowLatencyShape S> void quantize_blocks(u8* to, float (&x)[S.hidden]) {
    for (u32 block = 0; block < S.blocks(); ++block) {
        float (&part)[S.group] = reinterpret_cast<float (&)[S.group]>(x[block * S.group]);
        const u32 amax = amax_bits_of(part);
        const BlockScale scale = scale_for<S>(amax);
        if constexpr (S.recipe == Recipe::triton_dist)
            for (float& each : part) each = each / divisor_of(scale.scale);
        store_block(part, scale.inverse, amax >= infinity_bits, to + block * S.group);
        std::memcpy(to + S.hidden + 4 * block, &scale.scale, 4);
    }
}

template <LowLatencyShape S> void load_token(const LowLatencyDispatchArgs& a, u32 token, u8* row) {
    constexpr u32 bytes = S.input_vectors() * 16;
    const u8* from = static_cast<const u8*>(a.x) + u64(token) * bytes;
    if constexpr (!S.quantises()) {
        copy_canonical<S.input_dtype()>(row, from, bytes);
    } else {
        float x[S.hidden];
        read_block<S.dtype>(x, from, 0);
        quantize_blocks<S>(row, x);
    }
    if constexpr (S.reduce == Reduce::sender)
        for (u32 k = 0; k < S.top_k; ++k) {
            const float weight = a.weights ? a.weights[u64(token) * S.top_k + k] : 1.0f;
            const u32 bits = canonical<DType::fp32>(std::bit_cast<u32>(weight));
            std::memcpy(row + (S.value_vectors() + S.scale_vectors()) * 16 + 4 * k, &bits, 4);
        }
}

// Reads the ids of one token, -1 for none. Repeated and out-of-range ids are reported and become
// -1.
template <LowLatencyShape S>
void read_choices(const LowLatencyDispatchArgs& a, u32 token, i32 (&ids)[S.top_k]) {
    Header& header = own_share<S>(a.site).header;
    for (u32 k = 0; k < S.top_k; ++k) {
        const i64 raw = id_at(a.ids, a.ids_bytes, u64(token) * S.top_k + k);
        ids[k] = known_id<S>(a, token, k);
        if (ids[k] < 0 && raw != -1) refuse_id(header, a.site, S.experts, raw, token, k);
        for (u32 j = 0; j < k && ids[k] >= 0; ++j)
            if (ids[j] == ids[k]) {
                refuse_duplicate(header, a.site, token, k, ids[k]);
                ids[k] = -1;
            }
    }
}

// Sends one token: its choices to every living rank, its row to the ranks that hold one of its
// experts.
template <LowLatencyShape S>
void send_token(const LowLatencyDispatchArgs& a, u64 epoch, u32 token, u32 (&mask)[S.experts]) {
    Header& header = own_share<S>(a.site).header;
    i32 ids[S.top_k];
    read_choices<S>(a, token, ids);
    u32 choices[S.top_k] = {}, owner[S.top_k] = {}, kept = 0;
    RankSet ranks{};
    for (u32 k = 0; k < S.top_k; ++k) {
        owner[k] = S.ranks;
        if (ids[k] < 0) continue;
        const ExpertLocation location = locate_expert<S>(a.placement, u32(ids[k]));
        if (!has(header.living, location.rank)) {
            refuse_gone(header, a.site, location.rank, ids[k], token, k);
            continue;
        }
        owner[k] = location.rank;
        choices[k] = location.local + 1;
        mask[ids[k]] |= 1u << token % chunk_tokens;
        kept |= 1u << k;
        add(ranks, location.rank);
    }
    save_returned_rows(a.routing, token, kept, ranks);
    alignas(16) u8 row[S.sent_vectors() * 16] = {};
    if (kept != 0) load_token<S>(a, token, row);
    for (u32 i = 0; i < S.ranks; ++i) {
        const u32 peer = (a.site.rank + i) % S.ranks;
        if (!has(header.living, peer)) continue;
        LowLatencyInbox<S>& to = share_of<S>(a.site, peer).inbox;
        for (u32 k = 0; k < S.top_k; ++k)
            store_relaxed(&to.choices[a.site.rank][token][k],
                          tagged(epoch, owner[k] == peer ? choices[k] : 0));
        if (has(ranks, peer)) post_words<u64>(to.sent_row(a.site.rank, token), row, sizeof(row));
    }
}

// Sends the masks of a chunk to the experts' ranks.
template <LowLatencyShape S>
void send_masks(const LowLatencyDispatchArgs& a, u64 epoch, u32 chunk,
                const u32 (&mask)[S.experts]) {
    for (u32 expert = 0; expert < S.experts; ++expert) {
        const ExpertLocation location = locate_expert<S>(a.placement, expert);
        if (!has(own_share<S>(a.site).header.living, location.rank)) continue;
        LowLatencyInbox<S>& to = share_of<S>(a.site, location.rank).inbox;
        store_relaxed(&to.token_masks[a.site.rank][chunk][location.local],
                      tagged(epoch, mask[expert]));
    }
}

// Sends the first words of a dispatch: the flag that it has begun, and its token count. They order
// nothing, and no later read depends on them.
template <LowLatencyShape S> void send_dispatch_begun(const LowLatencyDispatchArgs& a, u64 epoch) {
    Header& header = own_share<S>(a.site).header;
    header.call = a.call;
    mark_sent(Solo{}, header, Phase::dispatch, epoch);
    for_living<S>(a.site, [&](u32 peer) {
        const Action planned = fault(header, Point::before_flag, peer, epoch);
        if (planned == Action::drop) return true;
        const u64 lie = planned == Action::lie ? 1ull << 40 : 0;
        LowLatencyInbox<S>& to = share_of<S>(a.site, peer).inbox;
        store_relaxed(&to.tokens[a.site.rank], tagged(epoch, a.tokens));
        store_relaxed(&to.dispatch_begun[a.site.rank],
                      make_flag(header.generation, u32(a.call.hash), epoch) ^ lie);
        return true;
    });
    mark_published(Solo{}, header, Phase::dispatch, epoch);
}

template <LowLatencyShape S>
bool await_credits(const Site& site, const Progress& progress, Phase phase) {
    return for_living<S>(
        site, [&](u32 peer) { return await_credit<S, true>(site, progress, phase, peer); });
}

template <LowLatencyShape S>
bool send_tokens(const LowLatencyDispatchArgs& a, const Progress& progress, u64 epoch) {
    TraceRecord record;
    TraceRecorder recorder(Solo{}, record, true);
    if (!await_credits<S>(a.site, progress, Phase::dispatch)) return false;
    recorder.credited();
    send_dispatch_begun<S>(a, epoch);
    for (u32 chunk = 0; chunk < chunks_of(a.tokens); ++chunk) {
        u32 mask[S.experts] = {};
        const u32 first = chunk * chunk_tokens, rest = a.tokens - first;
        for (u32 i = 0; i < (rest < chunk_tokens ? rest : chunk_tokens); ++i)
            send_token<S>(a, epoch, first + i, mask);
        send_masks<S>(a, epoch, chunk, mask);
    }
    recorder.ended(Solo{}, a.traces, Phase::dispatch, epoch, CtaRole::sender, 0, profiled_now());
    fault(own_share<S>(a.site).header, Point::after_payload, a.site.rank, epoch);
    return true;
}

// Waits for a source's mask of a chunk for one of this rank's experts.
template <LowLatencyShape S>
bool await_masks(const LowLatencyDispatchArgs& a, u64 epoch, u32 source, u32 tokens, u32 chunk,
                 u32 e, u32& bits) {
    LowLatencyShare<S>& own = own_share<S>(a.site);
    if (!await_tagged(own.header, a.site, Phase::dispatch, &own.inbox.token_masks[source][chunk][e],
                      source, epoch, bits))
        return false;
    bits &= valid_bits(tokens, chunk);
    return true;
}

// Receives the token count of each living source, and computes its first row of each expert.
template <LowLatencyShape S>
bool receive_metadata(const LowLatencyDispatchArgs& a, u64 epoch, u32 (&tokens)[S.ranks],
                      u32 (&first)[S.ranks][S.local]) {
    LowLatencyShare<S>& own = own_share<S>(a.site);
    const bool received = for_living<S>(a.site, [&](u32 source) {
        fault(own.header, Point::before_poll, source, epoch);
        if (!await_dispatch_begun<S>(a, epoch, source)) return false;
        return await_last_token<S>(a, epoch, source, tokens[source]);
    });
    if (!received) return false;
    for (u32 source = 0; source < S.ranks; ++source)
        a.routing.source_tokens[source] = i32(tokens[source]);
    for (u32 e = 0; e < a.own_experts; ++e) {
        u32 total = 0;
        for (u32 source = 0; source < S.ranks; ++source) {
            first[source][e] = total;
            for (u32 chunk = 0; chunk < chunks_of(tokens[source]); ++chunk) {
                u32 bits;
                if (!await_masks<S>(a, epoch, source, tokens[source], chunk, e, bits)) return false;
                total += bits_in(bits);
            }
            i32* range = a.ranges + 2 * (e * S.ranks + source);
            range[0] = i32(first[source][e]);
            range[1] = i32(total - first[source][e]);
        }
        a.counts[e] = i32(total);
    }
    return true;
}

template <LowLatencyShape S>
void unpack_row(const LowLatencyDispatchArgs& a, const u8* from, u32 e, u32 row) {
    constexpr u32 bytes = S.value_vectors() * 16;
    std::memcpy(static_cast<u8*>(a.rows) + (u64(e) * S.rows() + row) * bytes, from, bytes);
    for (u32 block = 0; block < S.blocks(); ++block) {
        u32 bits;
        std::memcpy(&bits, from + bytes + 4 * block, 4);
        put_scale<S>(a.scales, e, row, block, bits);
    }
}

// Receives one token of one source and stores it at its experts' rows. first: row of the first
// token of its chunk, for each of this rank's experts; bits: the masks of the chunk.
template <LowLatencyShape S>
bool receive_token(const LowLatencyDispatchArgs& a, u64 epoch, u32 source, u32 token,
                   const u32 (&first)[S.local], const u32 (&bits)[S.local]) {
    LowLatencyShare<S>& own = own_share<S>(a.site);
    const Wait wait{source, Phase::dispatch, epoch, epoch_before(epoch)};
    u32 choices[S.top_k], any = 0;
    for (u32 k = 0; k < S.top_k; ++k) {
        u64* at = &own.inbox.choices[source][token][k];
        if (!await_tagged(own.header, a.site, Phase::dispatch, at, source, epoch, choices[k]))
            return false;
        any |= choices[k];
    }
    alignas(16) u8 row[S.sent_vectors() * 16];
    if (any != 0 && !receive_words<u64>(own.header, a.site, wait, own.inbox.sent_row(source, token),
                                        row, sizeof(row)))
        return false;
    const u64 slot = (u64(source) * S.tokens + token) * S.top_k;
    for (u32 k = 0; k < S.top_k; ++k) {
        const i32 expert = local_of(choices[k], a.own_experts);
        ExpertRow place{-1, 0};
        if (expert >= 0) place = expert_row(expert, token, first[expert], bits[expert]);
        if constexpr (!S.gemm_push) a.routing.position[slot + k] = -1;
        if (place.expert < 0 || place.row >= S.rows()) continue;
        const u32 e = u32(place.expert);
        const u64 at = u64(e) * S.rows() + place.row;
        a.source[at] = i32(source * S.tokens + token);
        if constexpr (S.gemm_push)
            a.routing.dst_addr[at] = dst_addr_of<S>(a.site, source, token, k);
        else
            a.routing.position[slot + k] = i32(at);
        unpack_row<S>(a, row, e, place.row);
        if constexpr (S.reduce == Reduce::sender)
            std::memcpy(&a.routing.weights[slot + k],
                        row + (S.value_vectors() + S.scale_vectors()) * 16 + 4 * k, 4);
    }
    return true;
}

// Receives all tokens of one source, chunk by chunk; `first` advances with them.
template <LowLatencyShape S>
bool receive_source(const LowLatencyDispatchArgs& a, u64 epoch, u32 source, u32 tokens,
                    u32 (&first)[S.local], TraceRecorder& recorder) {
    for (u32 chunk = 0; chunk < chunks_of(tokens); ++chunk) {
        u32 bits[S.local] = {};
        for (u32 e = 0; e < a.own_experts; ++e)
            if (!await_masks<S>(a, epoch, source, tokens, chunk, e, bits[e])) return false;
        const u32 start = chunk * chunk_tokens, end = start + chunk_tokens;
        for (u32 token = start; token < (tokens < end ? tokens : end); ++token, recorder.worked())
            if (!receive_token<S>(a, epoch, source, token, first, bits)) return false;
        for (u32 e = 0; e < a.own_experts; ++e) first[e] += bits_in(bits[e]);
    }
    return true;
}

template <LowLatencyShape S> bool receive_tokens(const LowLatencyDispatchArgs& a, u64 epoch) {
    TraceRecord record;
    TraceRecorder recorder(Solo{}, record, true);
    u32 tokens[S.ranks] = {}, first[S.ranks][S.local] = {};
    if (!receive_metadata<S>(a, epoch, tokens, first)) return false;
    recorder.learned();
    for (u32 i = 0; i < S.ranks; ++i) {
        const u32 source = (a.site.rank + i) % S.ranks;
        const u64 since = recorder.waits();
        if (!receive_source<S>(a, epoch, source, tokens[source], first[source], recorder))
            return false;
        recorder.waited(since, source);
    }
    recorder.ended(Solo{}, a.traces, Phase::dispatch, epoch, CtaRole::receiver, 1, profiled_now());
    return true;
}

// Sends this rank's credits before any wait, because peers wait for them.
template <LowLatencyShape S> void send_credits(const Site& site, const Progress& progress) {
    for_living<S>(site, [&](u32 peer) {
        send_credit<S>(site, progress, Phase::dispatch, peer);
        send_credit<S>(site, progress, Phase::combine, peer);
        return true;
    });
}

template <LowLatencyShape S, PhasePart part = PhasePart::whole>
void low_latency_dispatch(const LowLatencyDispatchArgs& a) {
    LowLatencyShare<S>& own = own_share<S>(a.site);
    const Progress progress = own.progress;
    if (own.header.state.failed != 0) return;
    const u64 start = now_ns();
    const u64 epoch =
        ((part == PhasePart::recv ? progress.received : progress.sent) + 1) & epoch_mask;
    send_credits<S>(a.site, progress);
    if constexpr (part != PhasePart::recv) {
        mark_start(Solo{}, own.header, Phase::dispatch, epoch, start);
        if (fault(own.header, Point::dispatch_enter, a.site.rank, epoch) == Action::stay_away)
            return;
        if (!send_tokens<S>(a, progress, epoch)) return;
        own.progress.sent = epoch;
    }
    if constexpr (part != PhasePart::send) {
        if (!receive_tokens<S>(a, epoch)) return;
        if constexpr (S.gemm_push)  // on behalf of the kernels that store there
            if (!await_credits<S>(a.site, progress, Phase::combine)) return;
        own.progress.received = epoch;
        keep_record(own.header, Phase::dispatch, epoch, start, a.tokens);
        mark_end(own.header, Phase::dispatch, epoch);
    }
}

}  // namespace weft
