# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver over counters, with the real one's types, in place of cuda.bindings.driver.

Some stream is captured all the time: `unsafe` lists the calls that were not in relaxed mode.
"""

import ctypes
import os
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

GRANULE = 2 << 20
FOREIGN = 1 << 40  # handles below it are of streams and modules that others made


class Args(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("n", ctypes.c_uint32), ("value", ctypes.c_int32))


ANSWERS: dict[str, tuple[Any, ...]] = {
    "cuInit": (),
    "cuDeviceGetName": (b"Test GPU\0\0",),
    "cuMemGetAllocationGranularity": (GRANULE,),
    "cuMemGetInfo": (3 << 30, 8 << 30),
    "cuModuleLoadData": (11,),
    "cuModuleUnload": (),
    "cuModuleGetFunction": (22,),
    "cuModuleGetGlobal": (0x1000, 8),
    "cuFuncLoad": (),
    "cuFuncSetAttribute": (),
    "cuFuncGetParamInfo": (0, ctypes.sizeof(Args)),
    "cuFuncGetAttribute": (40,),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (3,),
    "cuOccupancyMaxActiveClusters": (16,),
    "cuCtxGetDevice": (0,),
}
# Answers that depend on the driver and the arguments.
CALLS: dict[str, Any] = {
    "cuDeviceGetCount": lambda d: (d.visible,),
    "cuDeviceGet": lambda d, ordinal: (ordinal,),
    "cuDeviceGetUuid": lambda d, device: (SimpleNamespace(bytes=bytes([device] * 16)),),
    "cuDeviceCanAccessPeer": lambda d, device, peer: (int(d.peers),),
    "cuCtxGetCurrent": lambda d: (d.current,),
    "cuCtxPopCurrent": lambda d: (d.stack.pop(),),
    "cuMemRelease": lambda d, handle: d.take("handle", handle),
    "cuStreamDestroy": lambda d, stream: d.take("stream", stream),
    "cuStreamIsCapturing": lambda d, stream: (d.capturing,),
    "cuMemHostGetDevicePointer": lambda d, address, flags: (address + (1 << 44),),
}
GIVES_BACK = {
    "cuCtxPopCurrent", "cuMemRelease", "cuMemAddressFree", "cuMemUnmap", "cuStreamDestroy",
    "cuMemFree", "cuMemFreeHost", "cuDevicePrimaryCtxRelease",
}  # fmt: skip
# What allocates, frees, loads, maps, waits or makes; the driver does not say which is forbidden.
UNSAFE = {
    "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease", "cuFuncLoad", "cuMemAddressFree",
    "cuMemAddressReserve", "cuMemAlloc", "cuMemCreate", "cuMemExportToShareableHandle", "cuMemFree",
    "cuMemFreeHost", "cuMemHostAlloc", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemRelease",
    "cuMemSetAccess", "cuMemUnmap", "cuMemcpyDtoHAsync", "cuMemsetD8Async", "cuModuleGetFunction",
    "cuModuleLoadData", "cuModuleUnload", "cuStreamCreate", "cuStreamDestroy",
    "cuStreamSynchronize",
}  # fmt: skip


class Driver:
    """As much of cuda.bindings.driver as weft uses.

    Args:
        fail: rank, and the number or the name of that rank's call that fails.
        lacks: Attributes that no GPU has.
        current: Context of every thread that has pushed none.
    """

    def __init__(
        self, *, fail: Any = None, lacks=(), fabric=False, peers=True, visible=4, current=0
    ) -> None:
        self.real: Any = pytest.importorskip("cuda.bindings.driver")
        self.fail, self.fails = fail, dict[str, Any]()  # fails: statuses of all ranks by name
        self.lacks, self.fabric, self.peers = lacks, fabric, peers
        self.visible, self.current = visible, current
        self.capturing = self.real.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        self.held: Counter[tuple[str, Any]] = Counter()
        self.log: list[tuple[int, str]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.launches: list[SimpleNamespace] = []
        self.unsafe: list[str] = []  # calls outside of relaxed mode
        self.local, self.lock = threading.local(), threading.Lock()
        self.next = FOREIGN
        self.pages: dict[int, object] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(self.real, name)
        assert hasattr(self.real, name), name
        run: Any = CALLS.get(name) or getattr(type(self), f"_{name}", lambda *_: ANSWERS[name])

        def counted(*args: Any) -> tuple[Any, ...]:
            with self.lock:
                self.log.append((self.rank, name))
                self.calls.append((name, *args))
                number = sum(rank == self.rank for rank, _ in self.log)
                status = self.fails.get(name, self.real.CUresult.CUDA_SUCCESS)
                if self.fail in ((self.rank, number), (self.rank, name)):
                    status = self.real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
                if name in UNSAFE and self.mode is not self.modes.CU_STREAM_CAPTURE_MODE_RELAXED:
                    self.unsafe.append(name)
                if int(status) == 0:
                    return (status, *run(self, *args))
                if name in GIVES_BACK:  # whatever it returns
                    run(self, *args)
                return (status, None)

        return counted

    @property
    def modes(self) -> Any:
        return self.real.CUstreamCaptureMode

    @property
    def rank(self) -> int:
        return getattr(self.local, "rank", 0)

    @property
    def stack(self) -> list[Any]:
        stack: list[Any] = vars(self.local).setdefault("stack", [])
        return stack

    @property
    def mode(self) -> Any:
        return getattr(self.local, "mode", self.modes.CU_STREAM_CAPTURE_MODE_GLOBAL)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]

    def quiet(self) -> bool:
        """Whether the wait was made that comes before anything of this rank is given back."""
        return not any(kind == "fence" and what[1] == self.rank for kind, what in self.left())

    def new(self, size: int = 4096) -> int:
        self.next += size
        return self.next - size

    def hold(self, kind: str, what: Any) -> tuple[Any]:
        self.held[kind, what] += 1
        return (what,)

    def take(self, kind: str, what: Any) -> tuple[()]:
        assert self.held[kind, what] > 0, f"{kind} {what} is given back and was not held"
        self.held[kind, what] -= 1
        return ()

    def left(self) -> dict[tuple[str, Any], int]:
        return {k: n for k, n in self.held.items() if n}

    def cuGetErrorString(self, status):
        return 0, b"out of memory"

    def _cuDeviceGetAttribute(self, attribute, device):
        if attribute.name == "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED":
            return (int(self.fabric),)
        return (0 if attribute in self.lacks else 9,)

    def _cuDevicePrimaryCtxRetain(self, device):
        self.hold("context", device)
        return (("context", device),)

    def _cuDevicePrimaryCtxRelease(self, device):
        assert not self.stack, "the context is released while it is current"
        return self.take("context", device)

    def _cuCtxPushCurrent(self, context):
        self.stack.append(context)
        return ()

    def _cuThreadExchangeStreamCaptureMode(self, mode):
        before, self.local.mode = self.mode, mode
        return (before,)

    def _cuMemAlloc(self, size):
        assert self.stack or self.current
        assert size >= 2 << 20
        address = self.new(size)
        self.hold("fence", (address, self.rank))
        return (address,)

    def _cuMemFree(self, address):
        assert self.stack or self.current
        return self.take("fence", (address, self.rank))

    def _cuMemCreate(self, size, properties, flags):
        assert size % GRANULE == 0
        assert properties.location.id == self.stack[-1][1]
        return self.hold("handle", self.new())

    def _cuMemExportToShareableHandle(self, handle, kind, flags):
        assert self.held["handle", handle]
        if kind.name == "CU_MEM_HANDLE_TYPE_FABRIC":
            fabric = self.real.CUmemFabricHandle()
            fabric.data = handle.to_bytes(64, "little")
            return (fabric,)
        fd = os.memfd_create("gpu")
        os.write(fd, handle.to_bytes(64, "little"))
        return (fd,)

    def _cuMemImportFromShareableHandle(self, shared, kind):
        fabric = kind.name == "CU_MEM_HANDLE_TYPE_FABRIC"
        data = ctypes.string_at(int(shared), 64) if fabric else os.pread(shared, 64, 0)
        return self.hold("handle", int.from_bytes(data, "little"))

    def _cuMemAddressReserve(self, size, alignment, address, flags):
        address = self.new(size)
        self.hold("range", (address, size))
        return (address,)

    def _cuMemAddressFree(self, address, size):
        maps = [what[0] for kind, what in self.left() if kind == "map"]
        assert not [start for start in maps if address <= start < address + size]
        return self.take("range", (address, size))

    def _cuMemMap(self, address, size, offset, handle, flags):
        assert self.held["handle", handle]
        self.hold("map", (address, size))
        return ()

    def _cuMemUnmap(self, address, size):
        assert self.quiet(), "memory is unmapped under what may still run in it"
        return self.take("map", (address, size))

    def _cuMemSetAccess(self, address, size, descriptors, count):
        assert self.held["map", (address, size)]
        assert descriptors[0].location.id == self.stack[-1][1]
        return ()

    def _cuStreamCreate(self, flags):
        assert self.stack or self.current
        return self.hold("stream", self.new())

    def _cuStreamSynchronize(self, stream):
        assert int(stream) < FOREIGN or self.held["stream", stream]
        return ()

    def _cuMemsetD8Async(self, address, value, count, stream):
        assert self.held["map", (address, count)]
        return ()

    def _cuMemcpyDtoHAsync(self, into, address, count, stream):
        if isinstance(into, bytearray):
            into[:] = bytes([3]) * count
        else:
            ctypes.memset(into, 3, count)
        return ()

    def _cuMemHostAlloc(self, size, flags):
        page = ctypes.create_string_buffer(size)
        self.pages[ctypes.addressof(page)] = page
        return self.hold("host", ctypes.addressof(page))

    def _cuMemFreeHost(self, address):
        assert self.quiet(), "a page is freed under what may still write it"
        return self.take("host", address)

    def _cuLaunchKernelEx(self, config, function, params, extra):
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
        return ()
