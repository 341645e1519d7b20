# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver that counts what is held, and by which rank, and fails on demand.

It plays a process in which some stream is captured all the time, in the global mode. `unsafe` lists
the calls that a thread may not make then, unless its own mode is relaxed. cuCtxSynchronize, which
would break that capture in every mode, does not exist.
"""

import ctypes
import os
import threading
from collections import Counter
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

GRANULE = 2 << 20


class Handles(IntEnum):
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
    CU_MEM_HANDLE_TYPE_FABRIC = 8


class Attributes(IntEnum):
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128


class CaptureModes(IntEnum):
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
    CU_STREAM_CAPTURE_MODE_RELAXED = 2


class Results(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Fabric:
    """A fabric handle; imports find it by its address, as the driver does."""

    known: dict[int, "Fabric"] = {}

    def __init__(self):
        self.data = bytes(64)
        Fabric.known[id(self)] = self

    def getPtr(self):
        return id(self)


class Driver:
    """As much of cuda.bindings.driver as a heap uses, over counters."""

    CUmemAllocationHandleType = Handles
    CUdevice_attribute = Attributes
    CUresult = Results
    CUstreamCaptureMode = CaptureModes
    CUmemFabricHandle = Fabric
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP = 1, 2

    def __init__(self, *, fail=None, lacks=(), fabric=False, peers=True, visible=None):
        self.fail = fail  # (rank, number of the call of that rank that fails, or its name)
        self.lacks = lacks
        self.fabric = fabric
        self.peers = peers
        self.visible = visible
        self.held: Counter[tuple[str, Any]] = Counter()
        self.calls: Counter[int] = Counter()
        self.log: list[tuple[int, str]] = []
        self.unsafe: list[tuple[int, str]] = []  # calls outside of relaxed mode
        self.rank = threading.local()
        self.lock = threading.Lock()
        self.next = 1 << 40
        self.pages: dict[int, object] = {}

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        run = object.__getattribute__(self, f"_{name}")

        def counted(*args):
            rank = self.rank.value
            with self.lock:
                self.calls[rank] += 1
                self.log.append((rank, name))
                if name in _UNSAFE and self.mode is not CaptureModes.CU_STREAM_CAPTURE_MODE_RELAXED:
                    self.unsafe.append((rank, name))
                if self.fail in ((rank, self.calls[rank]), (rank, name)):
                    # A call that gives back has given back, whatever it returns.
                    if name in _GIVES_BACK:
                        run(*args)
                    return (Results.CUDA_ERROR_OUT_OF_MEMORY, None)
                return (Results.CUDA_SUCCESS, *run(*args))

        return counted

    @property
    def context(self):
        if not hasattr(self.rank, "stack"):
            self.rank.stack = []
        return self.rank.stack

    @property
    def mode(self):
        return getattr(self.rank, "mode", CaptureModes.CU_STREAM_CAPTURE_MODE_GLOBAL)

    def quiet(self):
        """Whether the wait was made that comes before anything of this rank is given back."""
        return not any(n for (kind, what), n in self.held.items()
                       if kind == "fence" and what[1] == self.rank.value)  # fmt: skip

    def new(self, size=4096):
        self.next += size
        return self.next - size

    def hold(self, kind, what):
        self.held[kind, what] += 1
        return (what,)

    def take(self, kind, what):
        assert self.held[kind, what] > 0, f"{kind} {what} is given back and was not held"
        self.held[kind, what] -= 1
        return ()

    @property
    def maps(self):
        return [(n, what[0]) for (kind, what), n in self.held.items() if kind == "map"]

    def left(self):
        return {k: n for k, n in self.held.items() if n}

    def cuGetErrorString(self, code):
        return 0, b"out of memory"

    def _cuInit(self, flags):
        return ()

    def _cuDeviceGetCount(self):
        return (4 if self.visible is None else self.visible,)

    def _cuDeviceGet(self, ordinal):
        return (ordinal,)

    def _cuDeviceGetName(self, length, device):
        return (b"Test GPU\0\0",)

    def _cuDeviceGetUuid(self, device):
        return (SimpleNamespace(bytes=bytes([device] * 16)),)

    def _cuDeviceGetAttribute(self, attribute, device):
        if attribute is Attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
            return (int(self.fabric),)
        return (int(attribute not in self.lacks),)

    def _cuDeviceCanAccessPeer(self, device, peer):
        return (int(self.peers),)

    def _cuDevicePrimaryCtxRetain(self, device):
        self.hold("context", device)
        return (("context", device),)

    def _cuDevicePrimaryCtxRelease(self, device):
        assert not self.context, "the context is released while it is current"
        return self.take("context", device)

    def _cuCtxPushCurrent(self, context):
        self.context.append(context)
        return ()

    def _cuCtxPopCurrent(self):
        return (self.context.pop(),)

    def _cuThreadExchangeStreamCaptureMode(self, mode):
        before, self.rank.mode = self.mode, mode
        return (before,)

    def _cuMemAlloc(self, size):
        assert self.context
        assert size >= 2 << 20
        address = self.new(size)
        self.hold("fence", (address, self.rank.value))
        return (address,)

    def _cuMemFree(self, address):
        assert self.context
        return self.take("fence", (address, self.rank.value))

    def _cuMemGetAllocationGranularity(self, properties, option):
        return (GRANULE,)

    def CUmemAllocationProp(self):
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def _cuMemCreate(self, size, properties, flags):
        assert self.context
        assert size % GRANULE == 0
        assert properties.location.id == self.context[-1][1]
        return self.hold("handle", self.new())

    def _cuMemGetInfo(self):
        assert self.context
        return (3 << 30, 8 << 30)

    def _cuMemExportToShareableHandle(self, handle, kind, flags):
        assert self.held["handle", handle]
        if kind is Handles.CU_MEM_HANDLE_TYPE_FABRIC:
            fabric = Fabric()
            fabric.data = handle.to_bytes(64, "little")
            return (fabric,)
        fd = os.memfd_create("gpu")
        os.write(fd, handle.to_bytes(8, "little"))
        return (fd,)

    def _cuMemImportFromShareableHandle(self, shared, kind):
        fabric = kind is Handles.CU_MEM_HANDLE_TYPE_FABRIC
        data = Fabric.known[shared].data if fabric else os.pread(shared, 8, 0)
        return self.hold("handle", int.from_bytes(data, "little"))

    def _cuMemRelease(self, handle):
        return self.take("handle", handle)

    def _cuMemAddressReserve(self, size, alignment, address, flags):
        address = self.new(size)
        self.hold("range", (address, size))
        return (address,)

    def _cuMemAddressFree(self, address, size):
        assert not [n for n, start in self.maps if n and address <= start < address + size]
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
        assert descriptors[0].location.id == self.context[-1][1]
        return ()

    def _cuStreamCreate(self, flags):
        assert self.context
        return self.hold("stream", self.new())

    def _cuStreamDestroy(self, stream):
        return self.take("stream", stream)

    def _cuStreamSynchronize(self, stream):
        assert self.held["stream", stream]
        return ()

    def _cuMemsetD8Async(self, address, value, count, stream):
        assert self.held["map", (address, count)]
        return ()

    def _cuMemcpyDtoHAsync(self, into, address, count, stream):
        ctypes.memset(into, 3, count)
        return ()

    def _cuMemHostAlloc(self, size, flags):
        page = ctypes.create_string_buffer(size)
        self.pages[ctypes.addressof(page)] = page
        return self.hold("host", ctypes.addressof(page))

    def _cuMemFreeHost(self, address):
        assert self.quiet(), "a page is freed under what may still write it"
        return self.take("host", address)

    def _cuMemHostGetDevicePointer(self, address, flags):
        return (address + (1 << 44),)


_GIVES_BACK = {
    "cuCtxPopCurrent", "cuMemRelease", "cuMemAddressFree", "cuMemUnmap", "cuStreamDestroy",
    "cuMemFree", "cuMemFreeHost", "cuDevicePrimaryCtxRelease",
}  # fmt: skip
# What allocates, frees, maps, waits or makes; the driver does not say which of it is forbidden.
_UNSAFE = {
    "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease", "cuMemAddressFree",
    "cuMemAddressReserve", "cuMemAlloc", "cuMemCreate", "cuMemExportToShareableHandle", "cuMemFree",
    "cuMemFreeHost", "cuMemHostAlloc", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemRelease",
    "cuMemSetAccess", "cuMemUnmap", "cuMemcpyDtoHAsync", "cuMemsetD8Async", "cuStreamCreate",
    "cuStreamDestroy", "cuStreamSynchronize",
}  # fmt: skip
