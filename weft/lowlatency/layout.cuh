// Low-latency all-to-all: rows that bring their own news. A sender stores a token's row into the
// inbox of each rank that wants it and tells nobody; the receiver reads the row until no word of it
// is the sentinel, takes it out and leaves the sentinel behind. No counter, no flag and no fence
// stands between a row and its reader, and each row is taken as it comes.
//
// Why one inbox is enough: a rank stores into a peer's inbox only behind that peer's grant, a flag
// that it releases at the start of its next operation: all that was there is read and blank again.
// Every rank makes the same calls, so no grant waits for a call that waits for it. Rows out and
// rows home have places of their own: where the two take turns, a grant is an operation old when it
// is needed, and nobody waits for it (docs/lowlatency.md, models/spin/lowlatency.pml).
#pragma once
#include <weft/device/quantize.cuh>
#include <weft/device/sentinel.cuh>
#include <weft/lowlatency/track.cuh>

namespace weft {

enum class Scales : u32 { fp32_row = 0, fp32_col = 1, ue8m0 = 2 };
// Who multiplies with the weights and adds: the token's owner, or each expert's rank for its own.
enum class Reduce : u32 { receiver = 0, sender = 1 };

// A word that says itself of which round it is: epoch 40 | value 24. All ones is never written.
constexpr u32 tagged_bits = 24;
WEFT_FN constexpr u64 tagged(u64 epoch, u32 value) { return epoch << tagged_bits | value; }
WEFT_FN constexpr u32 value_of(u64 word) { return u32(word) & ((1u << tagged_bits) - 1); }
WEFT_FN constexpr bool is_of(u64 word, u64 epoch) {
    return word >> tagged_bits == (epoch & epoch_mask) && word != sentinel_pair;
}

// What an error tells of a word that has not come: the epoch that is there in its place.
WEFT_FN constexpr u64 epoch_before(u64 wanted) { return (wanted - 1) & epoch_mask; }
WEFT_FN constexpr u64 epoch_in(u64 word, u64 wanted) {
    return word == sentinel_pair ? epoch_before(wanted) : word >> tagged_bits;
}

// A source tells of its choices by expert: a bit for each of `chunk_tokens` tokens. So no sender
// counts, and the receiver has counts and places alike.
constexpr u32 chunk_tokens = tagged_bits;
WEFT_FN constexpr u32 chunks_of(u32 tokens) { return (tokens + chunk_tokens - 1) / chunk_tokens; }

// The bits of one chunk that stand for tokens of a source with so many.
WEFT_FN constexpr u32 valid_bits(u32 tokens, u32 chunk) {
    const u32 rest = tokens > chunk * chunk_tokens ? tokens - chunk * chunk_tokens : 0;
    return rest < chunk_tokens ? (1u << rest) - 1 : (1u << chunk_tokens) - 1;
}

// One name specialises every kernel of it. All ranks use equal ones; creation verifies it.
struct LowShape {
    u32 ranks, tokens, top_k, experts;
    u32 local;  // experts of the rank that has most
    u32 hidden;
    Number number;
    u32 group;  // columns that share a scale; 0: rows go out as they are
    Scales scales;
    Reduce reduce;
    bool fp8_back;  // rows come home as FP8, a scale for 128 columns
    bool homes;     // whoever makes a row stores it at home; combine sends nothing
    bool mapped;    // experts lie where a table says

    constexpr u32 rows() const { return ranks * tokens; }  // of an expert, at most
    constexpr u32 padded_rows() const { return (rows() + 3) / 4 * 4; }
    constexpr u32 out_bytes() const { return hidden * (number == Number::fp32 ? 4 : 2); }
    constexpr u32 blocks() const { return group == 0 ? 0 : hidden / group; }
    // A sent row in 16-byte vectors: numbers, scales, weights.
    constexpr u32 number_vectors() const { return (group == 0 ? out_bytes() : hidden) / 16; }
    constexpr u32 scale_vectors() const { return (blocks() + 3) / 4; }
    constexpr u32 weight_vectors() const { return reduce == Reduce::sender ? (top_k + 3) / 4 : 0; }
    constexpr u32 sent_vectors() const {
        return number_vectors() + scale_vectors() + weight_vectors();
    }
    // A row that comes home: numbers, or FP8 and scales. Of a token: one for each choice, or one
    // from each rank.
    constexpr u32 back_vectors() const {
        return fp8_back ? hidden / 16 + (hidden / scale_columns + 3) / 4 : out_bytes() / 16;
    }
    constexpr u32 back_rows() const { return reduce == Reduce::sender ? ranks : top_k; }
    constexpr u64 sent_bytes() const { return u64(rows()) * sent_vectors() * 16; }
    constexpr u64 back_bytes() const { return u64(tokens) * back_rows() * back_vectors() * 16; }
    constexpr u32 chunks() const { return chunks_of(tokens); }  // of a source's tokens
};

// Operations that this rank has sent and has finished, of each kind; kernels advance them.
struct alignas(32) Progress {
    u64 sent, received;      // dispatches
    u64 returned, combined;  // combines
};

template <LowShape S> struct LowInbox {
    alignas(128) u64 hello[S.ranks];     // flags: a peer's dispatch has begun
    alignas(128) u64 received[S.ranks];  // grants: a peer has emptied its inbox of a dispatch,
    alignas(128) u64 combined[S.ranks];  // of a combine
    alignas(128) u64 tokens[S.ranks];    // tagged, as all below but the rows
    alignas(128) u64 answers[S.ranks];   // which of the results alive a peer's combine answers
    alignas(128) u64 chosen[S.ranks][S.chunks()][S.local];  // tokens, as bits, of my experts
    alignas(128) u64 choices[S.ranks][S.tokens][S.top_k];   // my local expert + 1, or 0
    alignas(128) u8 rows[S.sent_bytes() + S.back_bytes()];

    WEFT_FN u8* sent_row(u32 source, u32 token) {
        return rows + (u64(source) * S.tokens + token) * (S.sent_vectors() * 16);
    }
    // The row of one of my tokens by choice, or by rank.
    WEFT_FN u8* back_row(u32 token, u32 which) {
        return rows + S.sent_bytes() +
               (u64(token) * S.back_rows() + which) * (S.back_vectors() * 16);
    }
};

template <LowShape S> struct LowShare {
    Header header;
    alignas(128) Progress progress;
    LowInbox<S> inbox;
};

// What a dispatch leaves for its combine, one for each result that may be alive; all of it local.
struct Ledger {
    i32* position;   // [ranks, tokens, top_k] row of each choice among my experts' rows, or -1
    float* weights;  // [ranks, tokens, top_k] where experts' ranks reduce
    i32* brought;    // [ranks] tokens of each source
    u32* expected;   // [tokens, 2] of my own: choices that come home, and the ranks they come from
    u64* home;       // [local, rows] where a row goes at its token's owner; 0 from combine on
};

struct LowDispatchArgs {
    Site site;
    const void* x;
    const void* ids;       // [tokens, top_k] int32 or int64
    const float* weights;  // [tokens, top_k]; null means 1
    const i32* placement;  // [experts] of rank << 16 | local id, when the shape is mapped
    void* rows;            // [local, rows, hidden]
    void* scales;
    i32* counts;  // [local]
    i32* source;  // [local, rows] source rank * max tokens + token
    i32* ranges;  // [local, ranks, 2] first row and how many, by source
    Ledger ledger;
    Track* tracks;
    u32 tokens, ids_bytes;
    u32 own_experts;
    u32 senders;  // CTAs that send rows
};

struct LowCombineArgs {
    Site site;
    const void* y;         // [local, rows, hidden]
    const void* ids;       // [tokens, top_k], to name who is missing
    const float* weights;  // [tokens, top_k]; null means 1
    const i32* placement;
    void* out;
    const void* add;    // [tokens, hidden] added after the sum; null means none
    const i32* counts;  // [local], of the dispatch
    Ledger ledger;
    Track* tracks;
    u32 tokens, ids_bytes;
    u32 own_experts;
    u32 senders;
    u32 number;  // which of the results alive is answered, in tagged_bits
    u32 reserved;
};

template <LowShape S> WEFT_FN LowShare<S>& low_share(const Site& site, u32 rank) {
    return *reinterpret_cast<LowShare<S>*>(site.base + rank * site.stride);
}
template <LowShape S> WEFT_FN LowShare<S>& own_share(const Site& site) {
    return low_share<S>(site, site.rank);
}

template <LowShape S> WEFT_FN Place place_in(const i32* table, u32 expert) {
    if constexpr (S.mapped) {
        const u32 entry = u32(table[expert]);
        return {entry >> 16, entry & 0xffffu};
    } else {
        return block_place<S.experts, S.ranks>(expert);
    }
}

// The id as an index; -1 for none, and for what is no expert.
template <LowShape S> WEFT_FN i32 known_id(const LowDispatchArgs& a, u32 token, u32 k) {
    const i64 id = id_at(a.ids, a.ids_bytes, u64(token) * S.top_k + k);
    return id >= 0 && id < i64(S.experts) ? i32(id) : -1;
}

// Tells one peer how many operations of a kind this rank has taken out of its own inbox.
// Order: the release covers the blanks that earlier operations left there.
template <LowShape S>
WEFT_FN void grant(const Site& site, const Progress& progress, Phase phase, u32 peer) {
    const bool out = phase == Phase::dispatch;
    LowInbox<S>& to = low_share<S>(site, peer).inbox;
    store_release(out ? &to.received[site.rank] : &to.combined[site.rank],
                  make_flag(own_share<S>(site).header.generation, site.descriptor,
                            out ? progress.received : progress.combined));
}

// The grant that an operation of a phase waits for, and how many operations it must speak of.
template <LowShape S> WEFT_FN u64* grant_of(const Site& site, Phase phase, u32 peer) {
    LowInbox<S>& inbox = own_share<S>(site).inbox;
    return phase == Phase::dispatch ? &inbox.received[peer] : &inbox.combined[peer];
}
WEFT_FN u64 granted_by(const Progress& progress, Phase phase) {
    return phase == Phase::dispatch ? progress.sent : progress.returned;
}

// Waits until a peer's inbox is blank where the next operation of this phase stores. Order: after
// `true`, this thread's stores, and its team's once it has met in `all`, come behind the blanks.
template <LowShape S>
WEFT_FN bool await_grant(const Site& site, const Progress& progress, Phase phase, u32 peer) {
    if constexpr (WEFT_NO_GRANTS) return true;
    const u64 wanted = granted_by(progress, phase);
    // Deadlines know rounds by the epoch that is being made.
    return await_flag(own_share<S>(site).header, site, grant_of<S>(site, phase, peer), peer, phase,
                      (wanted + 1) & epoch_mask, wanted);
}

// Waits for a tagged word of a peer's dispatch; its value in `value`.
WEFT_FN bool await_tagged(Header& header, const Site& site, Phase phase, u64* at, u32 peer,
                          u64 wanted, u32& value) {
    Patience patience;
    for (;;) {
        const u64 word = load_relaxed(at);
        value = value_of(word);
        if (is_of(word, wanted)) return true;
        if (!patience.lasts(header, site, {peer, phase, wanted, epoch_in(word, wanted)}))
            return false;
    }
}

// Does a peer's combine answer the same dispatch as mine? Where two results are alive, ranks could
// differ, and every row would come from the wrong one.
template <LowShape S> WEFT_FN bool same_answer(const LowCombineArgs& a, u64 wanted, u32 peer) {
    LowShare<S>& own = own_share<S>(a.site);
    u32 number = 0;
    if (!await_tagged(own.header, a.site, Phase::combine, &own.inbox.answers[peer], peer, wanted,
                      number))
        return false;
    if (number == a.number) return true;
    fail_call(own.header, a.site, Code::other_result, peer, Phase::combine, a.number, number);
    return false;
}

template <LowShape S> WEFT_FN void send_answer(const LowCombineArgs& a, u64 wanted, u32 peer) {
    store_relaxed(&low_share<S>(a.site, peer).inbox.answers[a.site.rank], tagged(wanted, a.number));
}

// What a peer tells is never believed beyond what an inbox holds: no source has more tokens than a
// dispatch may have, nor more rows of one expert.
template <LowShape S> WEFT_FN u32 believed(u32 told) { return told < S.tokens ? told : S.tokens; }

// Where a choice of a source's token belongs among my experts' rows.
struct Seat {
    i32 expert;  // -1: none of mine, or a peer's word that no row stands for
    u32 row;
};

// My local expert that a choice names, or -1.
WEFT_FN constexpr i32 local_of(u32 choice, u32 own_experts) {
    return choice <= own_experts ? i32(choice) - 1 : -1;
}

// first: row of the first token of the chunk; mask: its bits. A choice that the mask does not know
// gets no seat; so no two tokens get the same, and none lies behind the counts.
WEFT_FN Seat seat_of(i32 expert, u32 token, u32 first, u32 mask) {
    const u32 bit = token % chunk_tokens;
    if ((mask >> bit & 1) == 0) return {-1, 0};
    return {expert, first + bits_in(mask & ((1u << bit) - 1))};
}

// Where the row of a choice goes at its token's owner, for whoever makes it.
template <LowShape S> WEFT_FN u64 home_of(const Site& site, u32 source, u32 token, u32 choice) {
    return reinterpret_cast<u64>(low_share<S>(site, source).inbox.back_row(token, choice));
}

// The rank that has not sent a row of one of my tokens.
template <LowShape S> WEFT_FN u32 missing_rank(const LowCombineArgs& a, u32 token, u32 which) {
    if constexpr (S.reduce == Reduce::sender) return which;
    const i64 id = id_at(a.ids, a.ids_bytes, u64(token) * S.top_k + which);
    return id >= 0 && id < i64(S.experts) ? place_in<S>(a.placement, u32(id)).rank : a.site.rank;
}

// The power of two that brings a block down to 448 or less, as a float; and back to its byte.
WEFT_FN BlockScale power_scale(u32 amax_bits) {
    const u32 e = mx_exponent(amax_bits);
    if (e == 255) return {__builtin_bit_cast(float, 0x7fc00000u), 0.0f};
    return {__builtin_bit_cast(float, e == 0 ? 0x00400000u : e << 23), mx_inverse(e)};
}
WEFT_FN u32 power_byte(u32 scale_bits) {
    return scale_bits > infinity_bits ? 255 : scale_bits >> 23;
}

template <LowShape S> WEFT_FN BlockScale scale_for(u32 amax_bits) {
    return S.scales == Scales::ue8m0 ? power_scale(amax_bits) : block_scale(amax_bits);
}

// The scale of one block of a row of one of my experts.
template <LowShape S>
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
