"""cuda.bindings.driver, and what its answers mean in words."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from weft.errors import DriverError

_REMEDIES = {
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the code is for another GPU: compile for current_arch()",
    "CUDA_ERROR_INVALID_IMAGE": "the code is damaged or for another GPU: clear the cache",
    "CUDA_ERROR_OUT_OF_MEMORY": "free some GPU memory",
    "CUDA_ERROR_NOT_FOUND": 'the name is not in the code: is it declared extern "C"?',
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "ask for fewer threads or less shared memory per block",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": "ask for a grid that fits the GPU at once: see "
    "CudaModule.occupancy",
    "CUDA_ERROR_INVALID_VALUE": "compare the sizes above with the limits of this GPU",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an earlier kernel failed; the CUDA context is lost: restart",
    "CUDA_ERROR_INVALID_CONTEXT": "use the module on the device on which it was loaded",
    "CUDA_ERROR_INVALID_HANDLE": "use the module before unload() and on the device on which it "
    "was loaded",
}


@functools.cache
def driver() -> Any:
    """Return `cuda.bindings.driver`.

    Raises:
        DriverError: it is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DriverError(
            f"GPU ranks need cuda.bindings: {error}; pip install 'weft[gpu]'"
        ) from error


def check(result: tuple[Any, ...], doing: str) -> Any:
    """Return the value (or tuple of values, or None) of a driver call's answer.

    Raises:
        DriverError: the call failed; the text says while `doing` what, and how to mend it.
    """
    status, *values = result
    if int(status) != 0:
        raise DriverError(f"{doing}: {error_text(status)}")
    if len(values) == 1:
        return values[0]
    return tuple(values) or None


def error_text(status: Any) -> str:
    """Return a driver status as name, number, the driver's words and, where known, a remedy."""
    known, words = driver().cuGetErrorString(status)
    name = getattr(status, "name", "unknown error")
    text = f"{name} ({int(status)})"
    if int(known) == 0 and words:
        text += f": {words.decode()}"
    return f"{text}; {_REMEDIES[name]}" if name in _REMEDIES else text
