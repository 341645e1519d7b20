// SPDX-License-Identifier: Apache-2.0
// The fused all-reduce: the layout of a share, and the arguments of its entries.
//
// The data is its own flag. Every 32-bit word of an empty slot holds the sentinel, which senders
// never write, so a vector has arrived when no word of it is the sentinel. The reader restores the
// sentinels. Each rank also sends a call word that identifies its call, so that ranks whose calls
// differ are detected.
//
// docs/design/protocol.md explains why rows to be summed need two buffers, and summed rows one.
#pragma once
#include <weft/device/sentinel.cuh>
#include <weft/device/wait.cuh>

namespace weft {

constexpr Phase all_reduce_phase = Phase(4);  // in error records

// Rank that adds the residual and computes the statistics of a row in twoshot: the owner, which
// sums the row, or each receiver, with its own residual, weight and scale.
enum class EpilogueAt : u32 { owner, receiver };

// Behaviour after ranks have exited: the sum fails, or it continues over the living ranks. Only
// oneshot can continue, because in twoshot each rank owns tokens.
enum class Missing : u32 { error, drop };

// Template parameters of the entries. Mirrored by ReduceConfig in allreduce/config.py.
struct Reduction {
    u32 ranks;   // 1..72
    u32 tokens;  // maximum of one call
    u32 direct;  // maximum of one call of oneshot
    u32 hidden;
    DType dtype;
    EpilogueAt epilogue_at;
    Missing missing;

    constexpr u32 element_bytes() const { return dtype == DType::fp32 ? 4 : 2; }
    constexpr u32 row_bytes() const { return hidden * element_bytes(); }
    constexpr u32 vectors() const { return row_bytes() / 16; }
    constexpr u32 width() const { return 16 / element_bytes(); }  // elements of a vector
    constexpr u32 partials() const { return (vectors() + 31) / 32; }
    constexpr u32 peers() const { return ranks - 1; }
    // Slots of an inbox, by peer and by row. C++ has no arrays of length 0, so a rank without peers
    // has one unused slot of each kind.
    constexpr u32 peer_slots() const { return ranks == 1 ? 1 : peers(); }
    constexpr u32 direct_slots() const { return ranks == 1 ? 1 : direct; }
    constexpr u32 owned_slots() const { return ranks == 1 ? 1 : owned(); }
    constexpr u32 owned() const { return (tokens + ranks - 1) / ranks; }
    constexpr u32 call_words() const { return (ranks + 7) / 8 * 8; }  // of a side: whole lines
};

enum class Backend : u32 { oneshot = 1, twoshot = 2, bulk = 3 };
enum class Coding : u32 { none = 0, fixed = 1, token = 2, group = 3, group_ue8m0 = 4 };
// The slot that a wait polled; ErrorRecord.observed.
enum class Slot : u32 { direct = 1, part = 2, whole = 3, trailer = 4, call = 5 };

// The statistics of a summed row, from its owner. Many threads read them, so no thread could
// restore sentinels. Instead, each u64 of the trailer, which is single-copy atomic, has a tag of 31
// bits of the epoch and one bit that is not set in zeroed memory.
struct alignas(16) Trailer {
    u32 rstd, rstd_tag;  // bits of 1 / rms
    u32 peak, peak_tag;  // bits of the largest |row * weight|
};
WEFT_FN constexpr u32 trailer_tag(u64 epoch) { return u32(epoch) | 0x80000000u; }

// Written by peers. Peer p's slots at rank r have index p, or p - 1 if p > r: no rank has slots at
// itself.
template <Reduction R> struct ReductionInbox {
    alignas(128) u64 call[2][R.call_words()];  // by side: call word of each peer
    alignas(128) u8
        direct[2][R.peer_slots()][R.direct_slots()][R.row_bytes()];  // oneshot: every peer's rows
    alignas(128)
        u8 part[2][R.peer_slots()][R.owned_slots()][R.row_bytes()];  // peers' rows of own tokens
    alignas(128)
        u8 whole[R.peer_slots()][R.owned_slots()][R.row_bytes()];   // summed rows of peers' tokens
    alignas(128) Trailer trailer[R.peer_slots()][R.owned_slots()];  // EpilogueAt::owner
};

template <Reduction R> struct ReductionShare {
    Header header;
    ReductionInbox<R> inbox;
};

// The ranks whose rows are summed. If a sum needs all of them, the set is a constant.
template <Reduction R> WEFT_FN RankSet summed_ranks(const Header& header) {
    if constexpr (R.missing == Missing::drop) return header.living;
    constexpr RankSet all = ranks_below(R.ranks);
    return all;
}
template <Reduction R> WEFT_FN bool is_summed(RankSet summed, u32 rank) {
    return R.missing != Missing::drop || has(summed, rank);
}

// Two elements of 16 bits, or one of 32, that do not change a sum: -0, because -0 + +0 is +0.
template <DType D> constexpr u32 neutral_word = D == DType::fp32 ? 0x80000000u : 0x80008000u;

// The buffer that a call uses, of two.
WEFT_FN constexpr u32 side_of(u64 epoch) { return u32(epoch & 1); }

// The arguments of one call. A null pointer is an output that is not requested, or an absent input.
struct ReduceArgs {
    Site site;
    const void* x;         // [tokens, hidden]; null: computed from `rows`
    const void* residual;  // [tokens, hidden]
    const void* weight;    // [hidden] of the row's type, or fp32
    void* out;             // the rounded sum
    void* residual_out;    // the sum plus residual, rounded
    void* norm_out;
    void* quant_out;     // e4m3
    void* scale_out;     // fp32, or UE8M0 bytes packed by four
    const float* scale;  // Coding::fixed: [1]
    const void* rows;    // [row_limit, hidden]: experts' results
    const i32* index;    // [tokens, top_k] of indices into rows; -1 for none
    const void* scales;  // [tokens, top_k] of the row's type, or fp32; null means 1
    const void* shared;  // [tokens, hidden], added last
    CallRecord call;     // the call word has its hash
    u32 row_limit, top_k;
    u32 tokens;
    float eps, weight_bias;
    u32 weight_is_fp32, scales_are_fp32;
    Coding coding;
    u32 scale_stride;             // Coding::group_ue8m0: int32 words from one column to the next
    u32 pushers;                  // twoshot: CTAs that push and then finish rows; all others sum
    float routed_scaling_factor;  // of the experts' sum, before `shared` is added
};

// Whether peers receive the sum and add the residual themselves. Otherwise they receive the sum
// plus the residual, from which they cannot compute the sum.
template <Reduction R> WEFT_FN bool sends_sum(const ReduceArgs& a) {
    return R.epilogue_at == EpilogueAt::receiver || a.out != nullptr;
}

template <Reduction R> WEFT_FN ReductionShare<R>& share(const Site& site, u32 rank) {
    return *reinterpret_cast<ReductionShare<R>*>(site.base + rank * site.stride);
}
template <Reduction R> WEFT_FN ReductionShare<R>& own_share(const Site& site) {
    return share<R>(site, site.rank);
}

// The index of `peer`'s slots at `rank`.
WEFT_FN constexpr u32 slot_index(u32 rank, u32 peer) { return peer - (peer > rank); }

// The call word: 24 bits of the epoch and 40 of the call's hash.
WEFT_FN constexpr u64 call_word(u64 epoch, u64 hash) { return epoch << 40 | (hash & epoch_mask); }

// Whether the peer's call word is of the same epoch but another call; 0 is no call word.
WEFT_FN bool disagrees(u64 seen, u64 own) {
    return seen != own && seen != 0 && seen >> 40 == own >> 40;
}

WEFT_FN void fail_call(Header& header, const Site& site, u32 peer, u64 word, u64 seen) {
    fail_call(header, site, Code::geometry_mismatch, peer, all_reduce_phase, word, seen);
}

// The slot that a wait polls, and the start of the wait.
struct SlotWait {
    Slot slot;
    u32 peer, token, vector;
    u64 start = 0;
};

// A peer whose call word differs from this rank's, or R.ranks. A wait checks all peers, because the
// peer that it waits for may itself wait for the one whose call differs.
template <Reduction R>
WEFT_FN u32 mismatched_peer(const Site& site, u64 epoch, u64 word, u64& seen) {
    u64* const words = own_share<R>(site).inbox.call[side_of(epoch)];
    for (u32 peer = 0; peer < R.ranks; ++peer) {
        seen = load_relaxed(&words[peer]);
        if (peer != site.rank && disagrees(seen, word)) return peer;
    }
    return R.ranks;
}

// The slow path of a wait for data; true ends the wait. In addition to check_wait, it detects peers
// that have made another call.
template <Reduction R>
WEFT_SLOW_FN bool wait_failed(const Site& site, u64 epoch, u64 hash, SlotWait& wait) {
    ReductionShare<R>& own = own_share<R>(site);
    if (wait.start == 0) wait.start = now_ns();
    const u64 word = call_word(epoch, hash);
    u64 seen;
    if (const u32 mismatched = mismatched_peer<R>(site, epoch, word, seen); mismatched != R.ranks) {
        fail_call(own.header, site, mismatched, word, seen);
        return true;
    }
    const Wait what{wait.peer, all_reduce_phase, epoch, u64(wait.slot)};
    const WaitResult result = check_wait(own.header, site, what, wait.start);
    if (result.code == Code::ok) return false;
    fail(own.header, site,
         {.code = u32(result.code),
          .peer = result.culprit,
          .phase = u32(all_reduce_phase),
          .expected = epoch,
          .observed = u64(wait.slot),
          .elapsed_ns = now_ns() - wait.start,
          .token = wait.token,
          .index = wait.vector,
          .reported_by = result.reported_by});
    return true;
}

// Sends this call's word to a peer.
template <Reduction R>
WEFT_FN void send_call_word(const Site& site, u64 epoch, u64 hash, u32 peer) {
    store_relaxed(&share<R>(site, peer).inbox.call[side_of(epoch)][site.rank],
                  call_word(epoch, hash));
}

// Waits for a peer's call word; false if the calls differ or the word does not arrive.
// `seen` may have been read early, off the critical path.
template <Reduction R>
WEFT_SLOW_FN bool same_call(const Site& site, u64 epoch, u64 hash, u32 peer, u64 seen) {
    ReductionShare<R>& own = own_share<R>(site);
    const u64 word = call_word(epoch, hash);
    SlotWait wait{.slot = Slot::call, .peer = peer, .token = 0, .vector = 0};
    for (u32 polls = 1; seen != word; ++polls) {
        if (disagrees(seen, word)) {
            fail_call(own.header, site, peer, word, seen);
            return false;
        }
        if (polls % polls_per_check == 0 && wait_failed<R>(site, epoch, hash, wait)) return false;
        relax(polls);
        seen = load_relaxed(&own.inbox.call[side_of(epoch)][peer]);
    }
    return true;
}

// The row of `rows` for an index, or row_limit for none. An out-of-range index is reported here and
// never becomes an address.
template <Reduction R>
WEFT_FN u32 source_row(const ReduceArgs& a, i32 index, u32 token, u32 k, bool reports) {
    if (u32(index) < a.row_limit) return u32(index);
    if (index != -1 && reports)
        refuse(own_share<R>(a.site).header, a.site,
               {.code = u32(Code::bad_row_index),
                .phase = u32(all_reduce_phase),
                .expected = a.row_limit,
                .observed = u64(i64(index)),
                .token = token,
                .index = k});
    return a.row_limit;
}

}  // namespace weft
