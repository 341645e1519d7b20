// SPDX-License-Identifier: Apache-2.0
// The fused all-reduce with ranks as threads (tests/runtime/race.hpp): backends and sizes in an
// order that all ranks draw alike, every element of every output checked. Exit status 0: all are
// right. Slots are atomic words, so ThreadSanitizer has nothing to say of them; what it watches is
// everything else that ranks might share. With -DEPILOGUE_AT=receiver each rank has a weight of its
// own.
#include <weft/allreduce/cpu.cpp>

#ifndef EPILOGUE_AT
#define EPILOGUE_AT owner
#endif

constexpr Reduction R{.ranks = RANKS,
                      .tokens = 10,
                      .direct = 6,
                      .hidden = 16,
                      .dtype = DType::fp32,
                      .epilogue_at = EpilogueAt::EPILOGUE_AT,
                      .missing = Missing::error};

static float number_of(u32 rank, u32 token, u32 i, u64 call) {
    return float(scramble(call * 4096 + token * 64 + rank * 8 + i % 5) % 1024);
}

static ReduceArgs draw_call(const Site& site, u64 call, Backend& backend) {
    ReduceArgs a{};
    a.site = site;
    a.eps = 1.0f;
    backend = Backend(1 + scramble(call) % 3);
    a.tokens = u32(1 + scramble(call + 77) % (backend == Backend::oneshot ? R.direct : R.tokens));
    a.call.hash = u64(a.tokens) << 20 | u64(backend) << 16;
    return a;
}

static void run_call(const ReduceArgs& a, Backend backend) {
    if (backend == Backend::oneshot) reduce<R, Backend::oneshot>(a);
    if (backend == Backend::twoshot) reduce<R, Backend::twoshot>(a);
    if (backend == Backend::bulk) reduce<R, Backend::bulk>(a);
}

static u64 wrong_numbers(const ReduceArgs& a, const std::vector<float>& out,
                         const std::vector<float>& norm, float weight, u64 call) {
    u64 wrong = 0;
    for (u32 t = 0; t < a.tokens; ++t) {
        float sums[R.hidden], squares = 0.0f;
        for (u32 i = 0; i < R.hidden; ++i) {
            sums[i] = 0.0f;
            for (u32 rank = 0; rank < R.ranks; ++rank) sums[i] += number_of(rank, t, i, call);
            squares += sums[i] * sums[i];
        }
        const float rstd = 1.0f / square_root(squares / R.hidden + a.eps);
        for (u32 i = 0; i < R.hidden; ++i) {
            wrong += out[t * R.hidden + i] != sums[i];
            // The squares are added in another order here; another call's statistics are far off.
            const float want = sums[i] * rstd * weight;
            wrong += !(__builtin_fabsf(norm[t * R.hidden + i] - want) <= 1e-4f * weight);
        }
    }
    return wrong;
}

static void run_rank(const Site& site, u64 calls, u64& wrong) {
    const u32 rank = site.rank;
    std::vector<float> x(R.tokens * R.hidden), out(x.size()), norm(x.size());
    const bool differ = R.epilogue_at == EpilogueAt::receiver;
    const std::vector<float> weight(R.hidden, differ ? float(1 << rank) : 1.0f);
    for (u64 call = 1; call <= calls; ++call) {
        Backend backend;
        ReduceArgs a = draw_call(site, call, backend);
        for (u32 t = 0; t < a.tokens; ++t)
            for (u32 i = 0; i < R.hidden; ++i) x[t * R.hidden + i] = number_of(rank, t, i, call);
        a.x = x.data();
        a.out = out.data();
        a.weight = weight.data();
        a.norm_out = norm.data();
        a.weight_is_fp32 = 1;
        if (scramble(call * R.ranks + rank) % 16 == 0) pause_ns(20000);
        run_call(a, backend);
        if (is_broken(site, call, wrong)) return;
        wrong += wrong_numbers(a, out, norm, weight[0], call);
    }
}

int main(int argc, char** argv) {
    const Race<ReductionShare<R>> race(argc, argv);
    for (u32 rank = 0; rank < R.ranks; ++rank) {
        ReductionInbox<R>& inbox = race.shares[rank].inbox;
        std::memset(inbox.direct, 0xff, sizeof inbox.direct);
        std::memset(inbox.part, 0xff, sizeof inbox.part);
        std::memset(inbox.whole, 0xff, sizeof inbox.whole);
    }
    return race.run("calls", "numbers",
                    [&](const Site& site, u64& wrong) { run_rank(site, race.rounds, wrong); });
}
