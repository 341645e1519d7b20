// The fused all-reduce with ranks as threads: backends and sizes in an order that all ranks draw
// alike, every element of every output checked. Exit status 0: all are right. Slots are atomic
// words, so ThreadSanitizer has nothing to say of them; what it watches is everything else that
// ranks might share. With -DWEFT_ONE_SIDE=1 rows that are pushed to be summed have one buffer
// instead of two, and the test must catch a fast rank that overwrites what a slow one has not read.
// With -DEPILOGUE_AT=receiver each rank has a weight of its own.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <weft/allreduce/cpu.cpp>

#ifndef RANKS
#define RANKS 4
#endif
#ifndef EPILOGUE_AT
#define EPILOGUE_AT owner
#endif

using namespace weft;

constexpr Reduction R{.ranks = RANKS,
                      .tokens = 10,
                      .direct = 6,
                      .hidden = 16,
                      .dtype = DType::fp32,
                      .epilogue_at = EpilogueAt::EPILOGUE_AT,
                      .missing = Missing::error};
using Shares = ReductionShare<R>;

struct Job {
    u64 base = 0, calls = 0;
    Mailbox boxes[R.ranks] = {};
};

static float number_of(u32 rank, u32 token, u32 i, u64 call) {
    return float(scramble(call * 4096 + token * 64 + rank * 8 + i % 5) % 1024);
}

static ReduceArgs draw_call(const Site& site, u64 call, Backend& backend) {
    ReduceArgs a{};
    a.site = site;
    a.eps = 1.0f;
    backend = Backend(1 + scramble(call) % 3);
    a.tokens = u32(1 + scramble(call + 77) % (backend == Backend::oneshot ? R.direct : R.tokens));
    a.signature = u64(a.tokens) << 20 | u64(backend) << 16;
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

static void run_rank(Job& job, u32 rank, u64& wrong) {
    const Site site{.base = job.base,
                    .stride = sizeof(Shares),
                    .mailbox = u64(&job.boxes[rank]),
                    .rank = rank,
                    .descriptor = 0};
    std::vector<float> x(R.tokens * R.hidden), out(x.size()), norm(x.size());
    const bool differ = R.epilogue_at == EpilogueAt::receiver;
    const std::vector<float> weight(R.hidden, differ ? float(1 << rank) : 1.0f);
    for (u64 call = 1; call <= job.calls; ++call) {
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
        if (load_acquire(&job.boxes[rank].broken_code) != 0) {
            std::printf("rank %u broke with code %u in call %llu\n", rank,
                        job.boxes[rank].broken_code, call);
            wrong += 1;
            return;
        }
        wrong += wrong_numbers(a, out, norm, weight[0], call);
    }
}

int main(int argc, char** argv) {
    Job job;
    job.calls = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 200;
    const u64 first_epoch = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
    const u64 bytes = (sizeof(Shares) + 127) / 128 * 128;
    void* memory = std::aligned_alloc(128, bytes * R.ranks);
    if (memory == nullptr) return 2;
    std::memset(memory, 0, bytes * R.ranks);
    job.base = reinterpret_cast<u64>(memory);
    for (u32 rank = 0; rank < R.ranks; ++rank) {
        Shares& own = *reinterpret_cast<Shares*>(job.base + rank * sizeof(Shares));
        own.header.generation = 1;
        own.header.living = (1u << R.ranks) - 1;
        own.header.deadline_ns = own.header.first_deadline_ns =
            WEFT_ONE_SIDE ? 1000000000ull : 60000000000ull;
        own.header.first_epoch = own.header.state.epoch = first_epoch & epoch_mask;
        std::memset(own.inbox.direct, 0xff, sizeof own.inbox.direct);
        std::memset(own.inbox.part, 0xff, sizeof own.inbox.part);
        std::memset(own.inbox.whole, 0xff, sizeof own.inbox.whole);
    }
    std::vector<u64> wrong(R.ranks);
    std::vector<std::thread> threads;
    for (u32 rank = 0; rank < R.ranks; ++rank)
        threads.emplace_back([&, rank] { run_rank(job, rank, wrong[rank]); });
    for (std::thread& thread : threads) thread.join();
    u64 total = 0;
    for (u64 w : wrong) total += w;
    std::printf("%llu calls of %u ranks: %llu wrong numbers\n", job.calls, R.ranks, total);
    std::free(memory);
    return total != 0;
}
