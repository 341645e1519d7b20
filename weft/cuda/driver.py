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
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "use fewer threads or less shared memory per block",
    "CUDA_ERROR_INVALID_VALUE": "compare the sizes above with the limits of this GPU",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an earlier kernel failed; the CUDA context is lost: restart",
    "CUDA_ERROR_INVALID_CONTEXT": "use the module on the device on which it was loaded",
    "CUDA_ERROR_INVALID_HANDLE": "use the module before unload() and on the device on which it "
    "was loaded",
}
# Size of an allocation whose only purpose is that its free waits for the GPU. It is the block size
# of torch's allocator, so that the driver does not place it in another allocation's block.
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
        DriverError: the call failed. Names the call, the `action`, the reason and the fix.
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
    """Format a driver status as name, number, the driver's text and, if known, the fix."""
    lookup, message = load_driver().cuGetErrorString(status)
    name = getattr(status, "name", "unknown error")
    text = f"{name} ({int(status)})"
    if int(lookup) == 0 and message:
        text += f": {message.decode()}"
    return f"{text}; {_REMEDIES[name]}" if name in _REMEDIES else text


@contextlib.contextmanager
def relaxed_capture(device: torch.device | None = None) -> Iterator[None]:
    """Let this thread allocate, load, free and wait while streams of the process are captured.

    By default such calls are forbidden in a thread that captures, and in every thread while one
    captures in the global mode. A forbidden call invalidates the capture, and the capturing thread
    gets the error at a later launch. Calls in this context are not part of a graph, so relaxing the
    mode is safe. The thread's mode is restored at the end.

    Waiting for captured work is an error in any mode. Synchronising the context
    (`torch.cuda.synchronize`), recording an event of the context, or using the default stream while
    a stream that synchronises with it is captured invalidates the capture. No driver call reports
    whether any capture is active. To know that the GPU has finished its work, free the memory of
    `allocate_fence` or wait for streams of your own.

    Args:
        device: Device of the work. Nothing is done for a CPU.

    Raises:
        DriverError: the driver rejected the mode.
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
    """Allocate memory in the current context whose `cuMemFree` waits for all work of the GPU.

    The free waits for all work that any stream of the context already holds, including running
    graphs: the driver cannot know which work uses the memory. `torch.cuda.empty_cache` relies on
    the same behaviour. Unlike a context synchronisation, the free is allowed within
    `relaxed_capture` while streams are captured, because captured work does not run. Allocate the
    fence in advance: memory may be short when the wait is needed. Raises DriverError.
    """
    return int(call_driver("cuMemAlloc", FENCE_BYTES))
