// SPDX-License-Identifier: Apache-2.0
// The memory model: integer names, the operations of every flag and counter (store_release,
// load_acquire, add_acq_rel, claim, raise_to), the clock, and the back-off of a spin loop. All code
// that includes this file is the same text for NVRTC and for c++; this file has the only #if of the
// protocol. Flags that a peer reads have system scope; counters inside one GPU have device scope.
#pragma once

// NVRTC before 13.4 has neither offsetof nor its builtin, but its front end folds this expression
// to a constant.
#if defined(__CUDACC__)
#define WEFT_FN __device__ __forceinline__
#define WEFT_SLOW_FN __device__ __noinline__
#define WEFT_OFFSET(T, member) __INTADDR__(&(((T*)0)->member))
#else
#include <sched.h>
#include <signal.h>
#include <time.h>
#define WEFT_FN inline
#define WEFT_SLOW_FN inline
#define WEFT_OFFSET(T, member) __builtin_offsetof(T, member)
#endif

// Macros of the build:
// -DWEFT_FAULTS=1 arms the named fault points.
// -DWEFT_PROFILE=1 records timelines.
// -DWEFT_WIDE=1 is for more than 32 ranks: sets of ranks take several words.
#ifndef WEFT_FAULTS
#define WEFT_FAULTS 0
#endif
#ifndef WEFT_PROFILE
#define WEFT_PROFILE 0
#endif
#ifndef WEFT_WIDE
#define WEFT_WIDE 0
#endif

namespace weft {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// The atomic operations of both compilers, on words of 32 or 64 bits.
#if defined(__CUDA_ARCH__)
#define WEFT_LOAD(at, order, scope) \
    __nv_atomic_load_n(at, __NV_ATOMIC_##order, __NV_THREAD_SCOPE_##scope)
#define WEFT_STORE(at, value, order, scope) \
    __nv_atomic_store_n(at, value, __NV_ATOMIC_##order, __NV_THREAD_SCOPE_##scope)
#define WEFT_ADD(at, value, order, scope) \
    __nv_atomic_fetch_add(at, value, __NV_ATOMIC_##order, __NV_THREAD_SCOPE_##scope)
#else
#define WEFT_LOAD(at, order, scope) __atomic_load_n(at, __ATOMIC_##order)
#define WEFT_STORE(at, value, order, scope) __atomic_store_n(at, value, __ATOMIC_##order)
#define WEFT_ADD(at, value, order, scope) __atomic_fetch_add(at, value, __ATOMIC_##order)
#endif

// Order: publishes all earlier writes of this thread, and everything that it acquired from its
// team. Pairs with load_acquire.
template <class Word> WEFT_FN void store_release(Word* at, Word value) {
    WEFT_STORE(at, value, RELEASE, SYSTEM);
}

// Order: later reads observe what the releasing thread published.
template <class Word> WEFT_FN Word load_acquire(Word* at) { return WEFT_LOAD(at, ACQUIRE, SYSTEM); }

// Order: later reads observe what a kernel of the same GPU released. Not for flags of peers.
WEFT_FN u32 load_acquire_local(u32* at) { return WEFT_LOAD(at, ACQUIRE, DEVICE); }

// For self-contained words: they publish no other data, and no later read depends on them.
template <class Word> WEFT_FN void store_relaxed(Word* at, Word value) {
    WEFT_STORE(at, value, RELAXED, SYSTEM);
}
template <class Word> WEFT_FN Word load_relaxed(Word* at) { return WEFT_LOAD(at, RELAXED, SYSTEM); }

// Order: releases this team's writes and acquires those of every team that added before, inside one
// GPU. So the last team to add may publish for all of them. A relaxed counter does not allow that
// (models/ptx A11).
WEFT_FN u32 add_acq_rel(u32* at, u32 value) { return WEFT_ADD(at, value, ACQ_REL, DEVICE); }

// Counts without any order: for callers that only need to know that they were the last, and for
// statistics, where the result of the addition is not used.
WEFT_FN u32 add_relaxed(u32* at, u32 value) { return WEFT_ADD(at, value, RELAXED, DEVICE); }
WEFT_FN u64 add_relaxed(u64* at, u64 value) { return WEFT_ADD(at, value, RELAXED, DEVICE); }

// Changes a word from `free` to `owned`; true for the one thread that succeeds.
WEFT_FN bool claim(u32* at, u32 free, u32 owned) {
#if defined(__CUDA_ARCH__)
    return __nv_atomic_compare_exchange_n(at, &free, owned, false, __NV_ATOMIC_ACQ_REL,
                                          __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_DEVICE);
#else
    return __atomic_compare_exchange_n(at, &free, owned, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
#endif
}

// Raises a word to at least `value`. Threads of this GPU may race for it; no thread waits for it.
WEFT_FN void raise_to(u64* at, u64 value) {
#if defined(__CUDA_ARCH__)
    __nv_atomic_fetch_max(at, value, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_DEVICE);
#else
    if (*at < value) *at = value;
#endif
}

// Nanoseconds of a clock that all ranks of a host share, accurate enough for deadlines. On a GPU
// its resolution is up to 1 us.
WEFT_FN u64 now_ns() {
#if defined(__CUDA_ARCH__)
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
#elif !defined(__CUDACC__)
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return u64(t.tv_sec) * 1000000000ull + u64(t.tv_nsec);
#else
    return 0;
#endif
}

// Cycles of this multiprocessor's clock, nanoseconds on a CPU. Cheap to read, but not comparable
// between multiprocessors.
WEFT_FN u64 ticks() {
#if defined(__CUDA_ARCH__)
    u64 t;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(t));
    return t;
#else
    return now_ns();
#endif
}

// The IEEE square root, rounded to nearest.
WEFT_FN float square_root(float x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#elif !defined(__CUDACC__)
    return __builtin_sqrtf(x);
#else
    return x;
#endif
}

// The number of bits set.
WEFT_FN u32 bits_in(u32 word) {
#if defined(__CUDA_ARCH__)
    return u32(__popc(word));
#else
    return u32(__builtin_popcount(word));
#endif
}

// The position of the highest set bit plus one; 0 for 0.
WEFT_FN u32 bit_width(u64 word) {
#if defined(__CUDA_ARCH__)
    return u32(64 - __clzll(i64(word)));
#else
    return word == 0 ? 0 : u32(64 - __builtin_clzll(word));
#endif
}

// Polls between two checks of the conditions that end a wait: on a GPU 0.3 ms or more. On a CPU the
// number is so small that the clock of a wait starts before the thread first yields its core.
#if defined(__CUDACC__)
constexpr u32 polls_per_check = 1024;
#else
constexpr u32 polls_per_check = 32;
#endif

// Failed polls after which a wait is timed and recorded. On a GPU that is about 2 us, the wait of a
// small round whose ranks begin together: the clock and the counters lengthened such rounds by up
// to 11 % (2 x H200, 2026-11-29).
#if defined(__CUDA_ARCH__)
constexpr u32 untimed_polls = WEFT_PROFILE ? 0 : 16;
#else
constexpr u32 untimed_polls = 0;
#endif

// The back-off of a spin loop after a number of polls. CPU ranks may outnumber the cores, so they
// yield after a short spin: 4 ranks on a CI machine with 2 cores took 16.8 us per round with the
// yield and 11.6 ms without it (2026-11-20). After more polls they sleep: next to a busy thread of
// another program each yield may last a whole time slice, and a round took 700 us; with sleeps it
// took 16 us (2026-11-21). GPU threads pause for 64 ns from 512 polls (about 70 us) on, where the
// pause is negligible: a rank that is up to 600 us late costs only its own delay (2026-11-27).
WEFT_FN void relax(u32 polls) {
#if defined(__CUDA_ARCH__)
    if (polls > 512) __nanosleep(64);
#elif !defined(__CUDACC__)
    if (polls > 200) {
        const timespec pause{.tv_sec = 0, .tv_nsec = 50'000};
        if (polls % 16 == 0) nanosleep(&pause, nullptr);
    } else if (polls > 50) {
        sched_yield();
    }
#else
    (void)polls;
#endif
}

// Ends the process as a crash does, without a handler or clean-up. A kernel cannot do that to its
// host.
WEFT_FN void end_process() {
#if !defined(__CUDACC__)
    raise(SIGKILL);
#endif
}

}  // namespace weft
