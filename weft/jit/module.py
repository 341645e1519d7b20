"""Machine code on the current GPU: load a cubin, take its kernels, read its constants back."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weft.errors import DriverError, OutOfOrder
from weft.jit.driver import check, driver
from weft.jit.loaded import Loaded
from weft.memory.driver import relaxed


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel that is loaded and ready to launch; valid until its module is unloaded."""

    name: str
    handle: Any  # CUfunction
    shared: int  # dynamic shared memory of each block, bytes
    argument_bytes: int | None  # size of the one kernel argument; None if the driver cannot say
    owner: object = None  # its module, kept alive with it


class CudaModule:
    """A cubin in the current CUDA context.

    Args:
        image: the cubin, as `compile_cubin` returns it.
        name: for error texts.
        stays: it is never unloaded.

    Raises:
        DriverError: there is no current context, or the driver refused the code.
    """

    def __init__(self, image: bytes, *, name: str, stays: bool = False) -> None:
        self.name = name
        self._driver = driver()
        context = require_context(f"loading {name!r}")
        self._code = Loaded(image, context, name=name, stays=stays)
        # Whoever drops it unclosed has dropped its functions, which hold it. At exit the system
        # frees it.
        if not stays:
            weakref.finalize(self, self._code.free).atexit = False
        # cuFuncLoad and cuFuncGetParamInfo came with CUDA 12.4; an older driver knows neither.
        version = self._call("cuDriverGetVersion", doing="asking the driver's version")
        self._modern = version >= 12040
        self._handles: dict[str, Any] = {}
        self._shared: dict[str, int] = {}  # the most that each kernel was given

    def function(self, name: str, *, shared: int = 0) -> Function:
        """Return a kernel, fully loaded, with leave to use `shared` bytes of dynamic memory.

        Loading is done here and not at the first launch: a lazy load waits until the GPU is idle,
        which it never is while a kernel spins on the flag of a peer that is still loading.

        Args:
            name: the `extern "C"` name.
            shared: dynamic shared memory of each block, bytes; the sum with the kernel's static
                shared memory may be up to 227 KiB on sm_90 and sm_100.

        Raises:
            DriverError: there is no such kernel, or the memory is more than the GPU has.
            OutOfOrder: the module was unloaded.
        """
        handle = self._handle(name)
        if shared > self._shared.get(name, 0):  # never lower what an earlier caller was given
            static = self.attributes(name)["shared_bytes"]
            self._call(
                "cuFuncSetAttribute",
                handle,
                self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                shared,
                doing=f"giving {name!r} {shared} bytes of dynamic shared memory (it has {static} "
                f"static ones; a block may have {self._shared_limit()} in all)",
            )
            self._shared[name] = shared
        size = None
        if self._modern:
            _, size = self._call(
                "cuFuncGetParamInfo", handle, 0, doing=f"asking for the argument of {name!r}"
            )
        return Function(name, handle, shared, argument_bytes=size, owner=self)

    def attributes(self, name: str) -> dict[str, int]:
        """Return what one kernel needs.

        Keys: `registers` and `local_bytes` (stack and spills) of each thread, `shared_bytes`
        (static) of each block, `max_threads` of a block.

        Raises:
            DriverError: there is no such kernel.
            OutOfOrder: the module was unloaded.
        """
        which = self._driver.CUfunction_attribute
        wanted = {
            "registers": which.CU_FUNC_ATTRIBUTE_NUM_REGS,
            "local_bytes": which.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
            "shared_bytes": which.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            "max_threads": which.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
        }
        handle = self._handle(name)
        doing = f"reading the attributes of {name!r}"
        return {
            label: int(self._call("cuFuncGetAttribute", attribute, handle, doing=doing))
            for label, attribute in wanted.items()
        }

    def occupancy(self, name: str, block: int, *, shared: int = 0) -> int:
        """Return how many blocks of `block` threads and `shared` dynamic bytes fit on one SM.

        Raises:
            DriverError: there is no such kernel.
            OutOfOrder: the module was unloaded.
        """
        handle = self.function(name, shared=shared).handle
        return int(
            self._call(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                handle,
                block,
                shared,
                doing=f"occupancy of {name!r} with {block} threads and {shared} bytes a block",
            )
        )

    def resident_clusters(self, name: str, block: int, cluster: int) -> int:
        """Return how many clusters of `cluster` blocks of `block` threads fit on the GPU at once.

        0 where the GPU cannot form such clusters.

        Raises:
            DriverError: there is no such kernel, or the driver refused the question.
            OutOfOrder: the module was unloaded.
        """
        handle = self.function(name).handle
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.attrs, config.numAttrs = [attribute], 1
        status, count = self._driver.cuOccupancyMaxActiveClusters(handle, config)
        if status == self._driver.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE:
            return 0
        return int(
            check((status, count), f"clusters of {cluster} x {block} threads of {name!r} at once")
        )

    def global_bytes(self, name: str) -> bytes:
        """Return a copy of a `__device__` or `__constant__` variable, as kernels have left it that
        have ended; waits for none.

        Raises:
            DriverError: there is no such variable.
            OutOfOrder: the module was unloaded.
        """
        self._check_loaded()
        address, size = self._call(
            "cuModuleGetGlobal",
            self._code.module,
            name.encode(),
            doing=f"finding variable {name!r}",
        )
        content = bytearray(size)
        doing = f"reading variable {name!r}"
        with self.own_stream() as stream:
            self._call("cuMemcpyDtoHAsync", content, address, size, stream, doing=doing)
        return bytes(content)

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[int]:
        """A CUstream that waits for no other; what was put into it has run at the end.

        The default stream would be an error while one that blocks with it is captured.

        Raises:
            DriverError: the driver refused, or a kernel failed.
        """
        doing = f"a stream for {self.name!r}"
        with relaxed():
            flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            stream = self._call("cuStreamCreate", flags, doing=f"making {doing}")
            try:
                yield int(stream)
                self._call("cuStreamSynchronize", stream, doing=f"waiting for {doing}")
            finally:
                self._call("cuStreamDestroy", stream, doing=f"destroying {doing}")

    def unload(self, after: int | None = None) -> None:
        """Remove the code from the GPU; its functions must not be launched again. Idempotent.

        Waits until the GPU has done all its work, graphs included; any thread may call it at any
        moment, whatever is being captured there or elsewhere.

        Args:
            after: a CUstream to wait for beside that, unless it is being captured.

        Raises:
            DriverError: the driver refused, for example because a kernel failed before; every step
                was tried.
        """
        self._handles.clear()
        self._shared.clear()
        self._code.free(after)

    def _handle(self, name: str) -> Any:
        self._check_loaded()
        if name not in self._handles:
            doing = f"loading kernel {name!r} of {self.name!r}"
            with relaxed():
                handle = self._call(
                    "cuModuleGetFunction", self._code.module, name.encode(), doing=doing
                )
                if self._modern:  # on older drivers cuModuleGetFunction has loaded it already
                    self._call("cuFuncLoad", handle, doing=doing)
            self._handles[name] = handle
        return self._handles[name]

    def _check_loaded(self) -> None:
        if self._code.module is None:
            raise OutOfOrder(f"module {self.name!r} was unloaded; load it again to use it")

    def _shared_limit(self) -> int:
        return _device_attribute("CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")

    def _call(self, function: str, *args: Any, doing: str) -> Any:
        return check(getattr(self._driver, function)(*args), f"{doing}: {function}")


def require_context(doing: str) -> Any:
    """Return this thread's current CUDA context, torch's in practice.

    Raises:
        DriverError: it has none, or there is no NVIDIA driver.
    """
    cuda = driver()
    remedy = "first let torch make one, for example with torch.zeros(1, device='cuda')"
    try:
        status, context = cuda.cuCtxGetCurrent()
    except RuntimeError as error:  # the binding looks for libcuda at its first call
        raise DriverError(
            f"{doing}: the NVIDIA driver was not found: {error}; use CPU ranks on this machine"
        ) from error
    if status != cuda.CUresult.CUDA_ERROR_NOT_INITIALIZED:
        check((status,), f"{doing}: cuCtxGetCurrent")
        if int(context) != 0:
            return context
    raise DriverError(f"{doing}: this thread has no current CUDA context; {remedy}")


def current_arch() -> str:
    """Return the architecture of the current context's GPU, for `compile_cubin`: `"sm_90a"`.

    Raises:
        DriverError: there is no current context.
    """
    require_context("asking for the GPU's architecture")
    major = _device_attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR")
    minor = _device_attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR")
    # From Hopper on, "a" opens the instructions that only this architecture has (wgmma, tcgen05).
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def _device_attribute(name: str) -> int:
    cuda = driver()
    device = check(cuda.cuCtxGetDevice(), "cuCtxGetDevice")
    which = getattr(cuda.CUdevice_attribute, name)
    return int(check(cuda.cuDeviceGetAttribute(which, device), f"cuDeviceGetAttribute {name}"))
