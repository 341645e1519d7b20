// SPDX-License-Identifier: Apache-2.0
// Named fault points, compiled in only with -DWEFT_FAULTS=1. A test writes one Fault into its own
// header. The protocol passes the points by name, and the planned one acts: it delays, drops a
// flag, corrupts it, or kills the rank.
#pragma once
#include <weft/device/header.cuh>

namespace weft {

enum class Point : u32 {
    none = 0,
    dispatch_enter = 1,
    after_payload = 2,
    before_flag = 3,
    before_poll = 4,
    combine_enter = 5,
    before_ready = 6,
    before_read = 7,
    reduce_enter = 8,
    after_rows = 9,
    before_rows = 10,
    before_moments = 11,
};
enum class Action : u32 { delay = 1, jitter = 2, drop = 3, lie = 4, stay_away = 5, die = 6 };
constexpr u64 every_epoch = ~0ull;

WEFT_FN u64 scramble(u64 x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
}

WEFT_FN void pause_ns(u64 duration) {
    const u64 until = now_ns() + duration;
    while (now_ns() < until) relax(1u << 16);
}

// The action planned for this point, or none. Delays are executed here.
WEFT_FN Action fault(Header& header, Point point, u32 peer, u64 epoch) {
    if constexpr (WEFT_FAULTS) {
        const Fault plan = header.fault;
        if (plan.point != u32(point) || (plan.epoch != every_epoch && plan.epoch != epoch))
            return Action(0);
        if (plan.peer != max_ranks && plan.peer != peer) return Action(0);
        const Action action = Action(plan.action);
        if (action == Action::delay) pause_ns(plan.argument);
        if (action == Action::jitter)
            pause_ns(scramble(epoch * 64 + peer * 8 + u32(point)) % (plan.argument + 1));
        if (action == Action::die) end_process();
        return action;
    }
    return Action(0);
}

}  // namespace weft
