// SPDX-License-Identifier: Apache-2.0
// Low-latency combine on a CPU.
#pragma once
#include <cstring>

#include <weft/lowlatency/dispatch_cpu.hpp>

namespace weft {

// Computes the returned row of one entry, or the sum of this rank's entries of a token.
template <LowLatencyShape S>
void make_row(const LowLatencyCombineArgs& a, const i32* position, const float* weights,
              u32 choices, u8* row) {
    const u8* y = static_cast<const u8*>(a.y);
    if constexpr (S.reduce == Reduce::receiver && !S.combine_fp8) {
        std::memcpy(row, y + u64(position[__builtin_ctz(choices)]) * S.out_bytes(), S.out_bytes());
    } else {
        float sum[S.hidden] = {};
        for (u32 left = choices; left != 0; left &= left - 1) {
            const u32 k = u32(__builtin_ctz(left));
            float x[S.hidden];
            read_block<S.dtype>(x, y + u64(position[k]) * S.out_bytes(), 0);
            for (u32 i = 0; i < S.hidden; ++i)
                sum[i] = S.reduce == Reduce::sender ? sum[i] + weights[k] * x[i] : x[i];
        }
        if constexpr (S.combine_fp8) {
            for (u32 at = 0; at < S.hidden; at += scale_columns)
                quantize_block<Quant::fp8>(
                    reinterpret_cast<const float (&)[scale_columns]>(sum[at]), at / scale_columns,
                    row, row + S.hidden);
        } else {
            Bits<S.dtype>* rounded = reinterpret_cast<Bits<S.dtype>*>(row);
            for (u32 i = 0; i < S.hidden; ++i) rounded[i] = narrow<S.dtype>(sum[i]);
        }
    }
}

template <LowLatencyShape S>
bool send_rows(const LowLatencyCombineArgs& a, const Progress& progress) {
    const u64 epoch = (progress.returned + 1) & epoch_mask;
    TraceRecord record;
    TraceRecorder recorder(Solo{}, record, true);
    if (!await_credits<S>(a.site, progress, Phase::combine)) return false;
    recorder.credited();
    for_living<S>(a.site, [&](u32 peer) {
        send_dispatch_id<S>(a, epoch, peer);
        return true;
    });
    alignas(16) u8 row[S.returned_vectors() * 16] = {};
    for (u32 i = 0; i < S.ranks; ++i) {
        const u32 source = (a.site.rank + i) % S.ranks;
        LowLatencyInbox<S>& owner = share_of<S>(a.site, source).inbox;
        for (u32 token = 0; token < u32(a.routing.source_tokens[source]); ++token) {
            const u64 slot = (u64(source) * S.tokens + token) * S.top_k;
            const i32* position = a.routing.position + slot;
            const float* weights = a.routing.weights + slot;
            u32 entries = 0;  // with an expert of this rank
            for (u32 k = 0; k < S.top_k; ++k) entries |= u32(position[k] >= 0) << k;
            for (u32 left = entries; left != 0; left &= left - 1) {
                const u32 which =
                    S.reduce == Reduce::sender ? a.site.rank : u32(__builtin_ctz(left));
                const u32 choices = S.reduce == Reduce::sender ? left : left & -left;
                make_row<S>(a, position, weights, choices, row);
                if constexpr (S.combine_fp8)
                    post_words<u64>(owner.returned_row(token, which), row, sizeof(row));
                else
                    post_row<S.dtype>(owner.returned_row(token, which), row, sizeof(row));
                recorder.worked();
                if (S.reduce == Reduce::sender) break;
            }
        }
    }
    recorder.ended(Solo{}, a.traces, Phase::combine, epoch, CtaRole::sender, 0, profiled_now());
    return true;
}

// Adds one returned row.
template <LowLatencyShape S> void add_row(float (&sum)[S.hidden], const u8* row, float weight) {
    float x[S.hidden];
    if constexpr (S.combine_fp8) {
        const float* scale = reinterpret_cast<const float*>(row + S.hidden);
        for (u32 i = 0; i < S.hidden; ++i) x[i] = from_e4m3(row[i]) * scale[i / scale_columns];
    } else {
        read_block<S.dtype>(x, row, 0);
    }
    for (u32 i = 0; i < S.hidden; ++i)
        sum[i] = S.reduce == Reduce::sender ? sum[i] + x[i] : sum[i] + weight * x[i];
}

// out[token] = its rows in order, weighted, in fp32, then `add`, rounded once.
template <LowLatencyShape S> bool sum_token(const LowLatencyCombineArgs& a, u64 epoch, u32 token) {
    LowLatencyShare<S>& own = own_share<S>(a.site);
    const auto expected = returned_rows<S>(a.routing, token);
    float sum[S.hidden] = {};
    for (u32 which = 0; which < S.returned_rows(); ++which) {
        if (!has(expected, which)) continue;
        alignas(16) u8 row[S.returned_vectors() * 16];
        const Wait wait{missing_rank<S>(a, token, which), Phase::combine, epoch,
                        epoch_before(epoch)};
        if (!receive_words<u64>(own.header, a.site, wait, own.inbox.returned_row(token, which), row,
                                sizeof(row)))
            return false;
        const u64 at = u64(token) * S.top_k + which;
        add_row<S>(sum, row, S.reduce == Reduce::receiver && a.weights ? a.weights[at] : 1.0f);
    }
    using Element = Bits<S.dtype>;
    if (a.add) add_block<S.dtype>(sum, static_cast<const Element*>(a.add) + u64(token) * S.hidden);
    Element* out = static_cast<Element*>(a.out) + u64(token) * S.hidden;
    for (u32 i = 0; i < S.hidden; ++i) out[i] = narrow<S.dtype>(sum[i]);
    return true;
}

// Clears the addresses, so that a GEMM that runs again before the next dispatch stores nothing.
template <LowLatencyShape S> void clear_dst_addrs(const LowLatencyCombineArgs& a) {
    for (u32 e = 0; e < a.own_experts; ++e)
        for (u32 row = 0; row < u32(a.counts[e]); ++row)
            a.routing.dst_addr[u64(e) * S.rows() + row] = 0;
}

template <LowLatencyShape S, PhasePart part = PhasePart::whole>
void low_latency_combine(const LowLatencyCombineArgs& a) {
    LowLatencyShare<S>& own = own_share<S>(a.site);
    const Progress progress = own.progress;
    if (own.header.state.failed != 0) return;
    const u64 start = now_ns();
    const u64 epoch =
        ((part == PhasePart::recv ? progress.combined : progress.returned) + 1) & epoch_mask;
    send_credits<S>(a.site, progress);
    if constexpr (part != PhasePart::recv) {
        mark_start(Solo{}, own.header, Phase::combine, epoch, start);
        if (fault(own.header, Point::combine_enter, a.site.rank, epoch) == Action::stay_away)
            return;
        fault(own.header, Point::before_ready, a.site.rank, epoch);
        if constexpr (S.gemm_push)
            clear_dst_addrs<S>(a);
        else if (!send_rows<S>(a, progress))
            return;
        own.progress.returned = epoch;
    }
    if constexpr (part != PhasePart::send) {
        fault(own.header, Point::before_read, a.site.rank, epoch);
        if (!S.gemm_push &&
            !for_living<S>(a.site, [&](u32 peer) { return same_dispatch<S>(a, epoch, peer); }))
            return;
        TraceRecord record;
        TraceRecorder recorder(Solo{}, record, true);
        for (u32 token = 0; token < a.tokens; ++token, recorder.worked())
            if (!sum_token<S>(a, epoch, token)) return;
        recorder.ended(Solo{}, a.traces, Phase::combine, epoch, CtaRole::receiver, 1,
                       profiled_now());
        own.progress.combined = epoch;
        keep_record(own.header, Phase::combine, epoch, start, a.tokens);
        mark_end(own.header, Phase::combine, epoch);
    }
}

}  // namespace weft
