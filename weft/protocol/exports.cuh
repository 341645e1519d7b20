// The numbers that Python checks its mirrors against (ops/layout.py): one table an entry, with
// every struct that Python reads or writes, field by field, and where the parts of this Shape's
// share lie.
#pragma once
#include <weft/protocol/args.cuh>

namespace weft {

template <Shape S, u32 P> constexpr u64 plane_offset() {
    if constexpr (P >= S.planes)
        return 0;
    else if constexpr (P == 0)
        return WEFT_OFFSET(Share<S>, inbox) + WEFT_OFFSET(Inbox<S>, payload);
    else
        return plane_offset<S, P - 1>() + sizeof(Plane<S, P - 1>);
}

template <Shape S> constexpr u64 stats_offset() {
    if constexpr (S.stats == 0)
        return 0;
    else
        return WEFT_OFFSET(Share<S>, inbox) + WEFT_OFFSET(Inbox<S>, stats);
}

template <Shape S> constexpr u64 returned_offset() {
    if constexpr (S.way == Way::pull)
        return 0;
    else
        return WEFT_OFFSET(Share<S>, inbox) + WEFT_OFFSET(Inbox<S>, returned);
}

constexpr u32 places = 8 + max_planes;

template <Shape S, u32 P = 0> WEFT_FN void measure_planes(Share<S>& share, u64* to) {
    if constexpr (P < S.planes) {
        to[P] = u64(&plane<P>(share.inbox.payload)) - u64(&share);
        measure_planes<S, P + 1>(share, to);
    }
}

// The offsets that code uses, of a share that need not exist: the constants above come from the
// compiler's front end, these from its back end, and a broken compiler tells two stories.
template <Shape S> WEFT_FN void measure(u64 base, u64* to) {
    Share<S>& share = *reinterpret_cast<Share<S>*>(base);
    const u64 found[8] = {u64(&share + 1),
                          u64(&share.inbox.counts),
                          u64(&share.inbox.route),
                          u64(&share.inbox.route[0][1]) - u64(&share.inbox.route[0][0]) + base,
                          u64(&share.outbox),
                          u64(&share.destinations),
                          S.stats == 0 ? base : u64(&share.inbox.stats),
                          S.way == Way::pull ? base : u64(&share.inbox.returned)};
    for (u32 i = 0; i < 8; ++i) to[i] = found[i] - base;
    measure_planes<S>(share, to + 8);
}

}  // namespace weft

// The structs that have a ctypes mirror: their size, then every field in the order of the mirror.
#define WEFT_AT(T, field) WEFT_OFFSET(weft::T, field)
#define WEFT_ERROR_RECORD                                                                          \
    sizeof(weft::ErrorRecord), WEFT_AT(ErrorRecord, code), WEFT_AT(ErrorRecord, rank),             \
        WEFT_AT(ErrorRecord, peer), WEFT_AT(ErrorRecord, phase), WEFT_AT(ErrorRecord, wanted),     \
        WEFT_AT(ErrorRecord, seen), WEFT_AT(ErrorRecord, elapsed_ns), WEFT_AT(ErrorRecord, token), \
        WEFT_AT(ErrorRecord, slot), WEFT_AT(ErrorRecord, told_by), WEFT_AT(ErrorRecord, reserved)
#define WEFT_MAILBOX                                                                \
    sizeof(weft::Mailbox), WEFT_AT(Mailbox, host_word), WEFT_AT(Mailbox, refusals), \
        WEFT_AT(Mailbox, broken_code), WEFT_AT(Mailbox, broken), WEFT_AT(Mailbox, refused)
#define WEFT_RECORD                                                          \
    sizeof(weft::Record), WEFT_AT(Record, epoch), WEFT_AT(Record, start_ns), \
        WEFT_AT(Record, end_ns), WEFT_AT(Record, phase), WEFT_AT(Record, tokens)
#define WEFT_TIMELINE                                                                           \
    sizeof(weft::Timeline), WEFT_AT(Timeline, epoch), WEFT_AT(Timeline, start_ns),              \
        WEFT_AT(Timeline, sent_ns), WEFT_AT(Timeline, published_ns), WEFT_AT(Timeline, end_ns), \
        WEFT_AT(Timeline, phase), WEFT_AT(Timeline, ctas), WEFT_AT(Timeline, arrived_ns)
#define WEFT_FAULT                                                                            \
    sizeof(weft::Fault), WEFT_AT(Fault, point), WEFT_AT(Fault, action), WEFT_AT(Fault, peer), \
        WEFT_AT(Fault, reserved), WEFT_AT(Fault, epoch), WEFT_AT(Fault, argument)
#define WEFT_HEADER                                                                              \
    sizeof(weft::Header), WEFT_AT(Header, abi), WEFT_AT(Header, rank), WEFT_AT(Header, ranks),   \
        WEFT_AT(Header, generation), WEFT_AT(Header, share_bytes), WEFT_AT(Header, first_epoch), \
        WEFT_AT(Header, deadline_ns), WEFT_AT(Header, first_deadline_ns),                        \
        WEFT_AT(Header, turn.epoch), WEFT_AT(Header, turn.failed), WEFT_AT(Header, turn.rows),   \
        WEFT_AT(Header, arrived), WEFT_AT(Header, refusing), WEFT_AT(Header, refusals),          \
        WEFT_AT(Header, sending), WEFT_AT(Header, notices), WEFT_AT(Header, waiting_ns),         \
        WEFT_AT(Header, last_words), WEFT_AT(Header, fault), WEFT_AT(Header, ring),              \
        WEFT_AT(Header, timelines)
#define WEFT_SITE                                                                           \
    sizeof(weft::Site), WEFT_AT(Site, base), WEFT_AT(Site, stride), WEFT_AT(Site, mailbox), \
        WEFT_AT(Site, rank), WEFT_AT(Site, descriptor)
#define WEFT_DISPATCH_ARGS                                                                   \
    sizeof(weft::DispatchArgs), WEFT_AT(DispatchArgs, site), WEFT_AT(DispatchArgs, payload), \
        WEFT_AT(DispatchArgs, ids), WEFT_AT(DispatchArgs, weights),                          \
        WEFT_AT(DispatchArgs, placement), WEFT_AT(DispatchArgs, num_tokens),                 \
        WEFT_AT(DispatchArgs, tokens), WEFT_AT(DispatchArgs, ids_bytes),                     \
        WEFT_AT(DispatchArgs, stats)
#define WEFT_COMBINE_ARGS                                                                       \
    sizeof(weft::CombineArgs), WEFT_AT(CombineArgs, site), WEFT_AT(CombineArgs, out),           \
        WEFT_AT(CombineArgs, add), WEFT_AT(CombineArgs, tokens), WEFT_AT(CombineArgs, pushers), \
        WEFT_AT(CombineArgs, strips)

// After the Shape literal S: `WEFT_EXPORT(S, __device__)` on a GPU, `WEFT_EXPORT(S, )` on a CPU.
#define WEFT_EXPORT(S, STORAGE)                                                   \
    extern "C" STORAGE const weft::u64 weft_layout[] = {                          \
        weft::abi,                                                                \
        WEFT_ERROR_RECORD,                                                        \
        WEFT_MAILBOX,                                                             \
        WEFT_RECORD,                                                              \
        WEFT_TIMELINE,                                                            \
        WEFT_FAULT,                                                               \
        WEFT_HEADER,                                                              \
        WEFT_SITE,                                                                \
        WEFT_DISPATCH_ARGS,                                                       \
        WEFT_COMBINE_ARGS,                                                        \
        sizeof(weft::Share<S>),                                                   \
        WEFT_OFFSET(weft::Share<S>, inbox) + WEFT_OFFSET(weft::Inbox<S>, counts), \
        WEFT_OFFSET(weft::Share<S>, inbox) + WEFT_OFFSET(weft::Inbox<S>, route),  \
        sizeof(weft::Route<S>),                                                   \
        WEFT_OFFSET(weft::Share<S>, outbox),                                      \
        WEFT_OFFSET(weft::Share<S>, destinations),                                \
        weft::stats_offset<S>(),                                                  \
        weft::returned_offset<S>(),                                               \
        weft::plane_offset<S, 0>(),                                               \
        weft::plane_offset<S, 1>(),                                               \
        weft::plane_offset<S, 2>(),                                               \
        weft::plane_offset<S, 3>(),                                               \
        weft::plane_offset<S, 4>(),                                               \
        weft::plane_offset<S, 5>(),                                               \
        weft::plane_offset<S, 6>(),                                               \
        weft::plane_offset<S, 7>(),                                               \
    }
