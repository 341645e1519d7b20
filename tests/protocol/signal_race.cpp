// Sends that wait for tiles, with ranks and their products as threads, for ThreadSanitizer. Each
// rank groups what it received; its product, another thread, stores the rows of y tile by tile and
// adds to a cell for each; the rank sends meanwhile. Every sum is checked at its owner. Exit status
// 0: all words right. -DWAY chooses how rows come home; -DWEAK_SIGNALS=1 makes the product's adds
// order nothing, which x86 hides from the words but not from ThreadSanitizer.
#include <cstdio>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include <weft/protocol/cpu.cpp>
#include <weft/protocol/group_cpu.cpp>

#ifndef WAY
#define WAY push
#endif
#ifndef WEAK_SIGNALS
#define WEAK_SIGNALS 0
#endif

using namespace weft;

constexpr u32 ranks = 3, experts = 4, block_rows = 3, block_columns = 128, blocks = 6;
constexpr Shape S{.ranks = ranks,
                  .tokens = 9,
                  .top_k = 3,
                  .experts = ranks * experts,
                  .hidden = block_columns * blocks,
                  .number = Number::fp32,
                  .planes = 1,
                  .row_bytes = {16},
                  .way = Way::WAY};
constexpr Grouping G{
    .packing = Packing::contiguous, .groups = experts, .rows = 128, .align = 4, .tile = 128};

// What a rank and its product share: the grouped rows, the results, the cells, and whose turn it
// is.
struct Bench {
    std::vector<i32> slot, offsets, counts, position;
    std::vector<i64> home;
    std::vector<float> weight, y;
    std::vector<u8> rows;
    u32 cells[blocks] = {}, begun = 0, ended = 0, arrived = 0;

    Bench()
        : slot(G.rows),
          offsets(experts + 1),
          counts(experts),
          position(ranks * S.tokens * S.top_k),
          home(G.rows),
          weight(G.rows),
          y(u64(G.rows) * S.hidden),
          rows(u64(G.rows) * S.row_bytes[0]) {}
};

struct Job {
    u64 base = 0;
    u32 rounds = 0;
    Mailbox boxes[ranks] = {};
    Bench bench[ranks];
};

// The result of any row of a source's token in a round; small integers, so that sums are exact.
static float answer(u32 slot, u32 round, u32 column) {
    return float((slot * 7 + round * 3 + column / 64) % 31 + 1);
}

static void add_tile(u32* cell) {
    if constexpr (WEAK_SIGNALS)
        __atomic_fetch_add(cell, 1u, __ATOMIC_RELAXED);
    else
        __atomic_fetch_add(cell, 1u, __ATOMIC_RELEASE);
}

static void store_tile(Bench& b, u32 begin, u32 end, u32 block, u32 round) {
    for (u32 row = begin; row < end; ++row)
        for (u32 c = block * block_columns; c < (block + 1) * block_columns; ++c)
            b.y[u64(row) * S.hidden + c] = answer(u32(b.slot[row]), round, c);
    add_tile(b.cells + block);
}

static void await(u32* word, u32 round) {
    for (u32 turns = 0; __atomic_load_n(word, __ATOMIC_ACQUIRE) < round;) relax(++turns);
}

// Begins each round behind the rank's gather, and ends before the next: it reads what gather wrote.
static void run_product(Bench& b, u32 rounds) {
    for (u32 round = 1; round <= rounds; ++round) {
        await(&b.begun, round);
        for (u32 block = 0; block < blocks; ++block)
            for (u32 g = 0; g < experts; ++g) {
                const u32 first = u32(b.offsets[g]), end = first + u32(b.counts[g]);
                for (u32 row = first; row < end; row += block_rows)
                    store_tile(b, row, row + block_rows < end ? row + block_rows : end, block,
                               round);
                if (scramble(round * 64 + block * 8 + g) % 4 == 0) sched_yield();
            }
        __atomic_store_n(&b.ended, round, __ATOMIC_RELEASE);
    }
}

static GroupArgs group_args(Bench& b, const Site& site) {
    GroupArgs a{};
    a.site = site;
    a.rows[0] = b.rows.data();
    a.slot = b.slot.data();
    a.weight = b.weight.data();
    a.offsets = b.offsets.data();
    a.counts = b.counts.data();
    a.position = b.position.data();
    a.home = b.home.data();
    a.y = b.y.data();
    a.end = S.hidden;
    a.cells = b.cells;
    a.block_rows = block_rows;
    a.block_columns = block_columns;
    return a;
}

static u64 wrong_words(const std::vector<float>& out, const std::vector<i32>& ids, u32 rank,
                       u32 tokens, u32 round) {
    u64 wrong = 0;
    for (u32 t = 0; t < tokens; ++t) {
        u32 rows = 0;
        for (u32 k = 0; k < S.top_k; ++k) rows += ids[t * S.top_k + k] >= 0;
        for (u32 c = 0; c < S.hidden; ++c) {
            const float want = float(rows) * answer(rank * S.tokens + t, round, c);
            const float error = out[u64(t) * S.hidden + c] - want;
            wrong += !(error <= 0.1f * want && -error <= 0.1f * want);
        }
    }
    return wrong;
}

static void run_rank(Job& job, u32 rank, u64& wrong) {
    const Site site{.base = job.base,
                    .stride = sizeof(Share<S>),
                    .mailbox = u64(&job.boxes[rank]),
                    .rank = rank,
                    .descriptor = 7};
    Bench& b = job.bench[rank];
    std::vector<u8> x(S.tokens * S.row_bytes[0]);
    std::vector<i32> ids(S.tokens * S.top_k);
    std::vector<float> out(u64(S.tokens) * S.hidden);
    const GroupArgs grouped = group_args(b, site);
    for (u32 round = 1; round <= job.rounds; ++round) {
        const u32 tokens = u32(scramble(round * 8 + rank) % (S.tokens + 1));
        for (u32 i = 0; i < ids.size(); ++i)
            ids[i] = i32((scramble(round * 64 + rank * 16 + i / S.top_k) + i % S.top_k * 5) %
                         (S.experts + 1)) -
                     1;
        DispatchArgs sending{};
        sending.site = site;
        sending.payload[0] = x.data();
        sending.ids = ids.data();
        sending.tokens = tokens;
        sending.ids_bytes = 4;
        dispatch<S>(sending);
        await(&b.ended, round - 1);
        gather<S, G>(grouped);
        __atomic_store_n(&b.begun, round, __ATOMIC_RELEASE);
        send<S, G>(grouped);
        const CombineArgs returning{.site = site,
                                    .out = out.data(),
                                    .add = nullptr,
                                    .tokens = tokens,
                                    .pushers = 0,
                                    .strips = 0};
        combine<S, Part::receive>(returning);
        wrong += wrong_words(out, ids, rank, tokens, round);
        if (load_acquire(&job.boxes[rank].broken_code) != 0) {
            std::printf("rank %u broke in round %u\n", rank, round);
            std::exit(3);
        }
    }
}

int main(int argc, char** argv) {
    static Job job;
    job.rounds = argc > 1 ? u32(std::atoi(argv[1])) : 200;
    void* memory = std::aligned_alloc(128, sizeof(Share<S>) * ranks);
    if (memory == nullptr) return 2;
    std::memset(memory, 0, sizeof(Share<S>) * ranks);
    job.base = reinterpret_cast<u64>(memory);
    u64 wrong[ranks] = {}, total = 0;
    std::vector<std::thread> threads;
    for (u32 rank = 0; rank < ranks; ++rank) {
        Share<S>& own = *reinterpret_cast<Share<S>*>(job.base + rank * sizeof(Share<S>));
        own.header.generation = 1;
        own.header.deadline_ns = own.header.first_deadline_ns = 60000000000ull;
        std::memset(own.inbox.route, 0xff, sizeof own.inbox.route);
        if (S.way == Way::fp8) std::memset(&own.inbox.returned, 0xff, sizeof own.inbox.returned);
    }
    for (u32 rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] { run_product(job.bench[rank], job.rounds); });
        threads.emplace_back([&, rank] { run_rank(job, rank, wrong[rank]); });
    }
    for (std::thread& thread : threads) thread.join();
    for (u64 w : wrong) total += w;
    std::printf("%u rounds of %u ranks: %llu wrong words\n", job.rounds, ranks, total);
    std::free(memory);
    return total != 0;
}
