// SPDX-License-Identifier: Apache-2.0
// Loads and stores on this GPU: 16-byte vectors, the cache hints that measured best, conversion of
// elements, and their quotients.
#pragma once
#include <weft/device/header.cuh>

namespace weft {

// An unsigned vector of N bytes; vector_bytes is the widest that a row allows.
template <u32 N> struct Vector;
template <> struct Vector<16> {
    using type = uint4;
};
template <> struct Vector<8> {
    using type = uint2;
};
template <> struct Vector<4> {
    using type = u32;
};
template <> struct Vector<2> {
    using type = u16;
};
template <> struct Vector<1> {
    using type = u8;
};

constexpr u32 vector_bytes(u32 row_bytes) {
    return row_bytes % 16 == 0  ? 16
           : row_bytes % 8 == 0 ? 8
           : row_bytes % 4 == 0 ? 4
           : row_bytes % 2 == 0 ? 2
                                : 1;
}

// A load of data that is read once: it allocates no line in L1.
WEFT_FN uint4 load_once(const uint4* at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

// Loads from the caller's own tensors. The non-coherent path (`.nc`) is not allowed: with PDL this
// kernel may run while its predecessor still writes them.
WEFT_FN uint4 load_input(const uint4* at) { return load_once(at); }
template <class V> WEFT_FN V load_input(const V* at) { return *at; }

// Loads from a row that a peer wrote, or that is in a peer's memory.
WEFT_FN uint4 load_peer_row(const uint4* at) { return load_once(at); }

// Loads a word now that is used later. The compiler may not move the load to its use, after another
// wait.
WEFT_FN u32 load_early(const void* at) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

template <u32 words> WEFT_FN RankWords<words> load_early(const RankWords<words>* at) {
    RankWords<words> set;
    for (u32 i = 0; i < words; ++i) set.word[i] = load_early(&at->word[i]);
    return set;
}

WEFT_FN void store(uint4* at, uint4 v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
template <class V> WEFT_FN void store(V* at, V v) { *at = v; }

// Flag-in-data: a peer writes four words one by one, and this rank polls them in its own memory.
// The accesses are strong but order nothing, and a 16-byte access may be observed in parts.
WEFT_FN uint4 poll_vector(const uint4* at) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

WEFT_FN void post_vector(uint4* at, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

// The same as two unordered 64-bit accesses, each of which is single-copy atomic. For pairs of
// words in which one is the tag of the other; above, the four words are independent (models/ptx
// E1).
WEFT_FN uint4 poll_u64_pair(const uint4* at) {
    uint4 v;
    asm volatile(
        "{.reg .b64 low, high; ld.relaxed.sys.global.v2.b64 {low, high}, [%4]; "
        "mov.b64 {%0,%1}, low; mov.b64 {%2,%3}, high;}"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at)
        : "memory");
    return v;
}

WEFT_FN void post_u64_pair(uint4* at, uint4 v) {
    asm volatile(
        "{.reg .b64 low, high; mov.b64 low, {%1,%2}; mov.b64 high, {%3,%4}; "
        "st.relaxed.sys.global.v2.b64 [%0], {low, high};}" ::"l"(at),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}

// x / y within two units in the last place, for all y: an eighth of a division's instructions.
WEFT_FN float div_full(float x, float y) {
    float ratio;
    asm("div.full.f32 %0, %1, %2;" : "=f"(ratio) : "f"(x), "f"(y));
    return ratio;
}

// 1 / x and 2^x to one unit and two in the last place; results below 2^-126 are 0.
WEFT_FN float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
WEFT_FN float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// NaN where either is NaN, unlike fminf and fmaxf.
WEFT_FN float min_nan(float x, float y) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
    return least;
}
WEFT_FN float max_nan(float x, float y) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
    return most;
}

WEFT_FN float low_half(DType dtype, u32 pair) {
    if (dtype == DType::bf16) return __uint_as_float(pair << 16);
    float value;
    asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, lo;}" : "=f"(value) : "r"(pair));
    return value;
}

WEFT_FN float high_half(DType dtype, u32 pair) {
    if (dtype == DType::bf16) return __uint_as_float(pair & 0xffff0000u);
    float value;
    asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, hi;}" : "=f"(value) : "r"(pair));
    return value;
}

WEFT_FN u32 pack_halves(DType dtype, float low, float high) {
    u32 pair;
    if (dtype == DType::bf16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

constexpr u32 elements_in_vector(DType dtype) { return dtype == DType::fp32 ? 4 : 8; }

// x[i] = the elements of one 16-byte vector.
template <DType D> WEFT_FN void widen_vector(float (&x)[elements_in_vector(D)], uint4 v) {
    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        if constexpr (D == DType::fp32) {
            x[i] = __uint_as_float(word[i]);
        } else {
            x[2 * i] = low_half(D, word[i]);
            x[2 * i + 1] = high_half(D, word[i]);
        }
    }
}

// sum[i] += the elements of one 16-byte vector.
template <DType D> WEFT_FN void add_vector(float (&sum)[elements_in_vector(D)], uint4 v) {
    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        if constexpr (D == DType::fp32) {
            sum[i] += __uint_as_float(word[i]);
        } else {
            sum[2 * i] += low_half(D, word[i]);
            sum[2 * i + 1] += high_half(D, word[i]);
        }
    }
}

// sum[i] += weight * the elements of one 16-byte vector. Product and sum are rounded separately:
// the same bits as on a CPU, and as two operations in torch.
template <DType D>
WEFT_FN void add_weighted(float (&sum)[elements_in_vector(D)], float weight, uint4 v) {
    float value[elements_in_vector(D)] = {};
    add_vector<D>(value, v);
#pragma unroll
    for (u32 i = 0; i < elements_in_vector(D); ++i)
        sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, value[i]));
}

// Rounds once, to nearest even.
template <DType D> WEFT_FN uint4 round_vector(const float (&sum)[elements_in_vector(D)]) {
    u32 word[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        if constexpr (D == DType::fp32)
            word[i] = __float_as_uint(sum[i]);
        else
            word[i] = pack_halves(D, sum[2 * i], sum[2 * i + 1]);
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

}  // namespace weft
