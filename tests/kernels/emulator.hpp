// As much of a GPU as the kernels need, on a CPU: a CTA is a thread of the system, its threads are
// fibers that take turns in it, a cluster's CTAs find each other's shared memory. Slow, and in
// order where a GPU is not: what threads see here says nothing about memory order. What they
// promise each other does: memory.hpp.
#pragma once
#include <sched.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#define __shared__ alignas(16) static thread_local
#define __noinline__
#define __align__(bytes)

struct uint4 {
    unsigned x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct float4 {
    float x, y, z, w;
};
struct Index {
    unsigned x, y, z;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

namespace emulated {

// numbers.cpp
unsigned narrow_bf16(float), narrow_fp16(float), to_e4m3(float);
float widen_fp16(unsigned), from_e4m3(unsigned);
inline unsigned halves_of_e4m3(unsigned pair) {
    return narrow_fp16(from_e4m3(pair & 0xff)) | narrow_fp16(from_e4m3(pair >> 8 & 0xff)) << 16;
}
inline unsigned long long clock_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return (unsigned long long)std::chrono::nanoseconds(now).count();
}

using Clock = std::vector<unsigned>;  // of every thread that is watched: memory.hpp

struct Cluster {
    std::atomic<unsigned> arrived{0}, phase{0};
    Clock gathered[2];
    std::vector<char*> anchors;  // of each CTA's thread-local memory, in which shared memory lies
};

struct Warp {
    unsigned long long value[32] = {};
    unsigned arrived = 0, phase = 0, lanes = 0;
    Clock gathered[2];
};

// What a thread waits for: it need not run while still(at, from).
struct Watch {
    bool (*still)(const void* at, unsigned from) = nullptr;
    const void* at = nullptr;
    unsigned from = 0;

    bool blocks() const { return still != nullptr && still(at, from); }
};

struct Cta {
    Index block, grid, size;
    unsigned rank = 0, neighbours = 1, current = 0, running = 0;
    unsigned owner = 0, number = 0;         // the rank of the group; which CTA of the kernel
    unsigned long long base = 0, span = 0;  // where it sees the shares of all ranks
    void* own_places = nullptr;             // what is known of other memory, until the kernel ends
    bool watched = false;
    std::unordered_set<unsigned long long> told;  // polls that have been written down
    Clock gathered[2];
    Cluster* cluster = nullptr;
    ucontext_t scheduler;
    std::vector<ucontext_t> fiber;
    std::vector<bool> done;
    std::vector<Watch> watch;
    std::vector<unsigned> awaited;  // the phase that each thread's last arrival belongs to
    std::vector<Warp> warp;
    unsigned arrived = 0, phase = 0;
    int all[2] = {1, 1}, any[2] = {0, 0};
    std::function<void()> body;
};

inline thread_local Cta* cta = nullptr;
inline thread_local char anchor = 0;

inline void yield() { swapcontext(&cta->fiber[cta->current], &cta->scheduler); }

// Lets the others run until what `at` holds is no longer `from`.
template <class T> void await_change(const T& at, unsigned from) {
    Watch& watch = cta->watch[cta->current];
    watch = {[](const void* place, unsigned old) { return *static_cast<const T*>(place) == old; },
             &at, from};
    while (watch.blocks()) yield();
    watch = {};
}

}  // namespace emulated
#include "memory.hpp"
namespace emulated {

inline void enter() {
    Cta& own = *cta;
    own.body();
    own.done[own.current] = true;
    --own.running;
    setcontext(&own.scheduler);
}

// What a thread did before it arrives at a barrier, and what it knows when it has left.
inline void gather(Clock& gathered) {
    if (!cta->watched) return;
    Clock& own = memory.clocks[self()];
    join(gathered, own);
    ++own[self()];
}
inline void spread(const Clock& gathered) {
    if (cta->watched) join(memory.clocks[self()], gathered);
}

// Lanes of a warp meet. All of them must come: no kernel here lets one leave early. What they
// exchange on the way orders no memory, `__syncwarp` does.
inline void meet_warp(bool orders = false) {
    Warp& warp = cta->warp[cta->current / 32];
    const unsigned phase = warp.phase;
    Clock& gathered = warp.gathered[phase & 1];
    if (orders) gather(gathered);
    if (++warp.arrived == warp.lanes) {
        warp.arrived = 0;
        warp.gathered[~phase & 1].clear();
        ++warp.phase;
    }
    await_change(warp.phase, phase);
    if (orders) spread(gathered);
}

// Both verdicts of a CTA's barrier; two sets in turn, because a fast thread may be in the next one.
inline int meet_cta(bool mine, bool wants_all) {
    Cta& own = *cta;
    const unsigned phase = own.phase, side = phase & 1;
    own.all[side] &= mine;
    own.any[side] |= mine;
    gather(own.gathered[side]);
    if (++own.arrived == own.size.x) {
        own.arrived = 0;
        own.all[side ^ 1] = 1;
        own.any[side ^ 1] = 0;
        own.gathered[side ^ 1].clear();
        ++own.phase;
    }
    await_change(own.phase, phase);
    spread(own.gathered[side]);
    return wants_all ? own.all[side] : own.any[side];
}

inline void arrive_cluster() {
    Cta& own = *cta;
    Cluster& cluster = *own.cluster;
    const std::scoped_lock lock(memory.mutex);
    const unsigned phase = own.awaited[own.current] = cluster.phase;
    gather(cluster.gathered[phase & 1]);
    if (++cluster.arrived == own.neighbours * own.size.x) {
        cluster.arrived = 0;
        cluster.gathered[~phase & 1].clear();
        ++cluster.phase;
    }
}
inline void wait_cluster() {
    const unsigned phase = cta->awaited[cta->current];
    await_change(cta->cluster->phase, phase);
    const std::scoped_lock lock(memory.mutex);
    spread(cta->cluster->gathered[phase & 1]);
}

// The same place in the shared memory of a neighbour.
template <class T> T* neighbour(unsigned rank, T* at) {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(at) - &anchor +
                                cta->cluster->anchors[rank]);
}

template <class T> T exchange(T value, unsigned from) {
    Warp& warp = cta->warp[cta->current / 32];
    std::memcpy(&warp.value[cta->current % 32], &value, sizeof value);
    meet_warp();
    std::memcpy(&value, &warp.value[from], sizeof value);
    meet_warp();
    return value;
}

// Calls visit(lane, value) with every lane's value.
template <class T, class Visit> void survey(T value, Visit visit) {
    Warp& warp = cta->warp[cta->current / 32];
    std::memcpy(&warp.value[cta->current % 32], &value, sizeof value);
    meet_warp();
    for (unsigned lane = 0; lane < warp.lanes; ++lane) {
        T theirs;
        std::memcpy(&theirs, &warp.value[lane], sizeof theirs);
        visit(lane, theirs);
    }
    meet_warp();
}

// A fiber for each thread, none of which has begun; returns their stacks.
inline std::unique_ptr<char[]> make_fibers(Cta& own) {
    constexpr std::size_t stack = 128 * 1024;
    std::unique_ptr<char[]> stacks(new char[stack * own.size.x]);
    own.fiber.resize(own.size.x);
    own.done.assign(own.size.x, false);
    own.watch.assign(own.size.x, {});
    own.awaited.assign(own.size.x, 0);
    own.warp.resize((own.size.x + 31) / 32);
    own.running = own.size.x;
    for (unsigned i = 0; i < own.size.x; ++i) {
        ++own.warp[i / 32].lanes;
        getcontext(&own.fiber[i]);
        own.fiber[i].uc_stack.ss_sp = stacks.get() + i * stack;
        own.fiber[i].uc_stack.ss_size = stack;
        own.fiber[i].uc_link = &own.scheduler;
        makecontext(&own.fiber[i], enter, 0);
    }
    return stacks;
}

// Lets one thread of a CTA run until it waits.
inline void resume(Cta& own, unsigned thread) {
    own.current = thread;
    swapcontext(&own.scheduler, &own.fiber[thread]);
}

inline void run_cta(Cta& own) {
    cta = &own;
    const std::unique_ptr<char[]> stacks = make_fibers(own);
    while (own.running != 0) {
        for (unsigned i = 0; i < own.size.x; ++i) {
            if (!own.done[i] && !own.watch[i].blocks()) resume(own, i);
        }
        sched_yield();
    }
}

struct Grid {
    unsigned x, y, threads, neighbours = 1, owner = owners;
    unsigned long long base = 0, span = 0;
};

// The same as a rank of a group launches it, whose kernels can be watched.
template <class Site> Grid seen_from(const Site& site, unsigned ranks, Grid grid) {
    grid.owner = site.rank, grid.base = site.base, grid.span = ranks * site.stride;
    return grid;
}

// Runs a kernel to its end, all CTAs at once.
inline void launch(const Grid& grid, const std::function<void()>& kernel) {
    const unsigned ctas = grid.x * grid.y, neighbours = grid.neighbours;
    const bool watched = memory.watched && grid.owner < owners;
    if (watched && ctas * grid.threads >= seats) std::abort();
    if (watched) memory.begin(grid.owner, ctas * grid.threads);
    std::vector<Cluster> clusters(ctas / neighbours);
    for (Cluster& cluster : clusters) cluster.anchors.resize(neighbours);
    Places own_places;
    std::atomic<unsigned> ready{0};
    std::vector<std::thread> running;
    for (unsigned b = 0; b < ctas; ++b)
        running.emplace_back([&, b] {
            Cta own;
            own.block = {b % grid.x, b / grid.x, 0};
            own.grid = {grid.x, grid.y, 1};
            own.size = {grid.threads, 1, 1};
            own.rank = b % neighbours;
            own.neighbours = neighbours;
            own.cluster = &clusters[b / neighbours];
            own.cluster->anchors[own.rank] = &anchor;
            own.body = kernel;
            own.owner = grid.owner;
            own.number = b;
            own.base = grid.base;
            own.span = grid.span;
            own.own_places = &own_places;
            own.watched = watched;
            for (++ready; ready < ctas;) sched_yield();
            run_cta(own);
            // Shared memory lives as long as its thread: nobody leaves before all are done.
            for (++ready; ready < 2 * ctas;) sched_yield();
        });
    for (std::thread& thread : running) thread.join();
    if (watched) memory.end(grid.owner, ctas * grid.threads);
}
inline void launch(unsigned ctas, unsigned threads, unsigned neighbours,
                   const std::function<void()>& kernel) {
    launch({ctas, 1, threads, neighbours}, kernel);
}

}  // namespace emulated

#define threadIdx (Index{emulated::cta->current, 0, 0})
#define blockIdx (emulated::cta->block)
#define gridDim (emulated::cta->grid)
#define blockDim (emulated::cta->size)

inline void __syncthreads() { emulated::meet_cta(true, true); }
inline int __syncthreads_and(int mine) { return emulated::meet_cta(mine != 0, true); }
inline int __syncthreads_or(int mine) { return emulated::meet_cta(mine != 0, false); }
inline void __syncwarp() { emulated::meet_warp(true); }
inline void __nanosleep(unsigned) { emulated::yield(); }
template <class T> T __shfl_xor_sync(unsigned, T value, unsigned step) {
    return emulated::exchange(value, (emulated::cta->current % 32) ^ step);
}
template <class T> T __shfl_sync(unsigned, T value, unsigned lane) {
    return emulated::exchange(value, lane % 32);
}
template <class T> T __shfl_up_sync(unsigned, T value, unsigned step) {
    const unsigned lane = emulated::cta->current % 32;
    return emulated::exchange(value, lane >= step ? lane - step : lane);
}
inline unsigned __ballot_sync(unsigned, int mine) {
    unsigned bits = 0;
    emulated::survey(mine != 0, [&](unsigned lane, bool set) { bits |= unsigned(set) << lane; });
    return bits;
}
inline int __any_sync(unsigned mask, int mine) { return __ballot_sync(mask, mine) != 0; }
template <class T> unsigned __match_any_sync(unsigned, T mine) {
    unsigned bits = 0;
    emulated::survey(mine,
                     [&](unsigned lane, T other) { bits |= unsigned(other == mine) << lane; });
    return bits;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    for (unsigned step = 16; step != 0; step /= 2) {
        const unsigned other = __shfl_xor_sync(~0u, value, step);
        value = other > value ? other : value;
    }
    return value;
}
inline int __all_sync(unsigned all, int mine) { return __ballot_sync(all, mine == 0) == 0; }
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
    unsigned found = 0;
    emulated::survey(value, [&](unsigned, unsigned other) { found |= other; });
    return found;
}
// In shared memory, which one thread of the system has for itself.
inline unsigned atomicOr(unsigned* at, unsigned bits) {
    const unsigned before = *at;
    *at |= bits;
    return before;
}
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __expf(float x) { return std::exp(x); }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
// The branches of a GPU, from here on; the standard library has been read.
#define __CUDA_ARCH__ 900
