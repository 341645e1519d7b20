// The numbers that Python checks its mirrors against, in the order of ops/layout.py and
// jit/args.py.
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

}  // namespace weft

// One table an entry: `WEFT_EXPORT(S)` after the Shape literal.
#define WEFT_EXPORT(S, STORAGE)                                                                 \
    extern "C" STORAGE const weft::u64 weft_layout[] = {                                        \
        weft::abi,                                                                              \
        sizeof(weft::Header),                                                                   \
        sizeof(weft::Mailbox),                                                                  \
        sizeof(weft::Share<S>),                                                                 \
        WEFT_OFFSET(weft::Share<S>, inbox) + WEFT_OFFSET(weft::Inbox<S>, counts), \
        WEFT_OFFSET(weft::Share<S>, inbox) + WEFT_OFFSET(weft::Inbox<S>, route),  \
        sizeof(weft::Route<S>),                                                                 \
        WEFT_OFFSET(weft::Share<S>, outbox),                                             \
        WEFT_OFFSET(weft::Share<S>, destinations),                                       \
        weft::plane_offset<S, 0>(),                                                             \
        weft::plane_offset<S, 1>(),                                                             \
        weft::plane_offset<S, 2>(),                                                             \
        weft::plane_offset<S, 3>(),                                                             \
        weft::plane_offset<S, 4>(),                                                             \
        weft::plane_offset<S, 5>(),                                                             \
        weft::plane_offset<S, 6>(),                                                             \
        weft::plane_offset<S, 7>(),                                                             \
        sizeof(weft::DispatchArgs),                                                             \
        WEFT_OFFSET(weft::DispatchArgs, payload),                                        \
        WEFT_OFFSET(weft::DispatchArgs, ids),                                            \
        WEFT_OFFSET(weft::DispatchArgs, weights),                                        \
        WEFT_OFFSET(weft::DispatchArgs, placement),                                      \
        WEFT_OFFSET(weft::DispatchArgs, num_tokens),                                     \
        WEFT_OFFSET(weft::DispatchArgs, tokens),                                         \
        WEFT_OFFSET(weft::DispatchArgs, ids_bytes),                                      \
        sizeof(weft::CombineArgs),                                                              \
        WEFT_OFFSET(weft::CombineArgs, out),                                             \
        WEFT_OFFSET(weft::CombineArgs, add),                                             \
        WEFT_OFFSET(weft::CombineArgs, tokens),                                          \
    }
