// SPDX-License-Identifier: Apache-2.0
// Tiles of tensors, loaded into shared memory by the copy engine (TMA) for one CTA or for all CTAs
// of a cluster, and what the CTAs of a cluster need around that: remote mbarriers and stores.
#pragma once
#include <weft/device/team.cuh>

namespace weft {

// An mbarrier in shared memory: it counts arrivals of threads and bytes of bulk loads.
struct Mbarrier {
    u64 word;

    WEFT_FN u32 address() { return u32(__cvta_generic_to_shared(&word)); }
    // A phase completes when `count` threads have arrived and all expected bytes are there.
    WEFT_FN void init(u32 count) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(count)
                     : "memory");
    }
    WEFT_FN void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
    }
    WEFT_FN void arrive_expect_tx(u32 bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                     "r"(bytes)
                     : "memory");
    }
    // Whether the phase is complete, with the order of wait. Does not block.
    WEFT_FN bool is_complete(u32 parity) {
        u32 complete;
        asm volatile(
            "{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; "
            "selp.u32 %0, 1, 0, p;}"
            : "=r"(complete)
            : "r"(address()), "r"(parity)
            : "memory");
        return complete;
    }
    // Order: the bytes that were expected are in shared memory, readable by this thread.
    // The thread sleeps for up to 10 ms at a time until the phase completes: polling would take
    // shared-memory bandwidth from the other threads.
    WEFT_FN void wait(u32 parity) {
        u32 done = 0;
        while (!done)
            asm volatile(
                "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3; "
                "selp.u32 %0, 1, 0, p;}"
                : "=r"(done)
                : "r"(address()), "r"(parity), "r"(10'000'000)
                : "memory");
    }
};

// A CUtensorMap, as the driver encodes it. (gemm/kernels.py)
struct alignas(64) TensorMap {
    u64 words[16];
};

// L2 cache hints: evict_first for bytes that are read once, evict_last for bytes that are read
// again. (The encodings of `createpolicy.fractional` for a fraction of 1.)
constexpr u64 l2_evict_first = 0x12f0000000000000, l2_evict_last = 0x14f0000000000000;

// Order: ordinary loads and stores, and what they acquired, precede later operations of the copy
// engine. For global memory this is a barrier of the whole GPU (MEMBAR.ALL.GPU, sm_90a and
// sm_100a): use it once after the flags, never for each row.
WEFT_FN void fence_for_bulk() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Loads `bytes` contiguous bytes into this CTA.
WEFT_FN void bulk_load_hinted(void* to, const void* from, u32 bytes, Mbarrier& mbarrier, u64 hint) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(u32(__cvta_generic_to_shared(to))),
        "l"(from), "r"(bytes), "r"(mbarrier.address()), "l"(hint)
        : "memory");
}

// Loads the box at (x, y) of a matrix into this CTA.
WEFT_FN void tma_load_2d(void* to, const TensorMap& map, u32 x, u32 y, Mbarrier& mbarrier,
                         u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(u32(__cvta_generic_to_shared(to))),
        "l"(&map), "r"(mbarrier.address()), "r"(x), "r"(y), "l"(hint)
        : "memory");
}

// Loads the same box to the same offset of every CTA in `ctas`, a bit mask. The bytes count on
// each CTA's own mbarrier.
WEFT_FN void tma_load_2d_multicast(u16 ctas, void* to, const TensorMap& map, u32 x, u32 y,
                                   Mbarrier& mbarrier, u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(
            u32(__cvta_generic_to_shared(to))),
        "l"(&map), "r"(mbarrier.address()), "r"(x), "r"(y), "h"(ctas), "l"(hint)
        : "memory");
}

// Loads the box at (x, 0, 0, y, z) of a tensor of five dimensions.
WEFT_FN void tma_load_5d(void* to, const TensorMap& map, u32 x, u32 y, u32 z, Mbarrier& mbarrier,
                         u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %6, %6, %4, %5}], [%2], %7;" ::"r"(
            u32(__cvta_generic_to_shared(to))),
        "l"(&map), "r"(mbarrier.address()), "r"(x), "r"(y), "r"(z), "r"(0), "l"(hint)
        : "memory");
}

// Arrives at the same mbarrier of another CTA of the cluster. Relaxed: it orders nothing, which is
// sufficient to release memory whose reads have completed. A release at cluster scope would wait
// for all stores of the thread, about a microsecond.
WEFT_FN void arrive_remote(u32 cta, Mbarrier& mbarrier) {
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];}" ::"r"(
            mbarrier.address()),
        "r"(cta)
        : "memory");
}

// Stores a word to the same offset of another CTA of the cluster, whose mbarrier counts its bytes.
// Order: a thread that has waited for those bytes may read the word.
WEFT_FN void store_remote(u32 cta, u32* at, u32 value, Mbarrier& mbarrier) {
    asm volatile(
        "{.reg .b32 there, counter; mapa.shared::cluster.u32 there, %0, %3; "
        "mapa.shared::cluster.u32 counter, %1, %3; "
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %2, [counter];}" ::
            "r"(u32(__cvta_generic_to_shared(at))),
        "r"(mbarrier.address()), "r"(value), "r"(cta)
        : "memory");
}

// A barrier of all threads of a cluster that publishes no stores: the arrival is relaxed.
WEFT_FN void sync_cluster_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;" ::: "memory");
}

// Order: mbarriers that were initialised before are visible to the cluster and to the copy engine.
WEFT_FN void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace weft
