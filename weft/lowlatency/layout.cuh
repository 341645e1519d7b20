// SPDX-License-Identifier: Apache-2.0
// The low-latency all-to-all, with flag-in-data. A sender stores a token's row into the inbox of
// each destination rank, and nothing else. The receiver polls the row until no word of it is the
// sentinel, copies it and restores the sentinel. No counter, flag or fence is needed, and each row
// is received as it arrives.
//
// Why one inbox is enough: a rank stores into a peer's inbox only after that peer's credit, a flag
// that the peer releases at the start of its next operation, when it has read all rows and restored
// the sentinels. Every rank makes the same calls, so there is no cycle of credits and calls.
// Dispatched and returned rows have separate slots: if dispatch and combine alternate, a credit is
// one operation old when it is needed, and no rank waits for it (docs/design/kernels.md,
// models/spin/lowlatency.pml).
#pragma once
#include <weft/device/quantize.cuh>
#include <weft/device/sentinel.cuh>
#include <weft/lowlatency/trace.cuh>

namespace weft {

enum class Scales : u32 { fp32_row = 0, fp32_col = 1, ue8m0 = 2 };
// The arithmetic that quantises a block to FP8: weft's own (device/quantize.cuh), or that of a
// library that weft.compat imitates. quantised: the input rows of a dispatch are FP8 already,
// because they arrived from another host: values, then scales in fp32, padded to whole vectors.
enum class Recipe : u32 { weft = 0, deep_ep = 1, triton_dist = 2, quantised = 3 };

// A tagged word has the epoch of its round: epoch 40 | value 24. All ones is never written.
constexpr u32 tagged_bits = 24;
WEFT_FN constexpr u64 tagged(u64 epoch, u32 value) { return epoch << tagged_bits | value; }
WEFT_FN constexpr u32 value_of(u64 word) { return u32(word) & ((1u << tagged_bits) - 1); }
WEFT_FN constexpr bool is_of(u64 word, u64 epoch) {
    return word >> tagged_bits == (epoch & epoch_mask) && word != sentinel_pair;
}

// The epoch that an error reports for a word that has not arrived: the one that the word holds.
WEFT_FN constexpr u64 epoch_before(u64 epoch) { return (epoch - 1) & epoch_mask; }
WEFT_FN constexpr u64 epoch_in(u64 word, u64 epoch) {
    return word == sentinel_pair ? epoch_before(epoch) : word >> tagged_bits;
}

// A source sends its choices by expert, as masks: one bit for each of `chunk_tokens` tokens. So
// senders need no counters, and the receiver gets both counts and offsets from the masks.
constexpr u32 chunk_tokens = tagged_bits;
WEFT_FN constexpr u32 chunks_of(u32 tokens) { return (tokens + chunk_tokens - 1) / chunk_tokens; }

// The bits of one chunk that are tokens of a source with `tokens` tokens.
WEFT_FN constexpr u32 valid_bits(u32 tokens, u32 chunk) {
    const u32 rest = tokens > chunk * chunk_tokens ? tokens - chunk * chunk_tokens : 0;
    return rest < chunk_tokens ? (1u << rest) - 1 : (1u << chunk_tokens) - 1;
}

// One shape specialises every kernel. All ranks use equal shapes; creation verifies it.
struct LowLatencyShape {
    u32 ranks, tokens, top_k, experts;
    u32 local;  // largest number of experts of a rank
    u32 hidden;
    DType dtype;
    u32 group;  // columns that share a scale; 0: rows are not quantised
    Scales scales;
    Reduce reduce;
    bool combine_fp8;  // returned rows are FP8, one scale per 128 columns
    bool gemm_push;    // the kernel that computes a row stores it at its owner
    bool mapped;       // a table maps experts to ranks
    Recipe recipe;     // of dispatched rows; returned rows always use weft's

    constexpr u32 rows() const { return ranks * tokens; }  // of an expert, at most
    constexpr u32 padded_rows() const { return (rows() + 3) / 4 * 4; }
    constexpr u32 out_bytes() const { return hidden * (dtype == DType::fp32 ? 4 : 2); }
    constexpr u32 blocks() const { return group == 0 ? 0 : hidden / group; }
    // A dispatched row in 16-byte vectors: values, scales, weights.
    constexpr u32 value_vectors() const { return (group == 0 ? out_bytes() : hidden) / 16; }
    constexpr u32 scale_vectors() const { return (blocks() + 3) / 4; }
    constexpr bool quantises() const { return group != 0 && recipe != Recipe::quantised; }
    // An input row, in 16-byte vectors.
    constexpr u32 input_vectors() const {
        return recipe == Recipe::quantised ? value_vectors() + scale_vectors() : out_bytes() / 16;
    }
    constexpr DType input_dtype() const {
        return recipe == Recipe::quantised ? DType::fp32 : dtype;
    }
    constexpr u32 weight_vectors() const { return reduce == Reduce::sender ? (top_k + 3) / 4 : 0; }
    constexpr u32 sent_vectors() const {
        return value_vectors() + scale_vectors() + weight_vectors();
    }
    // A returned row: values, or FP8 and scales. A token has one per entry of its top k, or one per
    // rank.
    constexpr u32 returned_vectors() const {
        return combine_fp8 ? hidden / 16 + (hidden / scale_columns + 3) / 4 : out_bytes() / 16;
    }
    constexpr u32 returned_rows() const { return reduce == Reduce::sender ? ranks : top_k; }
    constexpr u64 sent_bytes() const { return u64(rows()) * sent_vectors() * 16; }
    constexpr u64 returned_bytes() const {
        return u64(tokens) * returned_rows() * returned_vectors() * 16;
    }
    constexpr u32 chunks() const { return chunks_of(tokens); }  // of a source's tokens
};

// Number of operations of each kind that this rank has sent and finished; kernels advance them.
struct alignas(32) Progress {
    u64 sent, received;      // dispatches
    u64 returned, combined;  // combines
};

template <LowLatencyShape S> struct LowLatencyInbox {
    alignas(128) u64 dispatch_begun[S.ranks];  // flags: a peer's dispatch has begun
    alignas(128) u64 received[S.ranks];      // credits: a peer has emptied its inbox of a dispatch,
    alignas(128) u64 combined[S.ranks];      // of a combine
    alignas(128) u64 tokens[S.ranks];        // tagged, like everything below but the rows
    alignas(128) u64 dispatch_ids[S.ranks];  // the result that a peer combines
    alignas(128) u64 token_masks[S.ranks][S.chunks()][S.local];  // of this rank's experts
    alignas(128) u64 choices[S.ranks][S.tokens][S.top_k];        // local expert + 1, or 0
    alignas(128) u8 rows[S.sent_bytes() + S.returned_bytes()];

    WEFT_FN u8* sent_row(u32 source, u32 token) {
        return rows + (u64(source) * S.tokens + token) * (S.sent_vectors() * 16);
    }
    // The returned row of one of this rank's tokens, by entry or by rank.
    WEFT_FN u8* returned_row(u32 token, u32 which) {
        return rows + S.sent_bytes() +
               (u64(token) * S.returned_rows() + which) * (S.returned_vectors() * 16);
    }
};

template <LowLatencyShape S> struct LowLatencyShare {
    Header header;
    alignas(128) Progress progress;
    LowLatencyInbox<S> inbox;
};

// The record of a dispatch for its combine, one for each slot, in local memory.
struct RoutingRecord {
    i32* position;       // [ranks, tokens, top_k] of expert rows of this rank, or -1
    float* weights;      // [ranks, tokens, top_k], with Reduce::sender
    i32* source_tokens;  // [ranks] tokens of each source
    u32* expected;       // [tokens, 1 + rank_words] of own tokens: see returned_rows
    u64* dst_addr;       // [local, rows] of each row's slot at its token's owner; 0 after combine
};

// The rows of an own token that return: entries, or with Reduce::sender ranks, as bits.
template <LowLatencyShape S> WEFT_FN auto returned_rows(const RoutingRecord& routing, u32 token) {
    const u32 at = (1 + rank_words) * token;
    if constexpr (S.reduce == Reduce::receiver) {
        return routing.expected[at];
    } else {
        RankSet ranks;
        for (u32 i = 0; i < rank_words; ++i) word_of(ranks, i) = routing.expected[at + 1 + i];
        return ranks;
    }
}

WEFT_FN void save_returned_rows(const RoutingRecord& routing, u32 token, u32 entries,
                                RankSet ranks) {
    const u32 at = (1 + rank_words) * token;
    routing.expected[at] = entries;
    for (u32 i = 0; i < rank_words; ++i) routing.expected[at + 1 + i] = word_of(ranks, i);
}

struct LowLatencyDispatchArgs {
    Site site;
    const void* x;
    const void* ids;       // [tokens, top_k] int32 or int64
    const float* weights;  // [tokens, top_k]; null means 1
    const i32* placement;  // [experts] of rank << 16 | local id, when the shape is mapped
    void* rows;            // [local, rows, hidden]
    void* scales;
    i32* counts;  // [local]
    i32* source;  // [local, rows] of source rank * max tokens + token
    i32* ranges;  // [local, ranks, 2] first row and number of rows, by source
    RoutingRecord routing;
    TraceRecord* traces;
    u32 tokens, ids_bytes;
    u32 own_experts;
    u32 senders;  // CTAs that send rows
    CallRecord call;
};

struct LowLatencyCombineArgs {
    Site site;
    const void* y;         // [local, rows, hidden]
    const void* ids;       // [tokens, top_k], to name the rank of a missing row
    const float* weights;  // [tokens, top_k]; null means 1
    const i32* placement;
    void* out;
    const void* add;    // [tokens, hidden], added after the sum; null means none
    const i32* counts;  // [local], of the dispatch
    RoutingRecord routing;
    TraceRecord* traces;
    u32 tokens, ids_bytes;
    u32 own_experts;
    u32 senders;
    u32 dispatch_id;  // which of the results alive is combined; tagged_bits wide
    u32 reserved;
};

template <LowLatencyShape S> WEFT_FN LowLatencyShare<S>& share_of(const Site& site, u32 rank) {
    return *reinterpret_cast<LowLatencyShare<S>*>(site.base + rank * site.stride);
}
template <LowLatencyShape S> WEFT_FN LowLatencyShare<S>& own_share(const Site& site) {
    return share_of<S>(site, site.rank);
}

// The id as an index; -1 for none and for an out-of-range id.
template <LowLatencyShape S>
WEFT_FN i32 known_id(const LowLatencyDispatchArgs& a, u32 token, u32 k) {
    const i64 id = id_at(a.ids, a.ids_bytes, u64(token) * S.top_k + k);
    return id >= 0 && id < i64(S.experts) ? i32(id) : -1;
}

// Sends a credit to one peer: publishes how many operations of a kind this rank has read from its
// inbox.
// Order: the release covers the sentinels that those operations have restored.
template <LowLatencyShape S>
WEFT_FN void send_credit(const Site& site, const Progress& progress, Phase phase, u32 peer) {
    const bool out = phase == Phase::dispatch;
    LowLatencyInbox<S>& to = share_of<S>(site, peer).inbox;
    store_release(out ? &to.received[site.rank] : &to.combined[site.rank],
                  make_flag(own_share<S>(site).header.generation, site.descriptor,
                            out ? progress.received : progress.combined));
}

// The credit that an operation of a phase waits for, and the number of operations that it must
// name.
template <LowLatencyShape S> WEFT_FN u64* credit_of(const Site& site, Phase phase, u32 peer) {
    LowLatencyInbox<S>& inbox = own_share<S>(site).inbox;
    return phase == Phase::dispatch ? &inbox.received[peer] : &inbox.combined[peer];
}
WEFT_FN u64 credit_needed(const Progress& progress, Phase phase) {
    return phase == Phase::dispatch ? progress.sent : progress.returned;
}

// Waits until the slots of a peer's inbox that the next operation of this phase uses are empty.
// Order: after `true`, the stores of this thread, and of its team after its barrier `all`, are
// ordered after the restored sentinels.
// records: record a wait as skew, because a peer sends its credits when it begins its next
// operation. On a GPU the coordinator's wait, which runs at the same time, contains this one.
template <LowLatencyShape S, bool records = false>
WEFT_FN bool await_credit(const Site& site, const Progress& progress, Phase phase, u32 peer) {
    Header& header = own_share<S>(site).header;
    // Deadlines identify a round by its resulting epoch.
    const u64 credit = credit_needed(progress, phase), epoch = (credit + 1) & epoch_mask;
    SpinWait spin{.is_timed = records};
    if (!await_flag(header, site, credit_of<S>(site, phase, peer), peer, phase, site.descriptor,
                    epoch, credit, spin))
        return false;
    if (spin.is_timed) record_wait(header, phase, epoch, peer, spin.waited_ns());
    return true;
}

// Waits for a tagged word of a peer's operation and returns its value in `value`.
WEFT_FN bool await_tagged(Header& header, const Site& site, Phase phase, u64* at, u32 peer,
                          u64 epoch, u32& value, SpinWait& spin) {
    for (;;) {
        const u64 word = load_relaxed(at);
        spin.take_time();
        value = value_of(word);
        if (is_of(word, epoch)) return true;
        if (!spin.keep_waiting(header, site, {peer, phase, epoch, epoch_in(word, epoch)}))
            return false;
    }
}

WEFT_FN bool await_tagged(Header& header, const Site& site, Phase phase, u64* at, u32 peer,
                          u64 epoch, u32& value) {
    SpinWait spin;
    return await_tagged(header, site, phase, at, peer, epoch, value, spin);
}

// Whether a peer combines the same dispatch. With two results alive, ranks could combine different
// ones, and all rows would belong to the wrong result.
template <LowLatencyShape S>
WEFT_FN bool same_dispatch(const LowLatencyCombineArgs& a, u64 epoch, u32 peer) {
    LowLatencyShare<S>& own = own_share<S>(a.site);
    u32 dispatch_id = 0;
    SpinWait spin{.is_timed = peer != a.site.rank};
    if (!await_tagged(own.header, a.site, Phase::combine, &own.inbox.dispatch_ids[peer], peer,
                      epoch, dispatch_id, spin))
        return false;
    if (spin.is_timed) record_wait(own.header, Phase::combine, epoch, peer, spin.waited_ns());
    if (dispatch_id == a.dispatch_id) return true;
    fail_call(own.header, a.site, Code::other_result, peer, Phase::combine, a.dispatch_id,
              dispatch_id);
    return false;
}

template <LowLatencyShape S>
WEFT_FN void send_dispatch_id(const LowLatencyCombineArgs& a, u64 epoch, u32 peer) {
    store_relaxed(&share_of<S>(a.site, peer).inbox.dispatch_ids[a.site.rank],
                  tagged(epoch, a.dispatch_id));
}

// A count from a peer is clamped to the capacity of an inbox: no source has more tokens than a
// dispatch may have, nor more rows of one expert.
template <LowLatencyShape S> WEFT_FN u32 clamp_tokens(u32 count) {
    return count < S.tokens ? count : S.tokens;
}

// Waits for a peer's dispatch to begin, and records the wait. False if the peer's call differs or
// the wait has failed.
template <LowLatencyShape S>
WEFT_FN bool await_dispatch_begun(const LowLatencyDispatchArgs& a, u64 epoch, u32 peer) {
    LowLatencyShare<S>& own = own_share<S>(a.site);
    const bool records = peer != a.site.rank;
    SpinWait spin{.is_timed = records || WEFT_PROFILE};
    if (!await_flag(own.header, a.site, &own.inbox.dispatch_begun[peer], peer, Phase::dispatch,
                    u32(a.call.hash) & flag_mask, epoch, epoch, spin))
        return false;
    mark_arrived(own.header, Phase::dispatch, epoch, peer, spin);
    if (records) record_wait(own.header, Phase::dispatch, epoch, peer, spin.waited_ns());
    return true;
}

// Waits for a peer's token count, and then for the last token's entries, which every rank gets at
// the time of the token's row: until then the rows are in transfer. Records that wait.
template <LowLatencyShape S>
WEFT_FN bool await_last_token(const LowLatencyDispatchArgs& a, u64 epoch, u32 peer, u32& tokens) {
    LowLatencyShare<S>& own = own_share<S>(a.site);
    if (!await_tagged(own.header, a.site, Phase::dispatch, &own.inbox.tokens[peer], peer, epoch,
                      tokens))
        return false;
    tokens = clamp_tokens<S>(tokens);
    if (peer == a.site.rank || tokens == 0) return true;
    SpinWait spin{.is_timed = true};
    u32 choice = 0;
    if (!await_tagged(own.header, a.site, Phase::dispatch,
                      &own.inbox.choices[peer][tokens - 1][S.top_k - 1], peer, epoch, choice, spin))
        return false;
    record_transfer(own.header, Phase::dispatch, peer, spin.waited_ns());
    return true;
}

// The row of a source's token at one of this rank's experts.
struct ExpertRow {
    i32 expert;  // -1: not an expert of this rank, or an entry without a row
    u32 row;
};

// This rank's local expert in a `choices` word, or -1.
WEFT_FN constexpr i32 local_of(u32 choice, u32 own_experts) {
    return choice <= own_experts ? i32(choice) - 1 : -1;
}

// first: row of the first token of the chunk; mask: its bits. An entry that is not in the mask gets
// no row, so no two tokens get the same row and no row exceeds the counts.
WEFT_FN ExpertRow expert_row(i32 expert, u32 token, u32 first, u32 mask) {
    const u32 bit = token % chunk_tokens;
    if ((mask >> bit & 1) == 0) return {-1, 0};
    return {expert, first + bits_in(mask & ((1u << bit) - 1))};
}

// The address of the slot of an entry's row at its token's owner.
template <LowLatencyShape S>
WEFT_FN u64 dst_addr_of(const Site& site, u32 source, u32 token, u32 choice) {
    return reinterpret_cast<u64>(share_of<S>(site, source).inbox.returned_row(token, choice));
}

// The rank that has not sent a row of one of this rank's tokens.
template <LowLatencyShape S>
WEFT_FN u32 missing_rank(const LowLatencyCombineArgs& a, u32 token, u32 which) {
    if constexpr (S.reduce == Reduce::sender) return which;
    const i64 id = id_at(a.ids, a.ids_bytes, u64(token) * S.top_k + which);
    return id >= 0 && id < i64(S.experts) ? locate_expert<S>(a.placement, u32(id)).rank
                                          : a.site.rank;
}

// The smallest power of two that scales a block to at most 448, as a float; and its UE8M0 byte.
WEFT_FN BlockScale power_scale(u32 amax_bits) {
    const u32 e = mx_exponent(amax_bits);
    if (e == 255) return {__builtin_bit_cast(float, 0x7fc00000u), 0.0f};
    return {__builtin_bit_cast(float, e == 0 ? 0x00400000u : e << 23), mx_inverse(e)};
}
WEFT_FN u32 power_byte(u32 scale_bits) {
    return scale_bits > infinity_bits ? 255 : scale_bits >> 23;
}

// deep_ep: amax is at least 1e-4; scale = amax * fl(1 / 448), q = round(x * (448 / amax)).
// triton_dist: scale = amax * fl(1 / 448), q = round(x / scale).
template <Recipe R> WEFT_FN BlockScale product_scale(u32 amax_bits) {
    if (amax_bits >= infinity_bits) return {__builtin_bit_cast(float, 0x7fc00000u), 0.0f};
    const float amax = __builtin_bit_cast(float, amax_bits);
    return {amax * inverse_fp8_max, R == Recipe::deep_ep ? fp8_max / amax : 1.0f};
}

// triton_dist's values are divided by this before they are multiplied by an inverse of 1. If the
// scale is 0, the values are zeros or too small for a scale: they become zeros, not the NaN of a
// division by 0.
WEFT_FN float divisor_of(float scale) {
    return scale == 0.0f ? __builtin_bit_cast(float, infinity_bits) : scale;
}

constexpr u32 deep_ep_amax_bits = __builtin_bit_cast(u32, 1e-4f);

template <LowLatencyShape S> WEFT_FN BlockScale scale_for(u32 amax_bits) {
    static_assert(S.recipe != Recipe::triton_dist || S.scales != Scales::ue8m0);
    if constexpr (S.recipe == Recipe::deep_ep)
        if (amax_bits < deep_ep_amax_bits) amax_bits = deep_ep_amax_bits;
    if constexpr (S.scales == Scales::ue8m0)
        return power_scale(amax_bits);
    else if constexpr (S.recipe == Recipe::weft)
        return block_scale(amax_bits);
    else
        return product_scale<S.recipe>(amax_bits);
}

// Stores the scale of one block of a row of one of this rank's experts.
template <LowLatencyShape S>
WEFT_FN void put_scale(void* scales, u32 expert, u32 row, u32 block, u32 bits) {
    if constexpr (S.scales == Scales::fp32_row) {
        static_cast<u32*>(scales)[(u64(expert) * S.rows() + row) * S.blocks() + block] = bits;
    } else if constexpr (S.scales == Scales::fp32_col) {
        static_cast<u32*>(scales)[(u64(expert) * S.blocks() + block) * S.padded_rows() + row] =
            bits;
    } else {
        const u64 word = (u64(expert) * S.scale_vectors() + block / 4) * S.padded_rows() + row;
        static_cast<u8*>(scales)[word * 4 + block % 4] = u8(power_byte(bits));
    }
}

}  // namespace weft
