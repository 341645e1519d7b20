// SPDX-License-Identifier: Apache-2.0
// What waits see of a host that asks its rank to leave, and of a peer's notice, where another wait
// of the rank has looked round in the same 16 us.

#include <weft/device/wait.cuh>

#include <cstdio>
#include <vector>

using namespace weft;

namespace {

struct Rank {
    std::vector<Header> headers{2};
    Mailbox box{};
    Site site{};

    Rank() {
        site.base = u64(headers.data());
        site.stride = sizeof(Header);
        site.mailbox = u64(&box);
        for (Header& header : headers) {
            header.ranks = 2;
            header.living = 3;
            header.deadline_ns = header.first_deadline_ns = 1'000'000'000'000;
        }
    }
    Header& own() { return headers[0]; }

    // ago: how many ticks ago a wait has looked round last. The tick may change meanwhile: again.
    Code check(u32 ago, u64 start_ns) {
        for (;;) {
            const u32 tick = u32(now_ns() >> 14);
            own().looked = tick - ago;
            const Wait wait{1, Phase::dispatch, 7, 0};
            const Code found = check_wait(own(), site, wait, start_ns).code;
            if (u32(now_ns() >> 14) == tick) return found;
        }
    }
};

}  // namespace

int main() {
    Rank rank;
    u32 looks = 0;
    for (u64 now = 100 * 16384; now < 110 * 16384; now += 64) looks += looks_round(rank.own(), now);
    std::printf("looks %u\n", looks);

    rank.box.host_word[0] = host_asks_to_leave;
    std::printf("asked %u %u\n", u32(rank.check(0, now_ns())), u32(rank.check(1, now_ns())));

    rank.box.host_word[0] = 0;
    rank.own().notices[1] = make_notice(u32(Code::geometry_mismatch), 1, 7);
    std::printf("told %u %u\n", u32(rank.check(0, now_ns())), u32(rank.check(1, now_ns())));
    std::printf("overdue %u\n", u32(rank.check(0, now_ns() - 2'000'000'000'000)));
}
