// The numbers that Python compares its mirrors of an all-to-all with (alltoall/layout.py): the
// structs, and the offsets of the parts of this Shape's share.
#pragma once
#include <weft/alltoall/layout.cuh>
#include <weft/device/exports.cuh>

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
    if constexpr (S.combine == Combine::pull)
        return 0;
    else
        return WEFT_OFFSET(Share<S>, inbox) + WEFT_OFFSET(Inbox<S>, returned);
}

constexpr u32 measured_offsets = 9 + max_planes;

template <Shape S, u32 P = 0> WEFT_FN void measure_planes(Share<S>& share, u64* to) {
    if constexpr (P < S.planes) {
        to[P] = u64(&plane<P>(share.inbox.payload)) - u64(&share);
        measure_planes<S, P + 1>(share, to);
    }
}

// The offsets that the machine code uses, of a share that need not exist. The constants above come
// from the compiler's front end and these from its back end; with a broken compiler the two differ.
template <Shape S> WEFT_FN void measure(u64 base, u64* to) {
    Share<S>& share = *reinterpret_cast<Share<S>*>(base);
    const u64 found[9] = {u64(&share + 1),
                          u64(&share.inbox.counts),
                          u64(&share.inbox.source_rows),
                          u64(&share.inbox.route),
                          u64(&share.inbox.route[1]) - u64(&share.inbox.route[0]) + base,
                          u64(&share.outbox),
                          u64(&share.destinations),
                          S.stats == 0 ? base : u64(&share.inbox.stats),
                          S.combine == Combine::pull ? base : u64(&share.inbox.returned)};
    for (u32 i = 0; i < 9; ++i) to[i] = found[i] - base;
    measure_planes<S>(share, to + 9);
}

}  // namespace weft

#define WEFT_DISPATCH_ARGS                                                                   \
    sizeof(weft::DispatchArgs), WEFT_AT(DispatchArgs, site), WEFT_AT(DispatchArgs, payload), \
        WEFT_AT(DispatchArgs, ids), WEFT_AT(DispatchArgs, weights),                          \
        WEFT_AT(DispatchArgs, placement), WEFT_AT(DispatchArgs, num_tokens),                 \
        WEFT_AT(DispatchArgs, tokens), WEFT_AT(DispatchArgs, ids_bytes),                     \
        WEFT_AT(DispatchArgs, stats), WEFT_AT(DispatchArgs, source_rows),                    \
        WEFT_AT(DispatchArgs, reserved)
#define WEFT_COMBINE_ARGS                                                                       \
    sizeof(weft::CombineArgs), WEFT_AT(CombineArgs, site), WEFT_AT(CombineArgs, out),           \
        WEFT_AT(CombineArgs, add), WEFT_AT(CombineArgs, tokens), WEFT_AT(CombineArgs, pushers), \
        WEFT_AT(CombineArgs, strips), WEFT_AT(CombineArgs, source_rows)

// After the Shape literal S: `WEFT_EXPORT(S, __device__)` on a GPU, `WEFT_EXPORT(S, )` on a CPU.
#define WEFT_EXPORT(S, STORAGE)                                                        \
    extern "C" STORAGE const weft::u64 weft_layout[] = {                               \
        WEFT_COMMON,                                                                   \
        WEFT_DISPATCH_ARGS,                                                            \
        WEFT_COMBINE_ARGS,                                                             \
        sizeof(weft::Share<S>),                                                        \
        WEFT_OFFSET(weft::Share<S>, inbox) + WEFT_OFFSET(weft::Inbox<S>, counts),      \
        WEFT_OFFSET(weft::Share<S>, inbox) + WEFT_OFFSET(weft::Inbox<S>, source_rows), \
        WEFT_OFFSET(weft::Share<S>, inbox) + WEFT_OFFSET(weft::Inbox<S>, route),       \
        sizeof(weft::Route<S>),                                                        \
        WEFT_OFFSET(weft::Share<S>, outbox),                                           \
        WEFT_OFFSET(weft::Share<S>, destinations),                                     \
        weft::stats_offset<S>(),                                                       \
        weft::returned_offset<S>(),                                                    \
        weft::plane_offset<S, 0>(),                                                    \
        weft::plane_offset<S, 1>(),                                                    \
        weft::plane_offset<S, 2>(),                                                    \
        weft::plane_offset<S, 3>(),                                                    \
        weft::plane_offset<S, 4>(),                                                    \
        weft::plane_offset<S, 5>(),                                                    \
        weft::plane_offset<S, 6>(),                                                    \
        weft::plane_offset<S, 7>(),                                                    \
    }
