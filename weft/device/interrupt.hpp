// SPDX-License-Identifier: Apache-2.0
// Ctrl-C in a wait of a CPU rank.
#pragma once
#include <unistd.h>

#include <weft/device/header.cuh>

// Functions of Python; null in a program without Python.
extern "C" {
[[gnu::weak]] int PyGILState_Ensure();
[[gnu::weak]] void PyGILState_Release(int);
[[gnu::weak]] int PyOS_InterruptOccurred();
[[gnu::weak]] void PyErr_SetInterrupt();
}

namespace weft {

// Whether Ctrl-C was pressed. Python's signal handler only sets a flag, which the interpreter
// checks after the waiting call has returned, so the wait has to end. The flag is read ten times a
// second and left unchanged. Only the main thread reads it, because Python handles signals there.
inline bool interrupted(u64 now_ns) {
    constexpr u64 pause_ns = 100'000'000;
    thread_local u64 next_ns = 0;
    if (PyOS_InterruptOccurred == nullptr || now_ns < next_ns) return false;
    next_ns = now_ns + pause_ns;
    if (gettid() != getpid()) return false;
    const int gil = PyGILState_Ensure();
    const bool occurred = PyOS_InterruptOccurred() != 0;  // clears the flag
    if (occurred) PyErr_SetInterrupt();
    PyGILState_Release(gil);
    return occurred;
}

}  // namespace weft
