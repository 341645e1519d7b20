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
# Memory that is held only because its free waits for the GPU. It has the size that torch's
# allocator takes at a time, so that the driver does not carve it out of another allocation.
FENCE_BYTES = 2 << 20


@functools.cache
def load_driver() -> Any:
    """Return the module cuda.bindings.driver. Raises DriverError if it is not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DriverError(
            f"GPU ranks need cuda.bindings: {error}; {install_hint('gpu')}"
        ) from error


def call_driver(name: str, *args: Any, action: str = "") -> Any:
    """Call a driver function and return its value, a tuple of values, or None.

    Raises:
        DriverError: names the call, what weft was `action`, the reason and the fix.
    """
    api = load_driver()
    try:
        status, *values = getattr(api, name)(*args)
    except RuntimeError as error:  # cuda.bindings found no driver library
        raise DriverError(
            f"{name}: the NVIDIA driver was not found: {error}; use CPU ranks on this machine"
        ) from error
    if int(status) != 0:
        arguments = ", ".join(str(a) if isinstance(a, int) else type(a).__name__ for a in args)
        before = f"{action}: " if action else ""
        raise DriverError(f"{before}{name}({arguments}) failed: {describe_status(status)}")
    return values[0] if len(values) == 1 else tuple(values) or None


def describe_status(status: Any) -> str:
    """Return a driver status as name, number, the driver's text and, if known, the fix."""
    known, words = load_driver().cuGetErrorString(status)
    name = getattr(status, "name", "unknown error")
    text = f"{name} ({int(status)})"
    if int(known) == 0 and words:
        text += f": {words.decode()}"
    return f"{text}; {_REMEDIES[name]}" if name in _REMEDIES else text


@contextlib.contextmanager
def relaxed_capture(device: torch.device | None = None) -> Iterator[None]:
    """Let this thread allocate, load, free and wait while streams of the process are captured.

    A thread that captures may not make such calls, nor may any thread while one captures in the
    global mode. A forbidden call invalidates the capture, and the capturing thread sees the error
    at a later launch. What weft does inside this context is not part of a graph, so relaxing the
    mode is safe. The thread's mode is restored at the end.

    Nothing may wait for a capture in any mode. Synchronising the context
    (`torch.cuda.synchronize`), recording an event of it, or using the default stream while a stream
    that blocks with it is captured invalidates the capture. The driver has no call that
    reports whether a capture is under way. To know that the GPU has finished its work, wait with
    `allocate_fence` or for streams of your own.

    Args:
        device: Device of the work. Nothing is done for a CPU.

    Raises:
        DriverError: the driver refused the mode.
    """
    if device is not None and device.type != "cuda":
        yield
        return
    call_driver("cuInit", 0)
    mode = load_driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call_driver("cuThreadExchangeStreamCaptureMode", mode)
    try:
        yield
    finally:
        call_driver("cuThreadExchangeStreamCaptureMode", before)


def allocate_fence() -> int:
    """Return memory of the current context whose `cuMemFree` waits for all work of the GPU.

    That is the work that any stream of the context held before, including running graphs. The
    driver cannot know which work uses the memory, so it waits for all; `torch.cuda.empty_cache`
    relies on the same. Unlike a synchronisation of the context, the free is allowed within
    `relaxed_capture` while streams are captured, because captured work does not run. Allocate it in
    advance: memory may be short when the wait is needed. Raises DriverError.
    """
    return int(call_driver("cuMemAlloc", FENCE_BYTES))
