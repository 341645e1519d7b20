// SPDX-License-Identifier: Apache-2.0
// Low-latency rounds with ranks as threads (tests/runtime/race.hpp): every element of every row is
// stamped with source, token and round, checked where it arrives and again in the owner's sum. Exit
// status 0: all are right. -DREDUCE and -DSPLIT_PHASE choose which rank adds, and whether two
// results cross; with -DGEMM_PUSH=1 experts store their rows at the owners themselves.
#include <weft/gemm/push_cpu.cpp>
#include <weft/lowlatency/combine_cpu.hpp>
#include <weft/lowlatency/dispatch_cpu.hpp>

#ifndef REDUCE
#define REDUCE receiver
#endif
#ifndef SPLIT_PHASE
#define SPLIT_PHASE 0
#endif
#ifndef GEMM_PUSH
#define GEMM_PUSH 0
#endif

constexpr u32 local_experts = (10 + RANKS - 1) / RANKS;
constexpr LowLatencyShape S{.ranks = RANKS,
                            .tokens = 12,
                            .top_k = 3,
                            .experts = 10,
                            .local = local_experts,
                            .hidden = 32,
                            .dtype = DType::fp32,
                            .group = 0,
                            .scales = Scales::fp32_row,
                            .reduce = Reduce::REDUCE,
                            .combine_fp8 = false,
                            .gemm_push = GEMM_PUSH,
                            .mapped = false,
                            .recipe = Recipe::weft};
constexpr u32 slots = 2;

// Small whole numbers: sums of a few of them are exact.
static float stamp(u32 source, u32 token, u64 round) {
    return float(u32(round) % 1024 * 512 + source * 32 + token + 1);
}
static u32 tokens_of(u32 rank, u64 round) {
    return u32(scramble(round * 8 + rank) % (S.tokens + 1));
}
// Ids of a row: distinct, or none.
static void fill_ids(std::vector<i32>& ids, u32 rank, u64 round) {
    for (u32 t = 0; t < S.tokens; ++t)
        for (u32 k = 0; k < S.top_k; ++k)
            ids[t * S.top_k + k] =
                i32((scramble(round * 64 + rank * 16 + t) + k * 3) % (S.experts + 1)) - 1;
}

// One result and what its combine needs.
struct Slot {
    std::vector<float> rows = std::vector<float>(u64(S.local) * S.rows() * S.hidden);
    std::vector<float> x = std::vector<float>(u64(S.tokens) * S.hidden);
    std::vector<float> out = x;
    std::vector<i32> counts = std::vector<i32>(S.local), ids = std::vector<i32>(S.tokens * S.top_k);
    std::vector<i32> source = std::vector<i32>(u64(S.local) * S.rows());
    std::vector<i32> ranges = std::vector<i32>(S.local * S.ranks * 2),
                     source_tokens = std::vector<i32>(S.ranks);
    std::vector<i32> position = std::vector<i32>(u64(S.rows()) * S.top_k);
    std::vector<float> weights = std::vector<float>(u64(S.rows()) * S.top_k);
    std::vector<u32> expected = std::vector<u32>(2 * S.tokens);
    std::vector<u64> dst_addr = std::vector<u64>(u64(S.local) * S.rows());
    u64 round = 0;
    u32 tokens = 0;

    RoutingRecord routing() {
        return {position.data(), weights.data(), source_tokens.data(), expected.data(),
                dst_addr.data()};
    }
};

template <class Args> static Args common_args(const Site& site, u32 own, Slot& slot) {
    Args a{};
    a.site = site;
    a.ids = slot.ids.data();
    a.counts = slot.counts.data();
    a.routing = slot.routing();
    a.tokens = slot.tokens;
    a.ids_bytes = 4;
    a.own_experts = own;
    return a;
}

static LowLatencyDispatchArgs dispatch_args(const Site& site, u32 own, Slot& slot) {
    auto a = common_args<LowLatencyDispatchArgs>(site, own, slot);
    a.x = slot.x.data();
    a.rows = slot.rows.data();
    a.source = slot.source.data();
    a.ranges = slot.ranges.data();
    return a;
}

static LowLatencyCombineArgs combine_args(const Site& site, u32 own, Slot& slot) {
    auto a = common_args<LowLatencyCombineArgs>(site, own, slot);
    a.y = slot.rows.data();
    a.out = slot.out.data();
    return a;
}

static void prepare(Slot& slot, u32 rank, u64 round) {
    slot.round = round;
    slot.tokens = tokens_of(rank, round);
    for (u32 t = 0; t < slot.tokens; ++t)
        for (u32 i = 0; i < S.hidden; ++i) slot.x[t * S.hidden + i] = stamp(rank, t, round);
    fill_ids(slot.ids, rank, round);
}

static u64 wrong_rows(const Slot& slot, u32 own) {
    u64 wrong = 0;
    for (u32 e = 0; e < own; ++e)
        for (u32 row = 0; row < u32(slot.counts[e]); ++row) {
            const u32 source = u32(slot.source[e * S.rows() + row]);
            const float want = stamp(source / S.tokens, source % S.tokens, slot.round);
            const float* at = &slot.rows[(u64(e) * S.rows() + row) * S.hidden];
            for (u32 i = 0; i < S.hidden; ++i) wrong += at[i] != want;
            wrong += row > 0 && slot.source[e * S.rows() + row - 1] >= i32(source);
        }
    return wrong;
}

static u64 wrong_sums(const Slot& slot, u32 rank) {
    u64 wrong = 0;
    for (u32 t = 0; t < slot.tokens; ++t) {
        const u32 choices = u32(__builtin_popcount(slot.expected[2 * t]));
        const float want = stamp(rank, t, slot.round) * float(choices);
        for (u32 i = 0; i < S.hidden; ++i) wrong += slot.out[t * S.hidden + i] != want;
    }
    return wrong;
}

// With gemm_push the experts' kernel stores each row at its owner, unquantised.
static void store_rows(const Site& site, u32 own, Slot& slot) {
    for (u32 e = 0; GEMM_PUSH && e < own; ++e) {
        const u64 first = u64(e) * S.rows();
        const u8* rows = reinterpret_cast<const u8*>(&slot.rows[first * S.hidden]);
        push_rows<S.dtype>(&slot.dst_addr[first], rows, u64(slot.counts[e]), S.hidden * 4,
                           &own_share<S>(site).header.state.failed);
    }
}

// Two micro-batches; with split phases one is dispatched while the other is combined.
static u64 two_rounds(const Site& site, u32 own, Slot (&slot)[slots]) {
    u64 wrong = 0;
    if constexpr (SPLIT_PHASE) {
        low_latency_dispatch<S>(dispatch_args(site, own, slot[0]));
        low_latency_dispatch<S, PhasePart::send>(dispatch_args(site, own, slot[1]));
        wrong += wrong_rows(slot[0], own);
        low_latency_combine<S, PhasePart::send>(combine_args(site, own, slot[0]));
        low_latency_dispatch<S, PhasePart::recv>(dispatch_args(site, own, slot[1]));
        low_latency_combine<S, PhasePart::recv>(combine_args(site, own, slot[0]));
    } else if constexpr (GEMM_PUSH) {
        low_latency_dispatch<S>(dispatch_args(site, own, slot[0]));
        wrong += wrong_rows(slot[0], own);
        store_rows(site, own, slot[0]);
        low_latency_combine<S>(combine_args(site, own, slot[0]));
        store_rows(site, own, slot[0]);  // combine has cleared the addresses
        low_latency_dispatch<S>(dispatch_args(site, own, slot[1]));
    } else {
        low_latency_dispatch<S>(dispatch_args(site, own, slot[0]));
        low_latency_dispatch<S>(dispatch_args(site, own, slot[1]));
        wrong += wrong_rows(slot[0], own);
        low_latency_combine<S>(combine_args(site, own, slot[0]));
    }
    wrong += wrong_rows(slot[1], own);
    store_rows(site, own, slot[1]);
    low_latency_combine<S>(combine_args(site, own, slot[1]));
    return wrong;
}

static void run_rank(const Site& site, u64 rounds, u64& wrong) {
    const u32 rank = site.rank;
    u32 own = 0;
    for (u32 e = 0; e < S.experts; ++e) own += locate_expert<S>(nullptr, e).rank == rank;
    Slot slot[slots];
    for (u64 round = 1; round <= rounds; round += slots) {
        for (u32 i = 0; i < slots; ++i) prepare(slot[i], rank, round + i);
        wrong += two_rounds(site, own, slot);
        for (u32 i = 0; i < slots; ++i) wrong += wrong_sums(slot[i], rank);
        if (is_broken(site, round, wrong)) return;
    }
}

int main(int argc, char** argv) {
    const Race<LowLatencyShare<S>> race(argc, argv);
    for (u32 rank = 0; rank < S.ranks; ++rank) {
        LowLatencyShare<S>& own = race.shares[rank];
        own.progress = {race.first_epoch, race.first_epoch, race.first_epoch, race.first_epoch};
        std::memset(own.inbox.tokens, 0xff, u64(&own + 1) - u64(own.inbox.tokens));
    }
    return race.run("rounds", "words",
                    [&](const Site& site, u64& wrong) { run_rank(site, race.rounds, wrong); });
}
