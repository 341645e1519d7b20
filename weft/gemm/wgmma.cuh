// The tensor cores of Hopper: one warpgroup of four warps multiplies tiles that lie in shared
// memory. The instructions themselves, one for each width, come with the generated entry.
#pragma once
#include <weft/device/team.cuh>

namespace weft {

enum class Operand : u32 { fp8, bf16, fp16 };

constexpr u32 group_threads = 128;  // of a warpgroup
constexpr u32 tile_bytes = 128;     // of a row of a tile: what one swizzled row holds

// `sum += a * b^T` over 32 bytes of k, or without the old sum: 64 rows of a, N rows of b. The sum
// is written some time later: see await_step.
template <Operand O, u32 N> WEFT_FN void multiply(float (&sum)[N / 2], u64 a, u64 b, bool add);

// How wgmma is told of a tile: rows of 128 bytes that TMA has swizzled in blocks of eight, each
// block 1024 bytes behind the last. Fields count in 16 bytes. (PTX ISA, matrix descriptor)
WEFT_FN u64 describe_tile(u32 address) {
    constexpr u64 leading = 1, blocks = 1024 / 16, swizzled_128 = 1;
    return u64((address & 0x3ffff) / 16) | leading << 16 | blocks << 32 | swizzled_128 << 62;
}

// Order: registers that the next products add to were written before them.
WEFT_FN void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// All products since the last commit become one group; groups but the last few are waited for.
WEFT_FN void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <u32 but> WEFT_FN void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(but) : "memory");
}

// Begins the product of one step, 128 bytes of k: 64 rows of tile a by N rows of tile b. With
// `add` it goes on from what `part` holds, or what steps before it will have left there.
template <Operand O, u32 N> WEFT_FN void begin_step(float (&part)[N / 2], u64 a, u64 b, bool add) {
    begin_products();
#pragma unroll
    for (u32 i = 0; i < tile_bytes / 32; ++i)
        multiply<O, N>(part, a + i * 2, b + i * 2, add || i != 0);
    commit_products();
}

// The step is finished that was begun before the last `but` ones.
// Order: reads of `part` stay behind the wait, which the compiler does not know to write it.
template <u32 but, u32 N> WEFT_FN void await_step(float (&part)[N]) {
    await_products<but>();
#pragma unroll
    for (u32 i = 0; i < N; ++i) asm volatile("" : "+f"(part[i])::"memory");
}

// A warpgroup gives registers back, or takes what others gave. All of its threads must call it.
template <u32 registers> WEFT_FN void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <u32 registers> WEFT_FN void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// Four blocks of 8 x 8 halves, as products leave them in a warp's registers, stored transposed:
// lane 8 i + j gives the 16 bytes where column j of block i goes.
WEFT_FN void store_transposed(void* at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     u32(__cvta_generic_to_shared(at))),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// The same, stored as they are: lane 8 i + j gives the 16 bytes where row j of block i goes.
WEFT_FN void store_blocks(void* at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     u32(__cvta_generic_to_shared(at))),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// x / y within two units in the last place, for all y: an eighth of a division's instructions.
WEFT_FN float divide_full(float x, float y) {
    float ratio;
    asm("div.full.f32 %0, %1, %2;" : "=f"(ratio) : "f"(x), "f"(y));
    return ratio;
}

// A barrier of `threads` threads of a CTA; `id` 1 to 15 names it.
WEFT_FN void meet(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace weft
