// The memory model, spelled once: integer names, the verbs every flag and counter goes through
// (store_release, load_acquire, add_acq_rel, claim, raise_to), the clock and the waiting loop's
// turn. Everything above this file is the same text for NVRTC and for c++; this file holds the only
// #if of the protocol. Scopes: flags that a peer reads are system scope; counters inside one GPU
// are device scope.
#pragma once

// NVRTC before 13.4 knows neither offsetof nor its builtin; its front end has this constant
// expression.
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

// Compile with -DWEFT_FAULTS=1 to arm the named fault points, -DWEFT_PROFILE=1 to keep timelines,
// -DWEFT_WEAK_FLAGS=1 to break the release on purpose, -DWEFT_ONE_SIDE=1 to take the second buffer
// away where two are needed, -DWEFT_NO_GRANTS=1 to store into inboxes that nobody has emptied (the
// race tests must then fail).
#ifndef WEFT_FAULTS
#define WEFT_FAULTS 0
#endif
#ifndef WEFT_PROFILE
#define WEFT_PROFILE 0
#endif
#ifndef WEFT_ONE_SIDE
#define WEFT_ONE_SIDE 0
#endif
#ifndef WEFT_WEAK_FLAGS
#define WEFT_WEAK_FLAGS 0
#endif
#ifndef WEFT_NO_GRANTS
#define WEFT_NO_GRANTS 0
#endif

namespace weft {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// Order: publishes everything this thread wrote, or acquired from its team, before it. Pairs with
// load_acquire.
WEFT_FN void store_release(u64* at, u64 value) {
#if defined(__CUDA_ARCH__)
    __nv_atomic_store_n(at, value, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_SYSTEM);
#elif WEFT_WEAK_FLAGS
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
#else
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
#endif
}

WEFT_FN void store_release(u32* at, u32 value) {
#if defined(__CUDA_ARCH__)
    __nv_atomic_store_n(at, value, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_SYSTEM);
#else
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
#endif
}

// Order: what the releasing thread published may be read after it.
WEFT_FN u64 load_acquire(u64* at) {
#if defined(__CUDA_ARCH__)
    return __nv_atomic_load_n(at, __NV_ATOMIC_ACQUIRE, __NV_THREAD_SCOPE_SYSTEM);
#else
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
#endif
}

WEFT_FN u32 load_acquire(u32* at) {
#if defined(__CUDA_ARCH__)
    return __nv_atomic_load_n(at, __NV_ATOMIC_ACQUIRE, __NV_THREAD_SCOPE_SYSTEM);
#else
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
#endif
}

// Order: what a kernel of the same GPU released may be read after it. No peer is meant.
WEFT_FN u32 load_acquire_local(u32* at) {
#if defined(__CUDA_ARCH__)
    return __nv_atomic_load_n(at, __NV_ATOMIC_ACQUIRE, __NV_THREAD_SCOPE_DEVICE);
#else
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
#endif
}

// Words that carry their own meaning: nothing else is published by them, or read behind them.
WEFT_FN void store_relaxed(u64* at, u64 value) {
#if defined(__CUDA_ARCH__)
    __nv_atomic_store_n(at, value, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
#else
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
#endif
}

WEFT_FN void store_relaxed(u32* at, u32 value) {
#if defined(__CUDA_ARCH__)
    __nv_atomic_store_n(at, value, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
#else
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
#endif
}

WEFT_FN u64 load_relaxed(u64* at) {
#if defined(__CUDA_ARCH__)
    return __nv_atomic_load_n(at, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
#else
    return __atomic_load_n(at, __ATOMIC_RELAXED);
#endif
}

WEFT_FN u32 load_relaxed(u32* at) {
#if defined(__CUDA_ARCH__)
    return __nv_atomic_load_n(at, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
#else
    return __atomic_load_n(at, __ATOMIC_RELAXED);
#endif
}

// Order: a release of this team's writes and an acquire of every earlier team's, inside one GPU.
// The last one to add may publish for all (a relaxed counter may not: models/ptx A11).
WEFT_FN u32 add_acq_rel(u32* at, u32 value) {
#if defined(__CUDA_ARCH__)
    return __nv_atomic_fetch_add(at, value, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE);
#else
    return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL);
#endif
}

// Counts, and orders nothing: for those who only need to know that they were the last to come.
WEFT_FN u32 add_relaxed(u32* at, u32 value) {
#if defined(__CUDA_ARCH__)
    return __nv_atomic_fetch_add(at, value, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_DEVICE);
#else
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
#endif
}

// Takes a word that is `free` and makes it `mine`; true for the one winner.
WEFT_FN bool claim(u32* at, u32 free, u32 mine) {
#if defined(__CUDA_ARCH__)
    return __nv_atomic_compare_exchange_n(at, &free, mine, false, __NV_ATOMIC_ACQ_REL,
                                          __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_DEVICE);
#else
    return __atomic_compare_exchange_n(at, &free, mine, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
#endif
}

// Makes a word at least `value`; one that threads of this GPU race for. Nobody waits for it.
WEFT_FN void raise_to(u64* at, u64 value) {
#if defined(__CUDA_ARCH__)
    __nv_atomic_fetch_max(at, value, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_DEVICE);
#else
    if (*at < value) *at = value;
#endif
}

// Nanoseconds of a clock that all ranks of a host share well enough for deadlines (GPU: ticks of up
// to 1 us).
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

// Turns of the clock of the multiprocessor that a thread runs on: cheap to read, and of no meaning
// beside another one's. On a CPU nanoseconds.
WEFT_FN u64 ticks() {
#if defined(__CUDA_ARCH__)
    u64 t;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(t));
    return t;
#else
    return now_ns();
#endif
}

// IEEE's square root, rounded to nearest.
WEFT_FN float square_root(float x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#elif !defined(__CUDACC__)
    return __builtin_sqrtf(x);
#else
    return x;
#endif
}

// How many bits are set.
WEFT_FN u32 bits_in(u32 word) {
#if defined(__CUDA_ARCH__)
    return u32(__popc(word));
#else
    return u32(__builtin_popcount(word));
#endif
}

// Polls between two looks at what may end a wait. On a GPU about a millisecond; on a CPU so few
// that the clock of a wait starts before it first gives its core away.
#if defined(__CUDACC__)
constexpr u32 polls_per_check = 1024;
#else
constexpr u32 polls_per_check = 32;
#endif

// One turn of a waiting loop. CPU ranks may outnumber the cores, so after a short spin they hand
// the core over: 4 ranks on a CI machine of 2 cores took 16.8 us a round with the yield and 11.6 ms
// without it (2026-11-20). Who still waits sleeps: beside one busy thread of another program each
// yield may last a slice of it, and a round then took 700 us, with sleeps 16 us (2026-11-21).
WEFT_FN void relax(u32 turns) {
#if defined(__CUDA_ARCH__)
    if (turns > 4096) __nanosleep(64);
#elif !defined(__CUDACC__)
    if (turns > 200) {
        const timespec pause{.tv_sec = 0, .tv_nsec = 50'000};
        if (turns % 16 == 0) nanosleep(&pause, nullptr);
    } else if (turns > 50) {
        sched_yield();
    }
#else
    (void)turns;
#endif
}

// What a crash looks like to the peers: no handler, no clean-up. A kernel cannot do it to its host.
WEFT_FN void end_process() {
#if !defined(__CUDACC__)
    raise(SIGKILL);
#endif
}

}  // namespace weft
