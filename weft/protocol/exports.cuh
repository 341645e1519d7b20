// The numbers that Python checks its mirrors against, in the order of ops/layout.py and
// jit/args.py.
#pragma once
#include <weft/protocol/args.cuh>

namespace weft {

template <Shape S, u32 P> constexpr u64 plane_offset() {
    if constexpr (P >= S.planes)
        return 0;
    else if constexpr (P == 0)
        return __builtin_offsetof(Share<S>, inbox) + __builtin_offsetof(Inbox<S>, payload);
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
        __builtin_offsetof(weft::Share<S>, inbox) + __builtin_offsetof(weft::Inbox<S>, counts), \
        __builtin_offsetof(weft::Share<S>, inbox) + __builtin_offsetof(weft::Inbox<S>, route),  \
        sizeof(weft::Route<S>),                                                                 \
        __builtin_offsetof(weft::Share<S>, outbox),                                             \
        __builtin_offsetof(weft::Share<S>, destinations),                                       \
        weft::plane_offset<S, 0>(),                                                             \
        weft::plane_offset<S, 1>(),                                                             \
        weft::plane_offset<S, 2>(),                                                             \
        weft::plane_offset<S, 3>(),                                                             \
        weft::plane_offset<S, 4>(),                                                             \
        weft::plane_offset<S, 5>(),                                                             \
        weft::plane_offset<S, 6>(),                                                             \
        weft::plane_offset<S, 7>(),                                                             \
        sizeof(weft::DispatchArgs),                                                             \
        __builtin_offsetof(weft::DispatchArgs, payload),                                        \
        __builtin_offsetof(weft::DispatchArgs, ids),                                            \
        __builtin_offsetof(weft::DispatchArgs, weights),                                        \
        __builtin_offsetof(weft::DispatchArgs, placement),                                      \
        __builtin_offsetof(weft::DispatchArgs, num_tokens),                                     \
        __builtin_offsetof(weft::DispatchArgs, tokens),                                         \
        __builtin_offsetof(weft::DispatchArgs, ids_bytes),                                      \
        sizeof(weft::CombineArgs),                                                              \
        __builtin_offsetof(weft::CombineArgs, out),                                             \
        __builtin_offsetof(weft::CombineArgs, add),                                             \
        __builtin_offsetof(weft::CombineArgs, tokens),                                          \
    }
