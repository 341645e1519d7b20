// SPDX-License-Identifier: Apache-2.0
// What CUDA C++ brings along, for the emulator's threads.
#pragma once

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
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(x); }
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
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
// The branches of a GPU, from here on; the standard library has been read.
#define __CUDA_ARCH__ 900
