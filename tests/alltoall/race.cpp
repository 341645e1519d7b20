// SPDX-License-Identifier: Apache-2.0
// The protocol with ranks as threads (tests/runtime/race.hpp), for ThreadSanitizer: every payload
// word is stamped with (source, token, round) and verified at the receiver and again after combine.
// Exit status 0: all words are right. -DCOMBINE and -DSPLIT_PHASE choose how combine returns rows,
// and whether each phase is split.
#include <cmath>

#include <weft/alltoall/cpu.cpp>

#ifndef COMBINE
#define COMBINE pull
#endif
#ifndef SPLIT_PHASE
#define SPLIT_PHASE 0
#endif

constexpr Shape S{.ranks = RANKS,
                  .tokens = 12,
                  .top_k = 3,
                  .experts = 10,
                  .hidden = 128,
                  .dtype = DType::fp32,
                  .planes = 2,
                  .row_bytes = {32, 12},
                  .combine = Combine::COMBINE,
                  .stats = 5};

static u32 stamp(u32 source, u32 token, u64 round) {
    return u32(round) * 1024 + source * 64 + token;
}
static u32 tokens_of(u32 rank, u64 round) {
    return u32(scramble(round * 8 + rank) % (S.tokens + 1));
}

// As many as any rank sends, or in every third round all that there are: slots move between rounds.
static u32 source_rows_of(u64 round) {
    u32 most = round % 3 == 0 ? S.tokens : 1;
    for (u32 rank = 0; rank < S.ranks; ++rank)
        most = tokens_of(rank, round) > most ? tokens_of(rank, round) : most;
    return most;
}

static void fill_ids(std::vector<i32>& ids, u32 rank, u64 round) {
    for (u32 t = 0; t < S.tokens; ++t)
        for (u32 k = 0; k < S.top_k; ++k)
            ids[t * S.top_k + k] =
                i32((scramble(round * 64 + rank * 16 + t) + k * 3) % (S.experts + 1)) - 1;
}

static u64 wrong_words(const Site& site, u64 round) {
    const Inbox<S>& inbox = own_share<S>(site).inbox;
    u64 wrong = 0;
    for (u32 source = 0; source < S.ranks; ++source) {
        wrong += u32(inbox.counts[source]) != tokens_of(source, round);
        for (u32 i = 0; i < S.stats; ++i)
            wrong += u32(inbox.stats.row[source][i]) != stamp(source, i, round);
        for (u32 t = 0; t < source_rows_of(round); ++t) {
            const u32 slot = slot_of(source_rows_of(round), source, t);
            bool here = false;
            for (u32 k = 0; k < S.top_k; ++k) here = here || inbox.route[slot].expert[k] >= 0;
            wrong += here && t >= u32(inbox.counts[source]);
            if (!here) continue;
            const u32* row = reinterpret_cast<const u32*>(plane<0>(inbox.payload).row[slot]);
            const u32* tail = reinterpret_cast<const u32*>(plane<1>(inbox.payload).row[slot]);
            for (u32 i = 0; i < 8; ++i) wrong += row[i] != stamp(source, t, round);
            for (u32 i = 0; i < 3; ++i) wrong += tail[i] != stamp(source, t, round) + 1;
        }
    }
    return wrong;
}

// Another value in each round: a row that an earlier round left behind differs from this one's.
static float value_of(u32 token, u64 round) { return float(token + 1 + round % 50 * S.tokens); }

static void write_row(u8* row, u32 token, u64 round) {
    for (u32 i = 0; i < S.hidden; ++i) reinterpret_cast<float*>(row)[i] = value_of(token, round);
}

// With gemm_push each expert row is stored at its owner, as the kernel that makes it would do.
template <Shape S> static void write_outputs(const Site& site, u64 round) {
    Share<S>& own = own_share<S>(site);
    for (u32 source = 0; source < S.ranks; ++source)
        for (u32 t = 0; t < source_rows_of(round); ++t) {
            const u32 slot = slot_of(source_rows_of(round), source, t);
            if constexpr (S.combine == Combine::gemm_push) {
                for (u32 k = 0; k < S.top_k; ++k)
                    if (own.inbox.route[slot].expert[k] >= 0)
                        write_row(share<S>(site, source).inbox.returned.row[t][k], t, round);
            } else {
                write_row(own.outbox.row[slot], t, round);
            }
        }
}

// The rows of a token's sum: one of each rank, or one of each entry.
template <Shape S> static u32 rows_of(const Site& site, u32 token) {
    const Share<S>& own = own_share<S>(site);
    u32 rows = u32(__builtin_popcount(own.destinations[token]));
    if constexpr (S.combine == Combine::gemm_push)
        if (rows != 0)
            for (u32 k = rows = 0; k < S.top_k; ++k)
                rows += own.saved_routing.rank[token][k] < S.ranks;
    return rows;
}

static u64 wrong_sums(const Site& site, const std::vector<float>& out, u32 tokens, u64 round) {
    u64 wrong = 0;
    for (u32 t = 0; t < tokens; ++t) {
        const float expected = value_of(t, round) * float(rows_of<S>(site, t));
        // A block of equal values is exact in FP8 but for the rounding of its scale.
        for (u32 i = 0; i < S.hidden; ++i)
            wrong += std::abs(out[t * S.hidden + i] - expected) > 1e-5f * expected;
    }
    return wrong;
}

static void run_rank(const Site& site, u64 rounds, u64& wrong) {
    const u32 rank = site.rank;
    std::vector<u32> x(S.tokens * 8), tail(S.tokens * 3);
    std::vector<i32> ids(S.tokens * S.top_k), stats(S.stats);
    std::vector<float> out(S.tokens * S.hidden);
    for (u64 round = 1; round <= rounds; ++round) {
        const u32 tokens = tokens_of(rank, round);
        for (u32 t = 0; t < tokens; ++t) {
            for (u32 i = 0; i < 8; ++i) x[t * 8 + i] = stamp(rank, t, round);
            for (u32 i = 0; i < 3; ++i) tail[t * 3 + i] = stamp(rank, t, round) + 1;
        }
        fill_ids(ids, rank, round);
        for (u32 i = 0; i < S.stats; ++i) stats[i] = i32(stamp(rank, i, round));
        DispatchArgs sending{};
        sending.site = site;
        sending.payload[0] = x.data();
        sending.payload[1] = tail.data();
        sending.ids = ids.data();
        sending.stats = stats.data();
        sending.tokens = tokens;
        sending.ids_bytes = 4;
        sending.source_rows = source_rows_of(round);
        if constexpr (SPLIT_PHASE) {
            dispatch<S, PhasePart::send>(sending);
            dispatch<S, PhasePart::recv>(sending);
        } else {
            dispatch<S>(sending);
        }
        wrong += wrong_words(site, round);
        write_outputs<S>(site, round);
        const CombineArgs returning{.site = site,
                                    .out = out.data(),
                                    .add = nullptr,
                                    .tokens = tokens,
                                    .pushers = 0,
                                    .strips = 0,
                                    .source_rows = sending.source_rows};
        if constexpr (SPLIT_PHASE) {
            combine<S, PhasePart::send>(returning);
            combine<S, PhasePart::recv>(returning);
        } else {
            combine<S>(returning);
        }
        wrong += wrong_sums(site, out, tokens, round);
        if (is_broken(site, round, wrong)) return;
    }
}

int main(int argc, char** argv) {
    const Race<Share<S>> race(argc, argv);
    for (u32 rank = 0; rank < S.ranks; ++rank) {
        Inbox<S>& inbox = race.shares[rank].inbox;
        std::memset(inbox.route, 0xff, sizeof inbox.route);
        if (S.combine == Combine::push_fp8)
            std::memset(&inbox.returned, 0xff, sizeof inbox.returned);
    }
    return race.run("rounds", "words",
                    [&](const Site& site, u64& wrong) { run_rank(site, race.rounds, wrong); });
}
