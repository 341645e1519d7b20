// The bulk copy engine (TMA): one thread moves whole rows through shared memory, so that a handful
// of SMs keeps the links busy while the others compute. 8 CTAs push 303 GB/s this way and 132 CTAs
// of plain stores push 334 (H200, 2026-11-20).
#pragma once
#include <weft/device/team.cuh>

namespace weft {

constexpr u32 bulk_shared_bytes = 200 * 1024;

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
    // Order: the bytes that were expected are in shared memory, readable by this thread.
    // The thread sleeps for up to 10 ms at a time, until the phase completes: asking again and
    // again takes turns at shared memory that the others need.
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

WEFT_FN void bulk_load(void* to, const void* from, u32 bytes, Mbarrier& mbarrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(u32(__cvta_generic_to_shared(to))),
        "l"(from), "r"(bytes), "r"(mbarrier.address())
        : "memory");
}

WEFT_FN void bulk_store(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(u32(__cvta_generic_to_shared(from))), "r"(bytes)
                 : "memory");
}

// The stores since the last commit become one group of this thread.
WEFT_FN void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// All but the latest `open` groups have read their shared memory: it may be overwritten.
template <u32 open> WEFT_FN void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(open) : "memory");
}

// Order: everything this thread stored in bulk is written, so a later release publishes it. The
// `.read` form would promise less (models/ptx F1, F2).
WEFT_FN void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Order: what ordinary loads and stores did or acquired comes before what the copy engine does
// next. For global memory that is a barrier of the whole GPU (MEMBAR.ALL.GPU, sm_90a and sm_100a):
// once behind the flags, never for each row.
WEFT_FN void fence_for_bulk() { asm volatile("fence.proxy.async;" ::: "memory"); }

// The same for this CTA's shared memory alone: no more than a barrier of the CTA.
WEFT_FN void fence_shared_for_bulk() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace weft
