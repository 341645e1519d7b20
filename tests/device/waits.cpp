// SPDX-License-Identifier: Apache-2.0
// Asks whether waits are overdue, at times that are given and not measured, and what waits see of a
// host that asks its rank to leave, and of a peer's notice, where another wait of the rank has
// looked round in the same 16 us.

#include <weft/device/wait.cuh>

#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace weft;

namespace {

struct Ranks {
    std::vector<Header> headers{2};
    Mailbox box{};
    Site site{};

    Ranks(u32 rank, u64 deadline_ns, u64 first_deadline_ns) {
        site.base = u64(headers.data());
        site.stride = sizeof(Header);
        site.mailbox = u64(&box);
        site.rank = rank;
        for (Header& header : headers) {
            header.ranks = 2;
            header.living = 3;
            header.deadline_ns = deadline_ns;
            header.first_deadline_ns = first_deadline_ns;
        }
    }
    Header& own() { return headers[site.rank]; }

    // ago: how many ticks ago a wait has looked round last. The tick may change meanwhile: again.
    u32 check(u32 ago, u64 start_ns) {
        for (;;) {
            const u32 tick = u32(now_ns() >> 14);
            own().looked = tick - ago;
            const Wait wait{1, Phase::dispatch, 7, 0};
            const Code found = check_wait(own(), site, wait, start_ns).code;
            if (u32(now_ns() >> 14) == tick) return u32(found);
        }
    }
};

void look() {
    Ranks rank(0, 1'000'000'000'000, 1'000'000'000'000);
    u32 looks = 0;
    for (u64 now = 100 * 16384; now < 110 * 16384; now += 64) looks += looks_round(rank.own(), now);
    std::printf("%u", looks);
    rank.box.host_word[0] = host_asks_to_leave;
    std::printf(" %u %u", rank.check(0, now_ns()), rank.check(1, now_ns()));
    rank.box.host_word[0] = 0;
    rank.own().notices[1] = make_notice(u32(Code::geometry_mismatch), 1, 7);
    std::printf(" %u %u", rank.check(0, now_ns()), rank.check(1, now_ns()));
    std::printf(" %u\n", rank.check(0, now_ns() - 2'000'000'000'000));
}

// Rank `words[0]` of two has waited words[3] ns for rank words[1] to publish epoch words[2]; that
// rank looked round in a wait of its own words[4] ns ago (-1: it does not wait).
bool overdue(const std::vector<long long>& words) {
    constexpr u64 now = 1'000'000;
    Ranks ranks(u32(words[0]), 1000, 8000);
    const u32 peer = u32(words[1]);
    if (words[4] >= 0) ranks.headers[peer].waiting_ns = now - u64(words[4]);
    const Wait wait{peer, Phase::dispatch, u64(words[2]), 0};
    return is_overdue(ranks.own(), ranks.site, wait, now - u64(words[3]), now);
}

}  // namespace

// waits [RANK PEER EPOCH WAITED SEEN_AGO]
int main(int count, char** words) {
    std::vector<long long> numbers;
    for (int i = 1; i < count; ++i) numbers.push_back(std::strtoll(words[i], nullptr, 10));
    if (numbers.empty())
        look();
    else
        std::puts(overdue(numbers) ? "1" : "0");
}
