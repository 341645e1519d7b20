// SPDX-License-Identifier: Apache-2.0
// Ctrl-C in a wait of a CPU rank.
#pragma once
#include <unistd.h>

#include <weft/device/header.cuh>

// Python's functions, where the process has them; a program without Python finds none.
extern "C" {
[[gnu::weak]] int PyGILState_Ensure();
[[gnu::weak]] void PyGILState_Release(int);
[[gnu::weak]] int PyOS_InterruptOccurred();
[[gnu::weak]] void PyErr_SetInterrupt();
}

namespace weft {

// Has Ctrl-C been pressed? Python's signal handler only sets a flag, on which the interpreter acts
// when the call that waits has returned: so the wait has to end. The flag is looked at ten times a
// second and left as it was. Only the main thread looks, because Python acts on signals there.
inline bool interrupted(u64 now_ns) {
    constexpr u64 pause_ns = 100'000'000;
    thread_local u64 next_ns = 0;
    if (PyOS_InterruptOccurred == nullptr || now_ns < next_ns) return false;
    next_ns = now_ns + pause_ns;
    if (gettid() != getpid()) return false;
    const int held = PyGILState_Ensure();
    const bool found = PyOS_InterruptOccurred() != 0;  // clears the flag
    if (found) PyErr_SetInterrupt();
    PyGILState_Release(held);
    return found;
}

}  // namespace weft
