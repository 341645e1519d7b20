# SPDX-License-Identifier: Apache-2.0
"""CUDA modules: load a cubin on the current GPU, get its kernels and read its variables."""

from __future__ import annotations

import contextlib
import os
import weakref
from dataclasses import dataclass
from typing import Any

from weft.cuda.driver import (
    allocate_fence,
    call_driver,
    describe_status,
    load_driver,
    relaxed_capture,
)
from weft.errors import DriverError, OutOfOrder


@dataclass(frozen=True, slots=True)
class Function:
    """A loaded kernel; valid until its module is unloaded."""

    name: str
    handle: Any  # CUfunction
    shared: int  # dynamic shared memory per block in bytes
    argument_bytes: int  # size of the kernel's only argument
    owner: object = None  # its module, kept alive by this reference


def build_cluster_attribute(cuda: Any, cluster: int) -> Any:
    """Create the launch attribute for clusters of `cluster` blocks in x."""
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = cluster, 1, 1
    return attribute


class CudaModule:
    """A cubin in the current CUDA context.

    Args:
        image: Cubin, from `compile_cubin`.
        name: Name in errors.
        stays: Whether the module stays loaded until the process ends.

    Raises:
        DriverError: there is no current context, or the driver cannot load the cubin.
    """

    def __init__(self, image: bytes, *, name: str, permanent: bool = False) -> None:
        self.name = name
        context = require_context(f"loading {name!r}")
        self._code = _Code(image, context, name=name, permanent=permanent)
        # No function of a collected module exists, because functions reference it. At exit the
        # driver frees it.
        if not permanent:
            weakref.finalize(self, self._code.free).atexit = False
        self._handles: dict[str, Any] = {}
        self._shared: dict[str, int] = {}  # maximum dynamic shared memory requested per kernel

    def function(self, name: str, *, shared: int = 0) -> Function:
        """Load a kernel with a limit of `shared` bytes of dynamic shared memory.

        The kernel is loaded here rather than at its first launch: a lazy load waits until the GPU
        is idle, which deadlocks while a kernel spins on the flag of a peer that is still loading.

        Args:
            name: The `extern "C"` name.
            shared: Dynamic shared memory per block in bytes; together with the kernel's static
                shared memory at most 227 KiB on sm_90 and sm_100.

        Raises:
            DriverError: the kernel is unknown, or `shared` exceeds the GPU's limit.
            OutOfOrder: the module was unloaded.
        """
        handle = self._load_function(name)
        if shared > self._shared.get(name, 0):  # never lower the limit of an earlier caller
            which = load_driver().CUfunction_attribute
            static = call_driver(
                "cuFuncGetAttribute", which.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle
            )
            limit = _get_device_attribute("CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
            call_driver(
                "cuFuncSetAttribute",
                handle,
                which.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                shared,
                action=f"setting the dynamic shared memory of {name!r} to {shared} bytes (static: "
                f"{static}, limit per block: {limit})",
            )
            self._shared[name] = shared
        action = f"querying the argument of {name!r}"
        _, size = call_driver("cuFuncGetParamInfo", handle, 0, action=action)
        return Function(name, handle, shared, argument_bytes=size, owner=self)

    def occupancy(self, name: str, block: int, *, shared: int = 0) -> int:
        """Return the number of blocks of `block` threads that fit on one SM.

        Each block uses `shared` bytes of dynamic shared memory.

        Raises DriverError or OutOfOrder.
        """
        handle = self.function(name, shared=shared).handle
        action = f"querying the occupancy of {name!r} ({block} threads, {shared} bytes per block)"
        query = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(call_driver(query, handle, block, shared, action=action))

    def get_max_active_clusters(self, name: str, block: int, cluster: int) -> int:
        """Return the number of clusters of `cluster` blocks that can run concurrently.

        Blocks have `block` threads. Returns 0 if the GPU does not support such clusters. Raises
        DriverError or OutOfOrder.
        """
        handle, cuda = self.function(name).handle, load_driver()
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.attrs, config.numAttrs = [build_cluster_attribute(cuda, cluster)], 1
        status, count = cuda.cuOccupancyMaxActiveClusters(handle, config)
        if status == cuda.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE:
            return 0
        if int(status) != 0:
            raise DriverError(
                f"querying active clusters of {cluster} x {block} threads of {name!r} failed: "
                f"{describe_status(status)}"
            )
        return int(count)

    def global_bytes(self, name: str) -> bytes:
        """Copy a `__device__` or `__constant__` variable without waiting for kernels.

        The copy uses a new non-blocking stream: use of the legacy default stream is an error while
        a stream that blocks with it is captured. Raises DriverError or OutOfOrder.
        """
        self._check_loaded()
        action = f"reading variable {name!r} of {self.name!r}"
        address, size = call_driver(
            "cuModuleGetGlobal", self._code.module, name.encode(), action=action
        )
        content = bytearray(size)
        with relaxed_capture():
            flags = load_driver().CUstream_flags.CU_STREAM_NON_BLOCKING
            stream = call_driver("cuStreamCreate", flags, action=action)
            try:
                call_driver("cuMemcpyDtoHAsync", content, address, size, stream, action=action)
                call_driver("cuStreamSynchronize", stream, action=action)
            finally:
                call_driver("cuStreamDestroy", stream, action=action)
        return bytes(content)

    def unload(self, after: int | None = None) -> None:
        """Unload the module; its functions must not be launched again. Idempotent.

        Waits until the GPU has finished all its work, graphs included. Any thread may call it at
        any time, also during captures.

        Args:
            after: Another CUstream to wait for, unless it is being captured.

        Raises:
            DriverError: a step failed, for example because of an earlier kernel. All steps have
                been tried.
        """
        self._handles.clear()
        self._shared.clear()
        self._code.free(after)

    def _load_function(self, name: str) -> Any:
        self._check_loaded()
        if name not in self._handles:
            action = f"loading kernel {name!r} of {self.name!r}"
            with relaxed_capture():
                module = self._code.module
                handle = call_driver("cuModuleGetFunction", module, name.encode(), action=action)
                call_driver("cuFuncLoad", handle, action=action)
            self._handles[name] = handle
        return self._handles[name]

    def _check_loaded(self) -> None:
        if self._code.module is None:
            raise OutOfOrder(f"module {self.name!r} was unloaded; load it again to use it")


class _Code:
    """Loaded code of a CudaModule, freed by a finalizer when the module is collected.

    Permanent code needs no fence (`weft.cuda.driver.allocate_fence`) to wait for its kernels.
    """

    def __init__(self, image: bytes, context: Any, *, name: str, permanent: bool) -> None:
        self._name, self._context, self._owner = name, context, os.getpid()
        action = f"loading {name!r} ({len(image)} bytes)"
        with relaxed_capture():
            self._fence = None if permanent else allocate_fence()
            try:
                self.module: Any = call_driver("cuModuleLoadData", image, action=action)
            except DriverError:
                self._wait_for_all()
                raise

    def free(self, after: int | None = None) -> None:
        """Unload the module; see CudaModule.unload.

        Does nothing in a forked child, because the driver's state belongs to the parent.
        """
        module, self.module = self.module, None
        if module is None or os.getpid() != self._owner:
            return
        action = f"unloading {self._name!r}"
        with relaxed_capture(), contextlib.ExitStack() as stack:
            call_driver("cuCtxPushCurrent", self._context, action=action)
            stack.callback(call_driver, "cuCtxPopCurrent", action=action)
            stack.callback(call_driver, "cuModuleUnload", module, action=action)
            stack.callback(self._wait_for_all)
            if after is not None:
                self._wait_for(load_driver().CUstream(after))

    def _wait_for_all(self) -> None:
        memory, self._fence = self._fence, None
        if memory is not None:
            call_driver("cuMemFree", memory, action=f"waiting for the kernels of {self._name!r}")

    def _wait_for(self, stream: Any) -> None:
        """Wait for a stream unless it is being captured: the wait would invalidate the capture.

        For the default stream, the driver reports whether a stream that blocks with it is captured.
        """
        cuda, action = load_driver(), f"waiting for the kernels of {self._name!r}"
        status, capturing = cuda.cuStreamIsCapturing(stream)
        if status == cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
            return
        if int(status) != 0:
            raise DriverError(f"{action}: {describe_status(status)}")
        if capturing == cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            call_driver("cuStreamSynchronize", stream, action=action)


def require_context(action: str) -> Any:
    """Return this thread's current CUDA context, usually that of torch.

    Raises:
        DriverError: there is no current context or no NVIDIA driver.
    """
    call_driver("cuInit", 0, action=action)
    context = call_driver("cuCtxGetCurrent", action=action)
    if int(context) == 0:
        raise DriverError(
            f"{action}: this thread has no current CUDA context; let torch create one first, for "
            "example with torch.zeros(1, device='cuda')"
        )
    return context


def current_arch() -> str:
    """Return the architecture of the current context's GPU, for `compile_cubin`: `"sm_90a"`.

    Raises DriverError without a current context.
    """
    require_context("querying the GPU's architecture")
    major = _get_device_attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR")
    minor = _get_device_attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR")
    # From Hopper on, "a" enables architecture-specific instructions (wgmma, tcgen05).
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def _get_device_attribute(name: str) -> int:
    which = getattr(load_driver().CUdevice_attribute, name)
    return int(
        call_driver("cuDeviceGetAttribute", which, call_driver("cuCtxGetDevice"), action=name)
    )
