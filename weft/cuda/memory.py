# SPDX-License-Identifier: Apache-2.0
"""GPU memory of several processes: one allocation per rank, mapped into one range on every GPU.

Allocations are exported as POSIX file descriptors, or as fabric handles if every rank supports
them. Fabric handles can also be imported on the other hosts of an NVLink domain.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from weft.cuda.driver import allocate_fence, call_driver, load_driver, relaxed_capture
from weft.errors import DriverError, HandleUnsupported, PeerAccessDenied, SetupError
from weft.shape import MAILBOX_BYTES

_log = logging.getLogger(__name__)
_REMEDY = (
    "check `nvidia-smi topo -p2p r`, the IOMMU and PCIe ACS settings, that CUDA_VISIBLE_DEVICES "
    "shows the GPUs of all ranks, and that a container has all GPUs and one IPC namespace"
)

_CAPSULE_NAME = b"dltensor"  # the capsule keeps a pointer to it, so it must outlive the capsule
_DL_UINT = 1
_DL_DEVICES = {"cpu": 1, "cuda": 2}


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _DLDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

# Objects to keep alive until the deleter of a tensor is called, by the address of its struct.
_alive: dict[int, tuple[object, ...]] = {}


def _release(address: int, pop: Callable[..., object] = _alive.pop) -> None:
    # `pop` is a default: at interpreter exit the module's names are cleared before its tensors.
    pop(address, None)


_delete = _Deleter(_release)
# Never freed: at interpreter exit the last tensors still call it.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_delete))


def tensor_from_address(
    address: int, count: int, device: torch.device, owner: object
) -> torch.Tensor:
    """Return a uint8 tensor [count] over `address`; it and its views keep `owner` alive.

    The tensor is created through DLPack, which specifies its device. `__cuda_array_interface__`
    does not: torch then queries the driver and gets the GPU that holds the memory. For a peer's
    share it would copy the memory, or run kernels on a GPU where this process has not mapped it.
    """
    shape = (ctypes.c_int64 * 1)(count)
    managed = _DLManagedTensor()
    managed.tensor.data = address
    managed.tensor.device = _DLDevice(_DL_DEVICES[device.type], device.index or 0)
    managed.tensor.ndim = 1
    managed.tensor.dtype = _DLDataType(_DL_UINT, 8, 1)
    managed.tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _delete
    managed_address = ctypes.addressof(managed)
    _alive[managed_address] = (managed, shape, owner)
    try:
        return from_dlpack(_new_capsule(managed_address, _CAPSULE_NAME, None))
    except BaseException:
        _alive.pop(managed_address, None)
        raise


class DeviceShares:
    """Shares of all ranks, mapped on this rank's GPU.

    Attributes:
        ranks: Ranks whose shares are mapped.
        stride: Bytes between two shares.
        base: Address of rank 0's share. Rank r's is at `base + r * stride`.
        mailbox: Host and device address of one page of pinned host memory.
        uses_fabric: Whether shares are exported as fabric handles. Set by `allocate`.
    """

    uses_fabric = False

    def __init__(self, device: torch.device, rank: int, num_ranks: int, size: int) -> None:
        self._torch_device = device
        self._ordinal = device.index or 0
        self._rank = rank
        self._num_ranks = num_ranks
        self._size = size
        self._owner = os.getpid()
        self._undo = contextlib.ExitStack()
        self._device: Any = None
        self._context: Any = None
        self._stream: Any = None
        self._own: Any = None  # this rank's allocation, exported again for a rank that joins
        self.ranks: set[int] = set()
        self._kind: Any = None
        self._granule = 0
        self._mapped = 0
        self._fence = 0
        self.stride = 0
        self.base = 0
        self.mailbox = (0, 0)

    @property
    def stream(self) -> int:
        """CUstream that only this object uses, unlike torch's shared streams."""
        return int(self._stream)

    def open(self) -> dict[str, Any]:
        """Retain the GPU's primary context and return the properties of this GPU for `check`."""
        api = load_driver()
        call_driver("cuInit", 0)
        device = call_driver("cuDeviceGet", self._ordinal)
        with relaxed_capture(self._torch_device):
            self._context = call_driver("cuDevicePrimaryCtxRetain", device)
            self._device = device
        name = call_driver("cuDeviceGetName", 128, device).split(b"\0")[0].decode()
        attributes = api.CUdevice_attribute
        required = {
            "virtual memory management": (
                attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
            ),
            "POSIX file descriptor handles": (
                attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            ),
        }
        for feature, attribute in required.items():
            if not call_driver("cuDeviceGetAttribute", attribute, device):
                raise HandleUnsupported(
                    f"cuda:{self._ordinal} ({name}) has no {feature}: weft needs them to share "
                    "memory; use a newer driver, or a GPU outside of vGPU and WSL"
                )
        kinds = api.CUmemAllocationHandleType
        with self._activate_context():
            self._granule = call_driver(
                "cuMemGetAllocationGranularity",
                self._allocation_properties(kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
            fabric = self._supports_fabric()
        return {
            "uuid": bytes(call_driver("cuDeviceGetUuid", device).bytes).hex(),
            "name": f"cuda:{self._ordinal} ({name})",
            "granule": self._granule,
            "fabric": fabric,
        }

    def check(self, peers: Sequence[dict[str, Any] | None]) -> None:
        """Check that this GPU can map the memory of every peer.

        Args:
            peers: Results of `open` by rank, None for a dead rank.

        Raises:
            PeerAccessDenied: this GPU cannot access the memory of a peer.
            HandleUnsupported: the GPUs have different allocation granularities.
        """
        visible = {}
        for ordinal in range(call_driver("cuDeviceGetCount")):
            device = call_driver("cuDeviceGet", ordinal)
            visible[bytes(call_driver("cuDeviceGetUuid", device).bytes).hex()] = device
        own = peers[self._rank]
        assert own is not None  # this rank is living
        for rank, peer in enumerate(peers):
            if peer is None:
                continue
            if peer["granule"] != own["granule"]:
                raise HandleUnsupported(
                    f"rank {self._rank} on {own['name']} allocates multiples of {own['granule']} "
                    f"bytes, rank {rank} on {peer['name']} of {peer['granule']}: use GPUs of one "
                    "kind"
                )
            # For a GPU that this process does not see, the mapping itself fails.
            device = visible.get(peer["uuid"])
            if peer["uuid"] == own["uuid"] or device is None:
                continue
            if not call_driver("cuDeviceCanAccessPeer", self._device, device):
                raise PeerAccessDenied(
                    f"rank {self._rank} on {own['name']} {own['uuid']} cannot access the memory of "
                    f"rank {rank} on {peer['name']} {peer['uuid']}: {_REMEDY}"
                )

    def allocate(self, *, fabric: bool) -> None:
        """Allocate this rank's share, the address range, the mailbox and a stream."""
        api = load_driver()
        kinds = api.CUmemAllocationHandleType
        self.uses_fabric = fabric
        self._kind = (
            kinds.CU_MEM_HANDLE_TYPE_FABRIC
            if fabric
            else kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        self._mapped = -(-self._size // self._granule) * self._granule
        self.stride = self._mapped + self._granule  # the last granule is unmapped: overruns fault
        with self._activate_context():
            self._undo.callback(self._release_own)
            self._own = self._allocate_share()
            reserved = self._num_ranks * self.stride
            self.base = int(call_driver("cuMemAddressReserve", reserved, self._granule, 0, 0))
            self._undo.callback(call_driver, "cuMemAddressFree", self.base, reserved)
            self._undo.callback(self._unmap_all)
            self._stream = call_driver("cuStreamCreate", api.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self._undo.callback(call_driver, "cuStreamDestroy", self._stream)
            flags = api.CU_MEMHOSTALLOC_PORTABLE | api.CU_MEMHOSTALLOC_DEVICEMAP
            host = int(call_driver("cuMemHostAlloc", MAILBOX_BYTES, flags))
            self._undo.callback(call_driver, "cuMemFreeHost", host)
            ctypes.memset(host, 0, MAILBOX_BYTES)
            self.mailbox = (host, int(call_driver("cuMemHostGetDevicePointer", host, 0)))
            self._fence = allocate_fence()

    def create(self) -> None:
        """Allocate this rank's share again after `release`; `map` zeroes it."""
        with self._activate_context():
            self._own = self._allocate_share()
            self._fence = allocate_fence()

    def release(self) -> None:
        """Wait for this GPU's work, unmap all shares and free this rank's. Idempotent.

        The address range, the mailbox and the stream stay. A kernel that accesses the range before
        `create` and `map` fails with an illegal address.

        Raises:
            DriverError: a step failed. All steps have been tried.
        """
        with self._activate_context(), contextlib.ExitStack() as cleanup:
            cleanup.callback(self._release_own)
            cleanup.callback(self._unmap_all)
            if self._fence:
                fence, self._fence = self._fence, 0
                cleanup.callback(call_driver, "cuMemFree", fence)

    def share_fd(self) -> int:
        """Return a new file descriptor of this rank's share. The caller closes it."""
        with contextlib.ExitStack() as undo:
            with self._activate_context():
                fd = int(self._export(self._own, self._kind))
                undo.callback(os.close, fd)
                os.set_inheritable(fd, False)
            undo.pop_all()
        return fd

    def export_fabric(self) -> str:
        """Return a fabric handle of this rank's share in hexadecimal."""
        with self._activate_context():
            return bytes(self._export(self._own, self._kind).data).hex()

    def map(self, shared: Mapping[int, int | str]) -> None:
        """Map shares from their descriptors or fabric handles, and zero this rank's share.

        The old share of a replaced rank is unmapped first, after all work of this GPU.
        """
        with self._activate_context():
            if replaced := self.ranks.intersection(shared):
                call_driver("cuMemFree", self._fence)
                self._fence = 0
                try:
                    for rank in replaced:
                        self._unmap(rank)
                finally:
                    self._fence = allocate_fence()
            for rank, handle in shared.items():
                try:
                    self._map(rank, handle)
                except DriverError as error:
                    if rank == self._rank:
                        raise
                    raise PeerAccessDenied(
                        f"cuda:{self._ordinal} of rank {self._rank} cannot map the memory of rank "
                        f"{rank}: {error}; {_REMEDY}"
                    ) from error
            if self._rank in shared:
                own = self.base + self._rank * self.stride
                call_driver("cuMemsetD8Async", own, 0, self._mapped, self._stream)
                call_driver("cuStreamSynchronize", self._stream)

    def view(self, address: int, count: int, owner: object) -> torch.Tensor:
        """Return a uint8 tensor [count] over `address` that keeps `owner` alive."""
        return tensor_from_address(address, count, self._torch_device, owner)

    def read(self, address: int, count: int) -> bytes:
        """Return a copy of `count` bytes. Kernels may run during the copy."""
        copy = (ctypes.c_ubyte * count)()
        with relaxed_capture(self._torch_device), self._activate_context():
            call_driver("cuMemcpyDtoHAsync", ctypes.addressof(copy), address, count, self._stream)
            call_driver("cuStreamSynchronize", self._stream)
        return bytes(copy)

    def write(self, address: int, data: bytes) -> None:
        """Store at most 2048 bytes with a copy engine, even if kernels occupy every SM.

        Call it from one thread at a time.
        """
        staged = self.mailbox[0] + MAILBOX_BYTES // 2  # pinned, after the part that kernels write
        ctypes.memmove(staged, data, len(data))
        with relaxed_capture(self._torch_device), self._activate_context():
            call_driver("cuMemcpyHtoDAsync", address, staged, len(data), self._stream)
            call_driver("cuStreamSynchronize", self._stream)

    def free(self) -> None:
        """Wait for this GPU's work, and release all resources. Idempotent.

        The wait is bounded, since the kernels of this memory have deadlines. Any thread may call it
        at any time, also during captures: freeing the fence waits for the GPU. A graph whose
        kernels use this memory must not be replayed afterwards, even if its capture has not ended.
        A forked child does nothing: the driver's state belongs to its parent.

        Raises:
            DriverError: a step failed. All steps have been tried.
        """
        undo, self._undo = self._undo, contextlib.ExitStack()
        device, self._device = self._device, None
        if device is None or os.getpid() != self._owner:
            return
        with relaxed_capture(self._torch_device), contextlib.ExitStack() as cleanup:
            cleanup.callback(call_driver, "cuDevicePrimaryCtxRelease", device)
            with self._activate_context(), undo:
                if self._fence:  # if it is 0, no kernel has used this memory
                    undo.callback(call_driver, "cuMemFree", self._fence)

    def _allocate_share(self) -> Any:
        try:
            return call_driver(
                "cuMemCreate", self._mapped, self._allocation_properties(self._kind), 0
            )
        except DriverError as error:
            free, total = call_driver("cuMemGetInfo")
            raise DriverError(
                f"{error}; cannot allocate {self._mapped} contiguous bytes on cuda:{self._ordinal} "
                f"({free} free of {total}). Call torch.cuda.empty_cache(), or reduce the sizes: "
                "`memory_bytes` of each operator returns its size without allocating it"
            ) from error

    def _map(self, rank: int, shared: int | str) -> None:
        api = load_driver()
        address = self.base + rank * self.stride
        handle = self._own if rank == self._rank else self._import(shared)
        try:
            call_driver("cuMemMap", address, self._mapped, 0, handle, 0)
            self.ranks.add(rank)
        finally:
            if rank != self._rank:
                call_driver("cuMemRelease", handle)  # the mapping keeps the memory alive
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._ordinal
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call_driver("cuMemSetAccess", address, self._mapped, [access], 1)

    def _release_own(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            call_driver("cuMemRelease", own)

    def _unmap(self, rank: int) -> None:
        self.ranks.remove(rank)
        call_driver("cuMemUnmap", self.base + rank * self.stride, self._mapped)

    def _unmap_all(self) -> None:
        with contextlib.ExitStack() as stack:  # runs all callbacks even if one raises
            for rank in self.ranks.copy():
                stack.callback(self._unmap, rank)

    def _import(self, shared: int | str) -> Any:
        if isinstance(shared, int):
            return call_driver("cuMemImportFromShareableHandle", shared, self._kind)
        fabric = load_driver().CUmemFabricHandle()
        fabric.data = bytes.fromhex(shared)
        return call_driver("cuMemImportFromShareableHandle", fabric.getPtr(), self._kind)

    def _export(self, handle: Any, kind: Any) -> Any:
        try:
            return call_driver("cuMemExportToShareableHandle", handle, kind, 0)
        except DriverError as error:
            raise HandleUnsupported(
                f"cuda:{self._ordinal} cannot export memory as {kind.name}: {error}; weft needs a "
                "driver and a container that allow processes to share GPU memory"
            ) from error

    def _supports_fabric(self) -> bool:
        """Whether a fabric handle can be exported and imported again."""
        api = load_driver()
        attribute = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
        kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        if not call_driver("cuDeviceGetAttribute", attribute, self._device):
            return False
        with contextlib.ExitStack() as undo:
            try:
                handle = call_driver(
                    "cuMemCreate", self._granule, self._allocation_properties(kind), 0
                )
                undo.callback(call_driver, "cuMemRelease", handle)
                exported = self._export(handle, kind)
                again = call_driver("cuMemImportFromShareableHandle", exported.getPtr(), kind)
                undo.callback(call_driver, "cuMemRelease", again)
            except SetupError:
                return False  # no IMEX channel; file descriptors still work
        return True

    def _allocation_properties(self, kind: Any) -> Any:
        api = load_driver()
        properties = api.CUmemAllocationProp()
        properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._ordinal
        properties.requestedHandleTypes = kind
        return properties

    @contextlib.contextmanager
    def _activate_context(self) -> Iterator[None]:
        """Make this GPU's CUDA context current, with a relaxed capture mode."""
        with relaxed_capture(self._torch_device):
            call_driver("cuCtxPushCurrent", self._context)
            try:
                yield
            finally:
                call_driver("cuCtxPopCurrent")


def find_reachable_ranks(
    device: torch.device, exchange: Callable[[Any], list[Any]], owners: Sequence[int]
) -> list[list[int]]:
    """Determine, for every rank, the ranks of `owners` whose GPU memory it can map. Collective.

    Args:
        device: GPU of this rank.
        exchange: Returns the value of every rank, in rank order.
        owners: One rank of each machine.
    """
    shares = DeviceShares(device, 0, 2, 1)  # this rank's share, and address space for one other

    def can_map(rank: int, handle: str | None) -> bool:
        if handle is not None:
            try:
                shares.map({1: handle})
                return True
            except SetupError as error:
                _log.info("no NVLink to rank %d: %s", rank, error)
        return False

    try:
        handle = None
        try:  # a persistent error is raised when a heap is created
            if shares.open()["fabric"]:
                shares.allocate(fabric=True)
                handle = shares.export_fabric()
        except SetupError as error:
            _log.info("no fabric handle for the ranks of other machines: %s", error)
        handles = exchange(handle)
        reachable = [r for r in owners if handle is not None and can_map(r, handles[r])]
        return exchange(reachable)  # no rank frees its memory before all have tried
    finally:
        with contextlib.suppress(SetupError):  # as above; the others have this rank's result
            shares.free()


def supports_fabric(device: torch.device) -> bool:
    """Whether a GPU supports fabric handles. Raises DriverError or HandleUnsupported."""
    shares = DeviceShares(device, 0, 1, 1)
    try:
        return bool(shares.open()["fabric"])
    finally:
        shares.free()
