// SPDX-License-Identifier: Apache-2.0
// The tail of dispatch under load, reduced to what can go wrong: a producer on one GPU stores rows
// that carry the number of the round into the other GPU's share, its last CTA raises a flag, and a
// consumer there counts 16-byte vectors of another round. Other NVLink traffic runs beside it, both
// ways. The verbs are the package's own.
#pragma once
#include <weft/device/copy.cuh>
#include <weft/device/team.cuh>

namespace ordering {

using namespace weft;

constexpr u32 ctas = 100, threads = 512;
constexpr u32 noise_ctas = 32, noise_threads = 1024;
constexpr u32 vectors = 14336 / sizeof(uint4);             // of a CTA's row: 7168 bf16
constexpr u32 noise_vectors = (64 << 20) / sizeof(uint4);  // more than the L2 holds

enum class Form {
    ours,   // as dispatch does it
    hole,   // a relaxed counter and one fence: PTX allows stale words (models/ptx A11)
    early,  // the flag before the rows: the consumer must find stale words
};

// One word that is polled or counted, alone in its line.
struct alignas(128) Word {
    u64 value;
};
struct alignas(128) Count {
    u32 value;
};

// The words of a share; the Python mirror is compared with it.
struct Board {
    Word flag;      // at the consumer: the round whose rows have been stored
    Word go;        // at the producer: the round whose rows have been read
    Word done;      // my kernel has left: the background traffic of my GPU may end
    Count arrived;  // CTAs of the running round
    Count left;     // CTAs that have left the kernel
    Word stale;     // at the consumer: vectors of another round than the flag's
    Word late;      // CTAs that gave up at the deadline
};

struct Share {
    Board board;
    uint4 row[ctas][vectors];
    uint4 noise[noise_vectors];
};

struct Args {
    u64 base, stride;  // rank r's Share lies at base + r * stride
    u64 first;         // rounds that were finished before this run
    u64 limit_ns;      // of the whole kernel
    u32 rank, rounds;
};

WEFT_FN Share& share(const Args& a, u32 rank) {
    return *reinterpret_cast<Share*>(a.base + rank * a.stride);
}
WEFT_FN Share& mine(const Args& a) { return share(a, a.rank); }
WEFT_FN Share& peer(const Args& a) { return share(a, 1 - a.rank); }

// The whole team waits for a round; false, for all of it, once the deadline has passed.
WEFT_FN bool await(const Block& team, Word& word, u64 round, u64 deadline) {
    bool arrived = true;
    if (team.lane() == 0) {
        for (u32 polls = 1; load_acquire(&word.value) < round; ++polls) {
            if (polls % 256 == 0 && now_ns() > deadline) {
                arrived = false;
                break;
            }
            relax(polls);
        }
    }
    return team.all(arrived);
}

// As dispatch does it: the counter releases and acquires, the flag releases.
WEFT_FN void publish_ours(const Block& team, Share& own, Word& flag, u64 round) {
    if (team.is_last_cta(&own.board.arrived.value) && team.lane() == 0)
        store_release(&flag.value, round);
}

// As it must not be done: a relaxed counter, and one fence in the last CTA, which orders what that
// CTA stored and not what the others did.
WEFT_FN void publish_hole(const Block& team, Share& own, Word& flag, u64 round) {
    __syncthreads();
    if (team.lane() != 0) return;
    u32* arrived = &own.board.arrived.value;
    const u32 before =
        __nv_atomic_fetch_add(arrived, 1u, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_DEVICE);
    if (before != team.teams() - 1) return;
    __nv_atomic_store_n(arrived, 0u, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_DEVICE);
    __nv_atomic_thread_fence(__NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_SYSTEM);
    __nv_atomic_store_n(&flag.value, round, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
}

// Every CTA comes here once, whether it finished or gave up.
WEFT_FN void leave(const Block& team, const Args& a, bool in_time) {
    Board& board = mine(a).board;
    if (!in_time && team.lane() == 0) atomicAdd(&board.late.value, 1ull);
    if (team.is_last_cta(&board.left.value) && team.lane() == 0)
        store_release(&board.done.value, a.first + a.rounds);
}

template <Form form> WEFT_FN void produce(const Args& a) {
    const Block team;
    Share &own = mine(a), &to = peer(a);
    uint4* row = to.row[blockIdx.x];
    const u64 deadline = now_ns() + a.limit_ns, last = a.first + a.rounds;
    bool in_time = true;
    for (u64 round = a.first + 1; round <= last; ++round) {
        in_time = await(team, own.board.go, round - 1, deadline);
        if (!in_time) break;
        const u32 stamp = u32(round);
        if constexpr (form == Form::early) publish_ours(team, own, to.board.flag, round);
        for (u32 v = team.lane(); v < vectors; v += team.lanes())
            store(row + v, make_uint4(stamp, stamp, stamp, stamp));
        if constexpr (form == Form::ours) publish_ours(team, own, to.board.flag, round);
        if constexpr (form == Form::hole) publish_hole(team, own, to.board.flag, round);
    }
    leave(team, a, in_time);
}

// Reads another CTA's row, last vector first: what was stored last is what would be missing.
WEFT_FN void consume(const Args& a) {
    const Block team;
    Share &own = mine(a), &from = peer(a);
    const uint4* row = own.row[team.teams() - 1 - blockIdx.x];
    const u64 deadline = now_ns() + a.limit_ns, last = a.first + a.rounds;
    u64 stale = 0;
    bool in_time = true;
    for (u64 round = a.first + 1; round <= last; ++round) {
        in_time = await(team, own.board.flag, round, deadline);
        if (!in_time) break;
        const u32 stamp = u32(round);
        for (u32 v = team.lane(); v < vectors; v += team.lanes()) {
            const uint4 seen = load_peer_row(row + vectors - 1 - v);
            if (seen.x != stamp || seen.y != stamp || seen.z != stamp || seen.w != stamp) ++stale;
        }
        publish_ours(team, own, from.board.go, round);
    }
    if (stale != 0) atomicAdd(&own.board.stale.value, stale);
    leave(team, a, in_time);
}

// Stores into the peer's share until this GPU's other kernel has left.
WEFT_FN void disturb(const Args& a) {
    const Block team;
    uint4* to = peer(a).noise;
    const u64 deadline = now_ns() + a.limit_ns, last = a.first + a.rounds;
    for (u32 pass = 0;; ++pass) {
        const bool over = team.lane() == 0 &&
                          (load_acquire(&mine(a).board.done.value) >= last || now_ns() > deadline);
        if (!team.all(!over)) return;
        for (u32 v = blockIdx.x * team.lanes() + team.lane(); v < noise_vectors;
             v += team.teams() * team.lanes())
            store(to + v, make_uint4(pass, pass, pass, pass));
    }
}

}  // namespace ordering
