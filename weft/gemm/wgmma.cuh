// SPDX-License-Identifier: Apache-2.0
// Wrappers of Hopper's warpgroup instructions: products of tiles in shared memory (wgmma), matrix
// stores, register reallocation and named barriers. The generated entry defines `wgmma`, one
// function per N.
#pragma once
#include <weft/device/team.cuh>

namespace weft {

enum class Operand : u32 { fp8, bf16, fp16, mxfp4 };  // mxfp4: FP8 rows and MXFP4 weights

constexpr u32 warpgroup_threads = 128;
constexpr u32 swizzle_bytes = 128;  // bytes of k in a row of a tile: a row of the 128-byte swizzle

// Computes `acc += a * b^T` or, without `accumulate`, `acc = a * b^T` over 32 bytes of k, for 64
// rows of a and N rows of b. The result is written asynchronously: see wait_accumulator.
template <Operand O, u32 N> WEFT_FN void wgmma(float (&acc)[N / 2], u64 a, u64 b, bool accumulate);

// The same with a in registers, which are also read asynchronously. Of its warp's sixteen rows, a
// thread has row lane / 4 in a[0] and a[2], and row lane / 4 + 8 in a[1] and a[3]. Of k, it has the
// four bytes from 4 (lane % 4) on in a[0] and a[1], and those from 4 (lane % 4) + 16 on in a[2] and
// a[3].
template <Operand O, u32 N>
WEFT_FN void wgmma(float (&acc)[N / 2], const u32 (&a)[4], u64 b, bool accumulate);

// The matrix descriptor of a tile in shared memory (PTX ISA): rows of 128 bytes, swizzled by TMA in
// blocks of eight rows, 1024 bytes per block. smem_tile returns the lower word, to which offsets in
// units of 16 bytes may be added. The upper word is constant.
WEFT_FN u32 smem_tile(u32 address) {
    constexpr u32 leading = 1;
    return (address & 0x3ffff) / 16 | leading << 16;
}
WEFT_FN u64 smem_descriptor(u32 tile) {
    constexpr u64 blocks = 1024 / 16, swizzled_128 = 1;
    return u64(tile) | blocks << 32 | swizzled_128 << 62;
}

// Orders earlier writes of the accumulator registers before the next wgmma, which adds to them.
WEFT_FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma_commit makes all wgmmas since the last commit one group. wgmma_wait waits for all groups
// but the last `pending`.
WEFT_FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <u32 pending> WEFT_FN void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Issues the wgmmas of one k block, 128 bytes of k: 64 rows of tile a by N rows of tile b. With
// `accumulate` they add to `acc`, including the results of k blocks still in flight.
template <Operand O, u32 N>
WEFT_FN void issue_k_block(float (&acc)[N / 2], u32 a, u32 b, bool accumulate) {
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < swizzle_bytes / 32; ++i)
        wgmma<O, N>(acc, smem_descriptor(a + i * 2), smem_descriptor(b + i * 2),
                    accumulate || i != 0);
    wgmma_commit();
}

// The same with 64 rows of a in registers, four per 32 bytes of k, and without `accumulate`. The
// registers must not change before hold_registers.
template <Operand O, u32 N>
WEFT_FN void issue_k_block(float (&acc)[N / 2], const u32 (&a)[swizzle_bytes / 32][4], u32 b) {
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < swizzle_bytes / 32; ++i)
        wgmma<O, N>(acc, a[i], smem_descriptor(b + i * 2), i != 0);
    wgmma_commit();
}

// Waits for all issued k blocks but the last `pending`. The empty asm statements keep the compiler
// from moving reads of `acc` above the wait, which it does not know to write `acc`.
template <u32 pending, u32 N> WEFT_FN void wait_accumulator(float (&acc)[N]) {
    wgmma_wait<pending>();
#pragma unroll
    for (u32 i = 0; i < N; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// Keeps the compiler from moving writes of `a` above the wait for the k block that reads it.
WEFT_FN void hold_registers(u32 (&a)[swizzle_bytes / 32][4]) {
#pragma unroll
    for (u32 i = 0; i < swizzle_bytes / 32; ++i)
        asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

// Selects four of the eight bytes of low and high by the lowest four nibbles of `choice`, whose
// highest bits must be 0. For __byte_perm, the compiler would mask every choice.
WEFT_FN u32 permute_bytes(u32 low, u32 high, u32 choice) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(choice));
    return bytes;
}

// Releases or acquires registers of a warpgroup. All of its threads must call it.
template <u32 registers> WEFT_FN void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <u32 registers> WEFT_FN void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// Stores four transposed blocks of 8 x 8 16-bit values from a warp's registers, in the layout of
// wgmma's results. Lane 8 i + j passes the address of the 16 bytes for column j of block i.
WEFT_FN void stmatrix_x4_trans(void* at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     u32(__cvta_generic_to_shared(at))),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// The same without transposition: lane 8 i + j passes the address for row j of block i.
WEFT_FN void stmatrix_x4(void* at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     u32(__cvta_generic_to_shared(at))),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Waits at named barrier `id` (1 to 15) for `threads` threads of the CTA.
WEFT_FN void named_barrier(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace weft
