// SPDX-License-Identifier: Apache-2.0
// Asks whether waits are overdue, at times that are given and not measured.

#include <weft/device/wait.cuh>

#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace weft;

// overdue RANK PEER EPOCH WAITED SEEN_AGO: rank RANK of two has waited WAITED ns for rank PEER to
// publish EPOCH; that rank looked round in a wait of its own SEEN_AGO ns ago (-1: it does not
// wait). The deadline is 1000 ns, in the first epoch 8000.
int main(int, char** words) {
    const auto number = [&](int i) { return std::strtoll(words[i], nullptr, 10); };
    constexpr u64 now = 1'000'000;
    std::vector<Header> headers(2);
    Site site{};
    site.base = u64(headers.data());
    site.stride = sizeof(Header);
    site.rank = u32(number(1));
    for (Header& header : headers) {
        header.ranks = 2;
        header.living = 3;
        header.deadline_ns = 1000;
        header.first_deadline_ns = 8000;
    }
    const u32 peer = u32(number(2));
    if (number(5) >= 0) headers[peer].waiting_ns = now - u64(number(5));
    const Wait wait{peer, Phase::dispatch, u64(number(3)), 0};
    const bool over = is_overdue(headers[site.rank], site, wait, now - u64(number(4)), now);
    std::puts(over ? "overdue" : "in time");
}
