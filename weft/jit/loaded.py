"""Code on a GPU, and how it goes: behind a wait, whatever is being captured meanwhile."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from weft.errors import DriverError
from weft.jit.driver import check, driver
from weft.memory.driver import FENCE_BYTES, relaxed


class Loaded:
    """A cubin in the current context, until `free`.

    image: the cubin.   context: the current one.   name: for error texts.   stays: it is never
    freed, so it holds nothing to wait by (`weft.memory.driver.fence`).   Raises DriverError.
    """

    def __init__(self, image: bytes, context: Any, *, name: str, stays: bool) -> None:
        self._name, self._context, self._owner = name, context, os.getpid()
        self._fence: Any = None
        doing = f"loading {name!r} ({len(image)} bytes)"
        with relaxed():
            if not stays:
                self._fence = _call("cuMemAlloc", FENCE_BYTES, doing=doing)
            try:
                self.module: Any = _call("cuModuleLoadData", image, doing=doing)
            except DriverError:
                self._wait_for_all()
                raise

    def free(self, after: int | None = None) -> None:
        """Wait until the GPU has done all its work, graphs included, and unload. Idempotent.

        after: a CUstream to wait for beside that, unless it is being captured. A forked child does
        nothing: the driver's state is its parent's. Raises DriverError after having tried every
        step.
        """
        module, self.module = self.module, None
        if module is None or os.getpid() != self._owner:
            return
        doing = f"unloading {self._name!r}"
        with relaxed(), contextlib.ExitStack() as last:
            _call("cuCtxPushCurrent", self._context, doing=doing)
            last.callback(_call, "cuCtxPopCurrent", doing=doing)
            last.callback(_call, "cuModuleUnload", module, doing=doing)
            last.callback(self._wait_for_all)
            if after is not None:
                self._wait_for(driver().CUstream(after))

    def _wait_for_all(self) -> None:
        held, self._fence = self._fence, None
        if held is not None:
            _call("cuMemFree", held, doing=f"waiting for the kernels of {self._name!r}")

    def _wait_for(self, stream: Any) -> None:
        """Wait for a stream that is not being captured: to wait for one that is breaks its capture.

        Of the default stream the driver answers whether one that blocks with it is captured.
        """
        api = driver()
        status, capturing = api.cuStreamIsCapturing(stream)
        if status == api.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
            return
        doing = f"waiting for the kernels of {self._name!r}"
        capturing = check((status, capturing), doing)
        if capturing == api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            _call("cuStreamSynchronize", stream, doing=doing)


def _call(function: str, *args: Any, doing: str) -> Any:
    return check(getattr(driver(), function)(*args), f"{doing}: {function}")
