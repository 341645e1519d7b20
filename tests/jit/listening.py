# SPDX-License-Identifier: Apache-2.0
"""A driver that only takes notes, in place of cuda.bindings.driver."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest


class Args(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("n", ctypes.c_uint32), ("value", ctypes.c_int32))


# What allocates, frees, loads or waits: forbidden beside a capture, but in relaxed mode.
FREE_OF_CAPTURES = {
    "cuModuleLoadData", "cuModuleUnload", "cuModuleGetFunction", "cuFuncLoad", "cuMemAlloc",
    "cuMemFree", "cuStreamCreate", "cuStreamDestroy", "cuStreamSynchronize", "cuMemcpyDtoHAsync",
}  # fmt: skip


class Driver:
    """cuda.bindings.driver without a driver: its types are the real ones, its calls are noted."""

    def __init__(self) -> None:
        self.real = pytest.importorskip(
            "cuda.bindings.driver", reason="cuda.bindings is not installed"
        )
        self.status: Any = self.real.CUresult.CUDA_SUCCESS
        self.context: tuple[Any, int] = (self.real.CUresult.CUDA_SUCCESS, 1)
        self.fails: dict[str, Any] = {}
        self.modes = self.real.CUstreamCaptureMode
        self.mode = self.modes.CU_STREAM_CAPTURE_MODE_GLOBAL
        self.unsafe: list[str] = []  # calls outside of relaxed mode
        self.capturing = self.real.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        self.calls: list[tuple[Any, ...]] = []
        self.launches: list[SimpleNamespace] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(self.real, name)
        answers: dict[str, tuple[Any, ...]] = {
            "cuModuleLoadData": (11,),
            "cuMemAlloc": (33,),
            "cuStreamCreate": (44,),
            "cuStreamIsCapturing": (self.capturing,),
            "cuModuleGetFunction": (22,),
            "cuFuncGetParamInfo": (0, ctypes.sizeof(Args)),
            "cuFuncGetAttribute": (40,),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": (3,),
            "cuOccupancyMaxActiveClusters": (16,),
            "cuModuleGetGlobal": (0x1000, 8),
            "cuCtxGetDevice": (0,),
            "cuDeviceGetAttribute": (9,),
        }

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            if (
                name in FREE_OF_CAPTURES
                and self.mode is not self.modes.CU_STREAM_CAPTURE_MODE_RELAXED
            ):
                self.unsafe.append(name)
            if name in self.fails:
                return (self.fails[name], *([None] * len(answers.get(name, ()))))
            return (self.real.CUresult.CUDA_SUCCESS, *answers.get(name, ()))

        return call

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, Any]:  # noqa: N802
        before, self.mode = self.mode, mode
        return self.real.CUresult.CUDA_SUCCESS, before

    def cuCtxGetCurrent(self) -> tuple[Any, int]:  # noqa: N802
        return self.context

    def cuGetErrorString(self, status: Any) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"as the driver says"

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> tuple[Any]:  # noqa: N802
        address = ctypes.c_uint64.from_address(params).value
        self.launches.append(
            SimpleNamespace(
                args=Args.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(Args))),
                address=address,
                grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
                block=(config.blockDimX, config.blockDimY, config.blockDimZ),
                shared=config.sharedMemBytes,
                stream=int(config.hStream),
                attributes=[attribute.id.name for attribute in config.attrs[: config.numAttrs]],
                function=function,
                extra=extra,
            )
        )
        return (self.status,)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]
