// SPDX-License-Identifier: Apache-2.0
// What the race programs share: ranks as threads, whose shares are neighbours in one allocation.
// -DRANKS chooses how many, -DDEADLINE_S the seconds that a wait may last.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <weft/device/header.cuh>

#ifndef RANKS
#define RANKS 4
#endif
#ifndef DEADLINE_S
#define DEADLINE_S 60
#endif

using namespace weft;

// The first two arguments of the program: how many rounds, and the epoch before the first one.
template <class Share> struct Race {
    u64 rounds, first_epoch;
    Share* shares;
    Mailbox boxes[RANKS] = {};

    Race(int argc, char** argv)
        : rounds(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 200),
          first_epoch((argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0) & epoch_mask),
          shares(static_cast<Share*>(std::aligned_alloc(128, sizeof(Share) * RANKS))) {
        if (shares == nullptr) std::exit(2);
        std::memset(static_cast<void*>(shares), 0, sizeof(Share) * RANKS);
        for (u32 rank = 0; rank < RANKS; ++rank) {
            Header& header = shares[rank].header;
            header.generation = 1;
            header.living = (1u << RANKS) - 1;
            header.deadline_ns = header.first_deadline_ns = DEADLINE_S * 1000000000ull;
            header.first_epoch = header.state.epoch = first_epoch;
        }
    }
    ~Race() { std::free(shares); }

    Site site(u32 rank) const {
        return {.base = u64(shares),
                .stride = sizeof(Share),
                .mailbox = u64(&boxes[rank]),
                .rank = rank,
                .descriptor = 7};
    }

    // Runs run_rank(site, wrong) on every rank: it counts what is wrong, with `is_broken`.
    template <class RunRank>
    int run(const char* rounds_are, const char* wrong_are, const RunRank& run_rank) const {
        std::vector<u64> wrong(RANKS);
        std::vector<std::thread> threads;
        for (u32 rank = 0; rank < RANKS; ++rank)
            threads.emplace_back([&, rank] { run_rank(site(rank), wrong[rank]); });
        for (std::thread& thread : threads) thread.join();
        u64 total = 0;
        for (u64 w : wrong) total += w;
        std::printf("%llu %s of %u ranks: %llu wrong %s\n", rounds, rounds_are, u32(RANKS), total,
                    wrong_are);
        return total != 0;
    }
};

// Has a wait of this rank failed? Then its rounds are over, and one more thing is wrong.
inline bool is_broken(const Site& site, u64 round, u64& wrong) {
    const u32 code = load_acquire(&mailbox(site).broken_code);
    if (code == 0) return false;
    std::printf("rank %u broke with code %u in round %llu\n", site.rank, code, round);
    ++wrong;
    return true;
}
