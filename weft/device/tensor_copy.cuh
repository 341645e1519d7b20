// Tiles of tensors on their way into shared memory by the copy engine (TMA), for one CTA or for all
// of a cluster.
#pragma once
#include <weft/device/bulk.cuh>

namespace weft {

// A CUtensorMap, as the driver encodes it. (gemm/tensor_map.py)
struct alignas(64) TensorMap {
    u64 words[16];
};

// What the L2 cache is told of bytes that will not, or will be wanted again. (The encodings that
// `createpolicy.fractional` gives for a fraction of 1.)
constexpr u64 wanted_once = 0x12f0000000000000, wanted_again = 0x14f0000000000000;

// The box at (x, y) of a matrix, to this CTA.
WEFT_FN void load_box(void* to, const TensorMap& map, u32 x, u32 y, Arrival& arrival, u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(u32(__cvta_generic_to_shared(to))),
        "l"(&map), "r"(arrival.address()), "r"(x), "r"(y), "l"(hint)
        : "memory");
}

// The same box to the same place of every CTA in `ctas`, a bit for each; each one's own arrival
// counts its bytes.
WEFT_FN void load_box_for(u16 ctas, void* to, const TensorMap& map, u32 x, u32 y, Arrival& arrival,
                          u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(
            u32(__cvta_generic_to_shared(to))),
        "l"(&map), "r"(arrival.address()), "r"(x), "r"(y), "h"(ctas), "l"(hint)
        : "memory");
}

// The box at (x, y, 0, z) of a tensor of four dimensions.
WEFT_FN void load_box4(void* to, const TensorMap& map, u32 x, u32 y, u32 z, Arrival& arrival,
                       u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %6, %5}], [%2], %7;" ::"r"(
            u32(__cvta_generic_to_shared(to))),
        "l"(&map), "r"(arrival.address()), "r"(x), "r"(y), "r"(z), "r"(0), "l"(hint)
        : "memory");
}

// The box at (x, 0, 0, y, z) of a tensor of five dimensions.
WEFT_FN void load_box5(void* to, const TensorMap& map, u32 x, u32 y, u32 z, Arrival& arrival,
                       u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %6, %6, %4, %5}], [%2], %7;" ::"r"(
            u32(__cvta_generic_to_shared(to))),
        "l"(&map), "r"(arrival.address()), "r"(x), "r"(y), "r"(z), "r"(0), "l"(hint)
        : "memory");
}

// Arrives at the same barrier of a CTA of the cluster, without any order: enough to give back
// memory whose reads are known to be over. A release at this scope waits for all stores of the
// thread, about a microsecond.
WEFT_FN void arrive_at(u32 cta, Arrival& arrival) {
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];}" ::"r"(arrival.address()),
        "r"(cta)
        : "memory");
}

// A word into the same place of a CTA of the cluster, whose arrival counts its bytes.
// Order: who has waited for those bytes may read the word.
WEFT_FN void send_word(u32 cta, u32* at, u32 value, Arrival& arrival) {
    asm volatile(
        "{.reg .b32 there, counter; mapa.shared::cluster.u32 there, %0, %3; "
        "mapa.shared::cluster.u32 counter, %1, %3; "
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %2, [counter];}" ::
            "r"(u32(__cvta_generic_to_shared(at))),
        "r"(arrival.address()), "r"(value), "r"(cta)
        : "memory");
}

// All threads of a cluster meet, without order: for those who have nothing to show.
WEFT_FN void meet_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;" ::: "memory");
}

// Order: barriers made before are seen as such by the cluster and by the copy engine.
WEFT_FN void publish_arrivals() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace weft
