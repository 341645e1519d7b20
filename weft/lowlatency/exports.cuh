// The numbers that Python compares its mirrors of the low-latency all-to-all with
// (lowlatency/shape.py): the structs, and the offsets of the parts of a share.
#pragma once
#include <weft/device/exports.cuh>
#include <weft/lowlatency/layout.cuh>

namespace weft {

constexpr u32 measured_offsets = 7;

// The offsets that the machine code uses, of a share that need not exist (see `measure` in
// alltoall/exports.cuh).
template <LowLatencyShape S> WEFT_FN void measure_low_latency(u64 base, u64* to) {
    LowLatencyShare<S>& share = *reinterpret_cast<LowLatencyShare<S>*>(base);
    LowLatencyInbox<S>& inbox = share.inbox;
    const u64 found[measured_offsets] = {u64(&share + 1),
                                         u64(&share.progress),
                                         u64(&inbox.tokens),
                                         u64(&inbox.token_masks),
                                         u64(&inbox.choices),
                                         u64(&inbox.rows),
                                         u64(inbox.returned_row(0, 0))};
    for (u32 i = 0; i < measured_offsets; ++i) to[i] = found[i] - base;
}

}  // namespace weft

#define WEFT_LOW_LATENCY_INBOX(S, member) \
    WEFT_OFFSET(weft::LowLatencyShare<S>, inbox) + WEFT_OFFSET(weft::LowLatencyInbox<S>, member)

// After the Shape literal S: `WEFT_LOW_LATENCY_EXPORT(S, __device__)` on a GPU,
// `WEFT_LOW_LATENCY_EXPORT(S, )` on a CPU.
#define WEFT_LOW_LATENCY_EXPORT(S, STORAGE)               \
    extern "C" STORAGE const weft::u64 weft_layout[] = {  \
        WEFT_COMMON,                                      \
        sizeof(weft::LowLatencyShare<S>),                 \
        WEFT_OFFSET(weft::LowLatencyShare<S>, progress),  \
        WEFT_LOW_LATENCY_INBOX(S, tokens),                \
        WEFT_LOW_LATENCY_INBOX(S, token_masks),           \
        WEFT_LOW_LATENCY_INBOX(S, choices),               \
        WEFT_LOW_LATENCY_INBOX(S, rows),                  \
        WEFT_LOW_LATENCY_INBOX(S, rows) + S.sent_bytes(), \
    }
