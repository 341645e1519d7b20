// The fused all-reduce: what lies where in a share, and the arguments of its entries.
//
// Data is its own flag. A slot of fresh or taken memory holds the sentinel in every 32-bit word; a
// sender never writes that word, and a vector is there when none of its words is the sentinel. The
// reader puts the sentinel back. What a peer's call was, a call word says, so that ranks that call
// differently are noticed.
//
// Why two buffers for rows that are pushed to be summed, and one for summed rows: docs/protocol.md.
#pragma once
#include <weft/device/sentinel.cuh>
#include <weft/device/wait.cuh>

namespace weft {

constexpr Phase all_reduce_phase = Phase(4);  // in error records
constexpr u32 most_call_ranks = 8;

// The sizes that specialise the entries; allreduce/reduction.py has its mirror.
struct Reduction {
    u32 ranks;   // 2..8
    u32 tokens;  // most of one call
    u32 direct;  // most of one call in one shot
    u32 hidden;
    Number number;

    constexpr u32 element_bytes() const { return number == Number::fp32 ? 4 : 2; }
    constexpr u32 row_bytes() const { return hidden * element_bytes(); }
    constexpr u32 vectors() const { return row_bytes() / 16; }
    constexpr u32 width() const { return 16 / element_bytes(); }  // numbers of a vector
    constexpr u32 partials() const { return (vectors() + 31) / 32; }
    constexpr u32 peers() const { return ranks - 1; }
    constexpr u32 owned() const { return (tokens + ranks - 1) / ranks; }
};

enum class Backend : u32 { oneshot = 1, twoshot = 2, bulk = 3 };
enum class Coding : u32 { none = 0, fixed = 1, token = 2, group = 3, group_ue8m0 = 4 };
// In which slot a wait stood; ErrorRecord.seen.
enum class Slot : u32 { direct = 1, part = 2, whole = 3, trailer = 4, call = 5 };

// The statistics of a summed row, from its owner. Many read them, so nobody could put sentinels
// back: each half, which is never seen in pieces, carries 31 bits of the epoch instead, and one
// that fresh memory has not.
struct alignas(16) Trailer {
    u32 rstd, rstd_tag;  // bits of 1 / rms
    u32 peak, peak_tag;  // bits of the largest |row * weight|
};
WEFT_FN constexpr u32 trailer_tag(u64 epoch) { return u32(epoch) | 0x80000000u; }

// Written by peers. Peer p's slots at rank r lie at index p, or p - 1 above r: nobody has slots at
// itself.
template <Reduction R> struct Summands {
    alignas(128) u64 call[2][most_call_ranks];  // by side: what each peer called
    alignas(128) u8 direct[2][R.peers()][R.direct][R.row_bytes()];  // one shot: every peer's rows
    alignas(128) u8 part[2][R.peers()][R.owned()][R.row_bytes()];   // peers' rows of my tokens
    alignas(128) u8 whole[R.peers()][R.owned()][R.row_bytes()];     // summed rows of peers' tokens
    alignas(128) Trailer trailer[R.peers()][R.owned()];
};

template <Reduction R> struct ReductionShare {
    Header header;
    Summands<R> slots;
};

// Which of two buffers a call uses.
WEFT_FN constexpr u32 side_of(u64 epoch) { return WEFT_ONE_SIDE ? 0 : u32(epoch & 1); }

// What one call wants. A null pointer is an output that nobody wants, or an input that is not
// there.
struct ReduceArgs {
    Site site;
    const void* x;         // [tokens, hidden]; null: the rows are made from `rows`
    const void* residual;  // [tokens, hidden]
    const void* weight;    // [hidden] of the row's type, or fp32
    void* out;             // the rounded sum
    void* residual_out;    // the sum plus residual, rounded
    void* norm_out;
    void* quant_out;     // e4m3
    void* scale_out;     // fp32, or UE8M0 bytes packed by four
    const float* scale;  // Coding::fixed: [1]
    const void* rows;    // [row_limit, hidden]: experts' results
    const i32* index;    // [tokens, top_k] into rows; -1 for none
    const void* scales;  // [tokens, top_k] of the row's type, or fp32; null means 1
    const void* shared;  // [tokens, hidden], added last
    u64 signature;       // what this call is, for its call word: 40 bits
    u32 row_limit, top_k;
    u32 tokens;
    float eps, weight_bias;
    u32 weight_is_fp32, scales_are_fp32;
    Coding coding;
    u32 scale_stride;       // Coding::group_ue8m0: int32 words from one column to the next
    u32 pushers, reducers;  // two shots: CTAs that push rows, and that sum; all others finish rows
    u32 pushers_finish;     // and so do pushers, once they have pushed
};

template <Reduction R> WEFT_FN ReductionShare<R>& share(const Site& site, u32 rank) {
    return *reinterpret_cast<ReductionShare<R>*>(site.base + rank * site.stride);
}
template <Reduction R> WEFT_FN ReductionShare<R>& mine(const Site& site) {
    return share<R>(site, site.rank);
}

// The index of `peer`'s slots at `rank`.
WEFT_FN constexpr u32 place_at(u32 rank, u32 peer) { return peer - (peer > rank); }
template <Reduction R> WEFT_FN u32 next_rank(u32 rank, u32 turn) {
    return rank + turn < R.ranks ? rank + turn : rank + turn - R.ranks;
}

// The call word: 24 bits of the epoch and 40 of the signature.
WEFT_FN constexpr u64 call_word(u64 epoch, u64 signature) {
    return epoch << 40 | (signature & epoch_mask);
}

// Does the peer's call word say that it made another call than this rank? Fresh memory says
// nothing.
WEFT_FN bool disagrees(u64 seen, u64 mine) {
    return seen != mine && seen != 0 && seen >> 40 == mine >> 40;
}

WEFT_FN void fail_call(Header& header, const Site& site, u32 peer, u64 word, u64 seen) {
    fail_call(header, site, Code::geometry_mismatch, peer, all_reduce_phase, word, seen);
}

// Where a wait stands, and since when.
struct SlotWait {
    Slot slot;
    u32 peer, token, vector;
    u64 start = 0;
};

// Which peer has told that it made another call than this rank; none: R.ranks. A peer whose data
// does not come may itself wait for that one, so a wait looks at all of them.
template <Reduction R> WEFT_FN u32 odd_peer(const Site& site, u64 epoch, u64 word, u64& seen) {
    u64* const told = mine<R>(site).slots.call[side_of(epoch)];
    for (u32 peer = 0; peer < R.ranks; ++peer) {
        seen = load_relaxed(&told[peer]);
        if (peer != site.rank && disagrees(seen, word)) return peer;
    }
    return R.ranks;
}

// The slow half of a wait for data: true ends it. Beside what check_wait looks at, a peer may have
// made another call.
template <Reduction R>
WEFT_SLOW_FN bool gives_up(const Site& site, u64 epoch, u64 signature, SlotWait& wait) {
    ReductionShare<R>& own = mine<R>(site);
    if (wait.start == 0) wait.start = now_ns();
    const u64 word = call_word(epoch, signature);
    u64 seen;
    if (const u32 odd = odd_peer<R>(site, epoch, word, seen); odd != R.ranks) {
        fail_call(own.header, site, odd, word, seen);
        return true;
    }
    const Wait what{wait.peer, all_reduce_phase, epoch, u64(wait.slot)};
    const Verdict verdict = check_wait(own.header, site, what, wait.start);
    if (verdict.code == Code::ok) return false;
    fail(own.header, site,
         {.code = u32(verdict.code),
          .peer = verdict.culprit,
          .phase = u32(all_reduce_phase),
          .wanted = epoch,
          .seen = u64(wait.slot),
          .elapsed_ns = now_ns() - wait.start,
          .token = wait.token,
          .slot = wait.vector,
          .told_by = verdict.told_by});
    return true;
}

// Tells a peer what this call is.
template <Reduction R>
WEFT_FN void tell_call(const Site& site, u64 epoch, u64 signature, u32 peer) {
    store_relaxed(&share<R>(site, peer).slots.call[side_of(epoch)][site.rank],
                  call_word(epoch, signature));
}

// Compares a peer's call with mine; false when they differ, or when it never came.
// `seen` may have been read early, off the critical path.
template <Reduction R>
WEFT_SLOW_FN bool same_call(const Site& site, u64 epoch, u64 signature, u32 peer, u64 seen) {
    ReductionShare<R>& own = mine<R>(site);
    const u64 word = call_word(epoch, signature);
    SlotWait wait{.slot = Slot::call, .peer = peer, .token = 0, .vector = 0};
    for (u32 turns = 1; seen != word; ++turns) {
        if (disagrees(seen, word)) {
            fail_call(own.header, site, peer, word, seen);
            return false;
        }
        if (turns % polls_per_check == 0 && gives_up<R>(site, epoch, signature, wait)) return false;
        relax(turns);
        seen = load_relaxed(&own.slots.call[side_of(epoch)][peer]);
    }
    return true;
}

// A row of `rows` that an index names, or row_limit for none. An index out of range is refused here
// and never becomes an address.
template <Reduction R>
WEFT_FN u32 source_row(const ReduceArgs& a, i32 index, u32 token, u32 k, bool reports) {
    if (u32(index) < a.row_limit) return u32(index);
    if (index != -1 && reports)
        refuse(mine<R>(a.site).header, a.site,
               {.code = u32(Code::bad_row_index),
                .phase = u32(all_reduce_phase),
                .wanted = a.row_limit,
                .seen = u64(i64(index)),
                .token = token,
                .slot = k});
    return a.row_limit;
}

}  // namespace weft
