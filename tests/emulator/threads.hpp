// SPDX-License-Identifier: Apache-2.0
// CTAs, warps and threads as the emulator keeps them: a CTA is a thread of the system, its threads
// are fibers that take turns in it.
#pragma once
#include <sched.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <csetjmp>
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
// NaN where either is.
inline float least(float a, float b) { return a != a || b < a ? (a != a ? a : b) : b != b ? b : a; }
inline float most(float a, float b) { return a != a || b > a ? (a != a ? a : b) : b != b ? b : a; }
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

// A thread's place in its code, where others leave off to let it go on. A context is entered once;
// afterwards only registers are exchanged, since a context's signal mask costs two system calls.
struct Fiber {
    ucontext_t entry;
    std::jmp_buf place;
    bool begun = false;
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
    std::jmp_buf scheduler;
    std::vector<Fiber> fiber;
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

inline void yield() {
    if (_setjmp(cta->fiber[cta->current].place) == 0) _longjmp(cta->scheduler, 1);
}

// Lets the others run until what `at` holds is no longer `from`.
template <class T> void await_change(const T& at, unsigned from) {
    Watch& watch = cta->watch[cta->current];
    watch = {[](const void* place, unsigned old) { return *static_cast<const T*>(place) == old; },
             &at, from};
    while (watch.blocks()) yield();
    watch = {};
}

}  // namespace emulated
