// How bytes move on this GPU: 16-byte vectors, the cache hints that measured best, and number
// conversion.
#pragma once
#include <weft/device/header.cuh>

namespace weft {

// An unsigned vector of N bytes, the widest that a row of `row_bytes` allows.
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

// The caller's own tensors. Not through the non-coherent path (`.nc`): a kernel that overlaps its
// predecessor is alive while that one still writes them.
WEFT_FN uint4 load_input(const uint4* at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}
template <class V> WEFT_FN V load_input(const V* at) { return *at; }

// A row that a peer wrote, or that lies in a peer's memory.
WEFT_FN uint4 load_shared_row(const uint4* at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

// A word that is asked for here and looked at later: the compiler may not move the load to where it
// is needed, behind another one's wait.
WEFT_FN u32 load_early(const void* at) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

WEFT_FN void store(uint4* at, uint4 v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
template <class V> WEFT_FN void store(V* at, V v) { *at = v; }

// Data that is its own flag: four words that a peer writes one by one and this rank polls in its
// own memory. Strong accesses that order nothing; a 16-byte one may be seen in pieces.
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

// The same for a word that is told apart by its neighbour: two 64-bit accesses in no order, neither
// of which is seen in pieces. Above, the four words are on their own (models/ptx E1).
WEFT_FN uint4 poll_halves(const uint4* at) {
    uint4 v;
    asm volatile(
        "{.reg .b64 low, high; ld.relaxed.sys.global.v2.b64 {low, high}, [%4]; "
        "mov.b64 {%0,%1}, low; mov.b64 {%2,%3}, high;}"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at)
        : "memory");
    return v;
}

WEFT_FN void post_halves(uint4* at, uint4 v) {
    asm volatile(
        "{.reg .b64 low, high; mov.b64 low, {%1,%2}; mov.b64 high, {%3,%4}; "
        "st.relaxed.sys.global.v2.b64 [%0], {low, high};}" ::"l"(at),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}

WEFT_FN float low_half(Number number, u32 pair) {
    if (number == Number::bf16) return __uint_as_float(pair << 16);
    float value;
    asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, lo;}" : "=f"(value) : "r"(pair));
    return value;
}

WEFT_FN float high_half(Number number, u32 pair) {
    if (number == Number::bf16) return __uint_as_float(pair & 0xffff0000u);
    float value;
    asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, hi;}" : "=f"(value) : "r"(pair));
    return value;
}

WEFT_FN u32 pack_halves(Number number, float low, float high) {
    u32 pair;
    if (number == Number::bf16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

constexpr u32 numbers_in_vector(Number number) { return number == Number::fp32 ? 4 : 8; }

// sum[i] += the numbers of one 16-byte vector.
template <Number N> WEFT_FN void add_vector(float (&sum)[numbers_in_vector(N)], uint4 v) {
    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        if constexpr (N == Number::fp32) {
            sum[i] += __uint_as_float(word[i]);
        } else {
            sum[2 * i] += low_half(N, word[i]);
            sum[2 * i + 1] += high_half(N, word[i]);
        }
    }
}

// sum[i] += weight * the numbers of one 16-byte vector, each product rounded as well: the same bits
// as on a CPU, and as two operations in torch.
template <Number N>
WEFT_FN void add_weighted(float (&sum)[numbers_in_vector(N)], float weight, uint4 v) {
    float value[numbers_in_vector(N)] = {};
    add_vector<N>(value, v);
#pragma unroll
    for (u32 i = 0; i < numbers_in_vector(N); ++i)
        sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, value[i]));
}

// Rounds once, to nearest even.
template <Number N> WEFT_FN uint4 round_vector(const float (&sum)[numbers_in_vector(N)]) {
    u32 word[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        if constexpr (N == Number::fp32)
            word[i] = __float_as_uint(sum[i]);
        else
            word[i] = pack_halves(N, sum[2 * i], sum[2 * i + 1]);
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

}  // namespace weft
