// SPDX-License-Identifier: Apache-2.0
// Instructions of Hopper's warpgroups: products of tiles in shared memory (wgmma), matrix stores,
// register reallocation and named barriers. The wgmma instructions themselves, one for each N, come
// with the generated entry.
#pragma once
#include <weft/device/team.cuh>

namespace weft {

enum class Operand : u32 { fp8, bf16, fp16, mxfp4 };  // mxfp4: of FP8 rows and MXFP4 weights

constexpr u32 warpgroup_threads = 128;
constexpr u32 swizzle_bytes = 128;  // of k in a row of a tile: one row of the 128-byte swizzle

// `acc += a * b^T` over 32 bytes of k, or `acc = a * b^T`: 64 rows of a, N rows of b. The result is
// written asynchronously: see wait_accumulator.
template <Operand O, u32 N> WEFT_FN void wgmma(float (&acc)[N / 2], u64 a, u64 b, bool accumulate);

// The same with a in registers. Of its warp's sixteen rows, a thread has two: row lane / 4 in a[0]
// and a[2], the row eight further on in a[1] and a[3]; of k, bytes 4 (lane % 4) and on in a[0] and
// a[1], those sixteen further on in the others. The registers are read asynchronously, too.
template <Operand O, u32 N>
WEFT_FN void wgmma(float (&acc)[N / 2], const u32 (&a)[4], u64 b, bool accumulate);

// A tile in shared memory: rows of 128 bytes that TMA has swizzled in blocks of eight, each block
// 1024 bytes after the last. Offsets are added to its start, in 16 bytes, which is the lower word
// of its descriptor; the upper word is the same for all. (PTX ISA, matrix descriptor)
WEFT_FN u32 smem_tile(u32 address) {
    constexpr u32 leading = 1;
    return (address & 0x3ffff) / 16 | leading << 16;
}
WEFT_FN u64 smem_descriptor(u32 tile) {
    constexpr u64 blocks = 1024 / 16, swizzled_128 = 1;
    return u64(tile) | blocks << 32 | swizzled_128 << 62;
}

// Order: accumulator registers were written before the next wgmma adds to them.
WEFT_FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Every wgmma since the last commit becomes one group; all groups but the last `pending` are waited
// for.
WEFT_FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <u32 pending> WEFT_FN void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Issues the wgmmas of one k block, 128 bytes of k: 64 rows of tile a by N rows of tile b. With
// `accumulate` they add to what `acc` holds, or to what k blocks still in flight will leave there.
template <Operand O, u32 N>
WEFT_FN void issue_k_block(float (&acc)[N / 2], u32 a, u32 b, bool accumulate) {
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < swizzle_bytes / 32; ++i)
        wgmma<O, N>(acc, smem_descriptor(a + i * 2), smem_descriptor(b + i * 2),
                    accumulate || i != 0);
    wgmma_commit();
}

// The same with 64 rows of a in registers, for each 32 bytes of k; they change after
// hold_registers only. Starts new sums.
template <Operand O, u32 N>
WEFT_FN void issue_k_block(float (&acc)[N / 2], const u32 (&a)[swizzle_bytes / 32][4], u32 b) {
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < swizzle_bytes / 32; ++i)
        wgmma<O, N>(acc, a[i], smem_descriptor(b + i * 2), i != 0);
    wgmma_commit();
}

// Waits for all k blocks but the last `pending` that were issued.
// Order: reads of `acc` stay behind the wait, which the compiler does not know to write it.
template <u32 pending, u32 N> WEFT_FN void wait_accumulator(float (&acc)[N]) {
    wgmma_wait<pending>();
#pragma unroll
    for (u32 i = 0; i < N; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// Order: writes of `a` stay behind the wait for the k block that reads it.
WEFT_FN void hold_registers(u32 (&a)[swizzle_bytes / 32][4]) {
#pragma unroll
    for (u32 i = 0; i < swizzle_bytes / 32; ++i)
        asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

// Four bytes, each one of the eight of low and high: which, say the lowest four nibbles of
// `choice`, whose highest bits are 0. Not __byte_perm, for which the compiler masks every choice by
// itself.
WEFT_FN u32 permute_bytes(u32 low, u32 high, u32 choice) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(choice));
    return bytes;
}

// A warpgroup gives registers back, or takes what others gave. All of its threads must call it.
template <u32 registers> WEFT_FN void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <u32 registers> WEFT_FN void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// Stores four blocks of 8 x 8 16-bit numbers, as wgmma leaves them in a warp's registers,
// transposed: lane 8 i + j gives the address of the 16 bytes for column j of block i.
WEFT_FN void stmatrix_x4_trans(void* at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     u32(__cvta_generic_to_shared(at))),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// The same without the transposition: lane 8 i + j gives the address for row j of block i.
WEFT_FN void stmatrix_x4(void* at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     u32(__cvta_generic_to_shared(at))),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// A barrier of `threads` threads of a CTA; `id` 1 to 15 names it.
WEFT_FN void named_barrier(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace weft
