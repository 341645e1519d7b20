// The numbers that Python checks its mirrors of the low-latency all-to-all against
// (lowlatency/shape.py): every struct, and where the parts of a share lie.
#pragma once
#include <weft/device/exports.cuh>
#include <weft/lowlatency/layout.cuh>

namespace weft {

constexpr u32 low_places = 7;

// The offsets that code uses, of a share that need not exist (see `measure` in exports.cuh).
template <LowShape S> WEFT_FN void measure_low(u64 base, u64* to) {
    LowShare<S>& share = *reinterpret_cast<LowShare<S>*>(base);
    LowInbox<S>& inbox = share.inbox;
    const u64 found[low_places] = {
        u64(&share + 1),     u64(&share.progress), u64(&inbox.tokens),       u64(&inbox.chosen),
        u64(&inbox.choices), u64(&inbox.rows),     u64(inbox.back_row(0, 0))};
    for (u32 i = 0; i < low_places; ++i) to[i] = found[i] - base;
}

}  // namespace weft

#define WEFT_LOW_INBOX(S, member) \
    WEFT_OFFSET(weft::LowShare<S>, inbox) + WEFT_OFFSET(weft::LowInbox<S>, member)

// After the LowShape literal S: `WEFT_LOW_EXPORT(S, __device__)` on a GPU, `WEFT_LOW_EXPORT(S, )`
// on a CPU.
#define WEFT_LOW_EXPORT(S, STORAGE)                      \
    extern "C" STORAGE const weft::u64 weft_layout[] = { \
        weft::abi,                                       \
        WEFT_ERROR_RECORD,                               \
        WEFT_MAILBOX,                                    \
        WEFT_RECORD,                                     \
        WEFT_TIMELINE,                                   \
        WEFT_FAULT,                                      \
        WEFT_HEADER,                                     \
        WEFT_SITE,                                       \
        sizeof(weft::LowShare<S>),                       \
        WEFT_OFFSET(weft::LowShare<S>, progress),        \
        WEFT_LOW_INBOX(S, tokens),                       \
        WEFT_LOW_INBOX(S, chosen),                       \
        WEFT_LOW_INBOX(S, choices),                      \
        WEFT_LOW_INBOX(S, rows),                         \
        WEFT_LOW_INBOX(S, rows) + S.sent_bytes(),        \
    }
