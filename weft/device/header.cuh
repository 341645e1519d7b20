// SPDX-License-Identifier: Apache-2.0
// The header that begins every rank's share of the symmetric heap, whatever the operator, and the
// words in it. Python mirrors these structs in heap/header.py, and every generated source asserts
// that the mirrors have their sizes and offsets.
#pragma once
#include <weft/device/order.cuh>

namespace weft {

constexpr u32 abi = 12;                         // increment whenever a struct below changes
constexpr u32 max_ranks = WEFT_WIDE ? 72 : 32;  // of one NVLink domain; 72 is GB200 NVL72
constexpr u32 rank_words = (max_ranks + 31) / 32, host_words = (max_ranks + 62) / 63;
constexpr u32 ring_records = 256;
constexpr u32 ring_timelines = 64;  // the last 32 rounds
constexpr u32 wait_buckets = 22;

enum class DType : u32 { bf16 = 0, fp16 = 1, fp32 = 2 };
enum class Phase : u32 { dispatch = 1, combine = 2 };
// A phase runs as one kernel, or split into a sending and a receiving kernel.
enum class PhasePart : u32 { whole = 0, send = 1, recv = 2 };
// Which sum of a token's rows is rounded: the one at the token's owner, over all rows in top-k
// order (receiver), or in addition each rank's sum over its own experts' rows (sender).
enum class Reduce : u32 { receiver = 0, sender = 1 };
// What a CTA does in a kernel of several roles (roles.cuh); trace records hold the number.
enum class CtaRole : u32 { metadata = 0, sender = 1, receiver = 2, coordinator = 3 };
enum class Code : u32 {
    ok = 0,
    bad_expert_id = 1,
    duplicate_expert = 2,
    token_overflow = 3,
    peer_timeout = 4,
    geometry_mismatch = 5,
    aborted = 6,
    bad_row_index = 7,
    other_result = 9,
    peer_died = 10,
    peer_left = 11,
    gone_rank = 13,
    gone_unmasked = 14,
};

// A set of ranks, as bits: one word up to 32 ranks, and several in a wide domain. Words of several
// are selected, not indexed, because registers have no addresses.
template <u32 words> struct RankWords {
    u32 word[words];

    bool operator==(const RankWords&) const = default;
    WEFT_FN RankWords operator&(const RankWords& other) const {
        RankWords both;
        for (u32 i = 0; i < words; ++i) both.word[i] = word[i] & other.word[i];
        return both;
    }
};
template <u32 words> struct RankSetOf {
    using type = RankWords<words>;
};
template <> struct RankSetOf<1> {
    using type = u32;
};
using RankSet = typename RankSetOf<rank_words>::type;

// The ranks from `first` on as the lowest bits; of several words, those in the word of `first`.
WEFT_FN constexpr u32 ranks_from(u32 set, u32 first) { return set >> first; }
template <u32 words> WEFT_FN constexpr u32 ranks_from(const RankWords<words>& set, u32 first) {
    u32 bits = set.word[0];
    for (u32 i = 1; i < words; ++i) bits = first / 32 == i ? set.word[i] : bits;
    return bits >> first % 32;
}

WEFT_FN constexpr bool has(u32 set, u32 rank) { return (set >> rank & 1) != 0; }
template <u32 words> WEFT_FN constexpr bool has(const RankWords<words>& set, u32 rank) {
    return (ranks_from(set, rank) & 1) != 0;
}

WEFT_FN constexpr void add(u32& set, u32 rank) { set |= 1u << rank; }
template <u32 words> WEFT_FN constexpr void add(RankWords<words>& set, u32 rank) {
    for (u32 i = 0; i < words; ++i)
        if (rank / 32 == i) set.word[i] |= 1u << rank % 32;
}

// Adds a rank where it belongs to the set.
WEFT_FN constexpr void add_if(u32& set, bool belongs, u32 rank) { set |= u32(belongs) << rank; }
template <u32 words> WEFT_FN constexpr void add_if(RankWords<words>& set, bool belongs, u32 rank) {
    if (belongs) add(set, rank);
}

WEFT_FN constexpr u32 without(u32 set, u32 rank) { return set & ~(1u << rank); }
template <u32 words> WEFT_FN constexpr RankWords<words> without(RankWords<words> set, u32 rank) {
    for (u32 i = 0; i < words; ++i)
        if (rank / 32 == i) set.word[i] &= ~(1u << rank % 32);
    return set;
}

// The set of one rank.
WEFT_FN constexpr RankSet only(u32 rank) {
    RankSet set{};
    add(set, rank);
    return set;
}

// The set of the ranks 0 .. ranks - 1.
WEFT_FN constexpr RankSet ranks_below(u32 ranks) {
    RankSet set{};
    for (u32 rank = 0; rank < ranks; ++rank) add(set, rank);
    return set;
}

// The rank `offset` after another one, modulo the number of ranks.
template <auto S> WEFT_FN u32 next_rank(u32 rank, u32 offset) {
    return rank + offset < S.ranks ? rank + offset : rank + offset - S.ranks;
}

// A word of a set.
WEFT_FN u32& word_of(u32& set, u32) { return set; }
template <u32 words> WEFT_FN u32& word_of(RankWords<words>& set, u32 i) { return set.word[i]; }

// A flag is one 64-bit word: generation 16 | call 24 | epoch 24. A wait is satisfied by an equal
// generation and an epoch that is not older in serial arithmetic, so a peer that runs ahead never
// deadlocks a slow one. `call` is a hash of what the ranks must agree on (CallRecord); a flag that
// no call distinguishes, such as a credit, carries the geometry's hash (Site::descriptor). Every
// phase is a barrier, so a peer is at most one round ahead, and 24 bits of the epoch suffice.
constexpr u64 epoch_mask = (1ull << 40) - 1;
constexpr u32 flag_bits = 24, flag_mask = (1u << flag_bits) - 1;
WEFT_FN constexpr u64 make_flag(u32 generation, u32 call, u64 epoch) {
    return u64(generation & 0xffffu) << 48 | u64(call & flag_mask) << flag_bits |
           (epoch & flag_mask);
}
WEFT_FN constexpr u32 flag_generation(u64 flag) { return u32(flag >> 48); }
WEFT_FN constexpr u32 flag_call(u64 flag) { return u32(flag >> flag_bits) & flag_mask; }
WEFT_FN constexpr bool flag_not_older(u64 flag, u64 epoch) {
    return ((flag - epoch) & flag_mask) < (1u << (flag_bits - 1));
}
// The epoch of a flag: of all epochs with these bits, the one nearest to `epoch`.
WEFT_FN constexpr u64 flag_epoch(u64 flag, u64 epoch) {
    const u64 ahead = (flag - epoch) & flag_mask;
    const u64 behind = ahead < (1u << (flag_bits - 1)) ? 0 : 1ull << flag_bits;
    return flag == 0 ? 0 : (epoch + ahead - behind) & epoch_mask;
}

// An error, as counters and ids only. The device writes it, the host reads it.
struct ErrorRecord {
    u32 code = 0, rank = 0, peer = 0,
        phase = 0;                   // peer: the culprit; if aborted, the aborting rank
    u64 expected = 0, observed = 0;  // epochs, hashes, or ids and their limit
    u64 elapsed_ns = 0;
    u32 token = 0, index = 0;  // the token, and its top_k entry, 16-byte word or expert
    u32 reported_by = 0;       // rank + 1 of the peer that detected it; 0: this rank itself
    u32 reserved = 0;
};

// The word that notifies a peer that a rank has left the group, and which rank caused that:
// code 8 | culprit 16 | epoch 40. Zero: it has not left.
WEFT_FN constexpr u64 make_notice(u32 code, u32 culprit, u64 epoch) {
    return u64(code) << 56 | u64(culprit & 0xffffu) << 40 | (epoch & epoch_mask);
}
WEFT_FN constexpr Code notice_code(u64 notice) { return Code(u32(notice >> 56)); }
WEFT_FN constexpr u32 notice_culprit(u64 notice) { return u32(notice >> 40) & 0xffffu; }

// Host memory that a kernel can write while it runs: the host polls it without synchronising.
struct Mailbox {
    // From this rank's host to its own kernels. Bit 63 of the first: leave. Bit r % 63 of word
    // r / 63: the process of rank r has ended.
    alignas(128) u64 host_word[host_words];
    alignas(128) u32 refusals;  // serial number of the latest refusal; refused[serial % 8] holds it
    alignas(128) u32 broken_code;         // published after `broken`
    ErrorRecord broken;                   // the first error that ended the group
    alignas(128) ErrorRecord refused[8];  // bad input that reached no peer: dropped and reported
};

constexpr u64 host_asks_to_leave = 1ull << 63;

// A rank's latest call, for the peers' error messages: a kernel writes it before it publishes the
// call's hash, and hosts compare the records if the hashes differ. Python packs and reads `what`
// and `constants` (runtime/identity.py).
struct CallRecord {
    u64 hash;  // 40 bits; flags carry the lower 24
    u64 what, constants, reserved;
};

// One finished operation, kept for the surviving ranks to read after this rank has died.
struct Record {
    u64 epoch, start_ns, end_ns;
    u32 phase, tokens;
};

// The time stamps of an operation, in nanoseconds of this rank's clock. Only profiled kernels write
// it (timeline.cuh).
struct Timeline {
    u64 epoch, start_ns;
    u64 sent_ns, published_ns;  // before the first flag went out, and after the last
    u64 end_ns;
    u32 phase, ctas;
    u64 arrived_ns[max_ranks];  // when each peer's flag was seen
};

// Durations of waits. Bucket 0 counts those below 1024 ns, bucket i those below 2^i times that, and
// the last one all longer ones.
struct WaitTimes {
    u64 total_ns, max_ns;
    u64 counts[wait_buckets];
};

// The finished waits of this rank for one peer in one phase (record_wait in wait.cuh). Kernels of
// this rank add to them, and readers may see some words of a wait without the others.
struct PeerWaits {
    u64 epoch;           // of the last wait
    WaitTimes skew;      // until the peer began
    WaitTimes transfer;  // after the peer had begun
};

// The epoch state, which every kernel reads first, in one 16-byte load.
struct alignas(16) EpochState {
    u64 epoch;   // finished dispatches
    u32 failed;  // a Code; not 0: the group is broken and kernels return at once
    u32 rows;    // rows that this rank's last dispatch left in each peer's inbox
};

// A disturbance that a test has planned (fault.cuh); all zero: none.
struct Fault {
    u32 point, action;
    u32 peer, reserved;
    u64 epoch, argument;
};

struct alignas(128) Header {
    u32 abi, rank, ranks, generation;
    u64 share_bytes, first_epoch;
    u64 deadline_ns, first_deadline_ns;
    alignas(128) EpochState state;
    u32 source_rows;  // slots for each source in this rank's last dispatch
    // The ranks that take part. No kernel waits for, stores to or reads from another one. Changes
    // only while no kernel runs.
    RankSet living;
    alignas(128) u32 arrived;  // teams of the running dispatch that have finished sending
    u32 refusing;              // lock, held while a refusal is written
    u32 refusals;
    u32 sending;                          // tokens of a dispatch that is sent and not yet received
    RankSet reported;                     // ranks that are gone, and reported as such
    alignas(128) u64 notices[max_ranks];  // notice of each peer that has left; one writer each
    alignas(128) u64 waiting_ns;          // time of the last check of a wait; peers read it
    u32 looked;                           // 16 us period of that check; one wait claims it
    alignas(128) CallRecord call;         // the latest one
    alignas(128) u8 exit_reason[512];     // why this rank left, in UTF-8, for the notified peers
    alignas(128) Fault fault;
    alignas(128) Record ring[ring_records];
    alignas(128) Timeline timelines[ring_timelines];
    alignas(128) PeerWaits waits[2][max_ranks];  // of dispatch or all-reduce, and of combine
};

// Addresses of the shares, and this rank. Rank r's share starts at base + r * stride.
struct Site {
    u64 base, stride;
    u64 mailbox;
    u32 rank, descriptor;  // descriptor: 24 bits of the Shape's hash
};

WEFT_FN Mailbox& mailbox(const Site& site) { return *reinterpret_cast<Mailbox*>(site.mailbox); }

WEFT_FN Header& header_of(const Site& site, u32 rank) {
    return *reinterpret_cast<Header*>(site.base + rank * site.stride);
}

static_assert(sizeof(EpochState) == 16, "the epoch state is read in one load");
static_assert(sizeof(ErrorRecord) == 56 && sizeof(Record) == 32 && sizeof(Mailbox) <= 4096);

}  // namespace weft
