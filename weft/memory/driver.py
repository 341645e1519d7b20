"""CUDA driver calls through cuda.bindings, which is imported at the first call."""

from __future__ import annotations

from typing import Any

from weft.errors import DriverError


def driver() -> Any:
    """The module cuda.bindings.driver. Raises DriverError when it is not installed."""
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise DriverError(
            f"cuda-bindings cannot be imported ({error}): install it with `pip install weft[cuda]`"
        ) from error
    return module


def call(name: str, *args: Any) -> Any:
    """Call a driver function and return its results. Raises DriverError naming call and reason."""
    api = driver()
    try:
        code, *results = getattr(api, name)(*args)
    except RuntimeError as error:  # cuda.bindings found no driver library
        raise DriverError(f"{name}: {error}") from error
    if int(code) != 0:
        said = ", ".join(str(a) if isinstance(a, int) else type(a).__name__ for a in args)
        raise DriverError(f"{name}({said}) failed: {_reason(api, code)}")
    return results[0] if len(results) == 1 else tuple(results) or None


def _reason(api: Any, code: Any) -> str:
    name, text = api.cuGetErrorName(code), api.cuGetErrorString(code)
    if int(name[0]) or int(text[0]):
        return f"error {int(code)}"
    return f"{name[1].decode()} ({text[1].decode()})"
