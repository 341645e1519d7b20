# SPDX-License-Identifier: Apache-2.0
"""CUDA driver calls through cuda.bindings, which is imported at the first call."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weft.distribution import install_hint
from weft.errors import DriverError

if TYPE_CHECKING:
    import torch

_REMEDIES = {
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the code is for another GPU: compile for current_arch()",
    "CUDA_ERROR_INVALID_IMAGE": "the code is damaged or for another GPU: `weft cache clear`",
    "CUDA_ERROR_OUT_OF_MEMORY": "free some GPU memory",
    "CUDA_ERROR_NOT_FOUND": 'the name is not in the code: is it declared extern "C"?',
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "ask for fewer threads or less shared memory per block",
    "CUDA_ERROR_INVALID_VALUE": "compare the sizes above with the limits of this GPU",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an earlier kernel failed; the CUDA context is lost: restart",
    "CUDA_ERROR_INVALID_CONTEXT": "use the module on the device on which it was loaded",
    "CUDA_ERROR_INVALID_HANDLE": "use the module before unload() and on the device on which it "
    "was loaded",
}
# Of device memory that is held only to be freed: to free it waits for the GPU. As much as torch's
# allocator takes at a time, so that it is a piece of its own to the driver, too.
FENCE_BYTES = 2 << 20


@functools.cache
def driver() -> Any:
    """The module cuda.bindings.driver. Raises DriverError when it is not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DriverError(
            f"GPU ranks need cuda.bindings: {error}; {install_hint('gpu')}"
        ) from error


def call(name: str, *args: Any, doing: str = "") -> Any:
    """Call a driver function and return its value (or tuple of values, or None).

    Raises DriverError naming the call, what weft was `doing`, the reason and how to fix it.
    """
    api = driver()
    try:
        status, *values = getattr(api, name)(*args)
    except RuntimeError as error:  # cuda.bindings found no driver library
        raise DriverError(
            f"{name}: the NVIDIA driver was not found: {error}; use CPU ranks on this machine"
        ) from error
    if int(status) != 0:
        said = ", ".join(str(a) if isinstance(a, int) else type(a).__name__ for a in args)
        before = f"{doing}: " if doing else ""
        raise DriverError(f"{before}{name}({said}) failed: {error_text(status)}")
    return values[0] if len(values) == 1 else tuple(values) or None


def error_text(status: Any) -> str:
    """A driver status as name, number, the driver's words and, where known, how to fix it."""
    known, words = driver().cuGetErrorString(status)
    name = getattr(status, "name", "unknown error")
    text = f"{name} ({int(status)})"
    if int(known) == 0 and words:
        text += f": {words.decode()}"
    return f"{text}; {_REMEDIES[name]}" if name in _REMEDIES else text


@contextlib.contextmanager
def relaxed(device: torch.device | None = None) -> Iterator[None]:
    """Let this thread allocate, load, free and wait while streams of the process are captured.

    Such calls are forbidden to a thread that captures, and to every thread while one captures in
    the global mode. A forbidden call not only fails: it makes the capture invalid, and the
    thread that captures sees the error at a later launch. Nothing that weft does within is
    part of a graph, so nothing is lost. The thread's mode is restored at the end.

    Even so nothing may wait for what is being captured, nor for what contains it: to synchronise
    the context (`torch.cuda.synchronize`), to record an event of it, or to use the default stream
    while a stream that blocks with it is captured, is an error in every mode that makes the capture
    invalid, and the driver has no call that says whether one is under way. To know that the
    GPU has done its work, wait with `fence`, or for streams of your own.

    device: on a CPU this does nothing.   Raises DriverError.
    """
    if device is not None and device.type != "cuda":
        yield
        return
    call("cuInit", 0)
    mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", mode)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


def fence() -> int:
    """Memory of the current context whose `cuMemFree` waits until the GPU has done all its work.

    That is: what any stream of the context held before, graphs that run included. The driver cannot
    know which of it uses the memory, so it waits for all; `torch.cuda.empty_cache` is right for the
    same reason. Unlike a synchronisation of the context it is allowed within `relaxed` while
    streams are captured: what is captured does not run. Made in advance, because memory may be
    short when the wait is needed. Raises DriverError.
    """
    return int(call("cuMemAlloc", FENCE_BYTES))
