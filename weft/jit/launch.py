# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels with one struct argument, each by a single driver call."""

from __future__ import annotations

import ctypes
from typing import Any, NoReturn

from weft.cuda.driver import describe_status, load_driver
from weft.errors import DriverError, InvalidArgument
from weft.jit.module import Function, build_cluster_attribute

_THREAD_LIMIT = 1024  # threads of a block, on every GPU so far


class Launcher:
    """Launch one kernel with a struct of arguments.

    The constructor prepares all data that is constant between calls: the launch configuration, a
    private copy of the struct and the array of pointers that the driver reads. A call copies the
    struct and calls the driver, which copies it again before the call returns. Calls must not
    overlap: each thread needs its own launcher.

    Args:
        function: Kernel to launch; its module must stay loaded.
        struct: ctypes mirror of the kernel's only argument.
        use_pdl: Whether the kernel may start before the previous one in its stream has finished
            (programmatic dependent launch). The kernel must then synchronise itself.
        cluster: Cluster size in x; the grid must be a multiple of it.

    Raises:
        InvalidArgument: the struct and the kernel's argument have different sizes.
        DriverError: cuda.bindings is missing.
    """

    __slots__ = (
        "_address",
        "_config",
        "_enter",
        "_handle",
        "_last",
        "_params",
        "_params_address",
        "_size",
        "_struct",
        "_values",
        "function",
    )

    def __init__(
        self,
        function: Function,
        struct: type[ctypes.Structure],
        *,
        use_pdl: bool = False,
        cluster: int = 1,
    ) -> None:
        size = ctypes.sizeof(struct)
        if function.argument_bytes != size:
            raise InvalidArgument(
                f"the argument of kernel {function.name!r} has {function.argument_bytes} bytes, "
                f"{struct.__name__} has {size}; pass the mirror of the kernel's argument"
            )
        cuda = load_driver()
        self.function = function
        self._struct = struct
        self._size = size
        self._values = struct()
        self._address = ctypes.addressof(self._values)
        self._params = (ctypes.c_void_p * 1)(self._address)
        self._params_address = ctypes.addressof(self._params)
        self._handle = function.handle
        self._enter = cuda.cuLaunchKernelEx
        self._config = _build_config(cuda, function.shared, use_pdl, cluster)
        self._last: tuple[tuple[int, int, int], int, int] | None = None

    def __call__(
        self, args: ctypes.Structure, grid: tuple[int, int, int], block: int, stream: int
    ) -> None:
        """Launch the kernel asynchronously.

        Args:
            args: Instance of the struct; the caller may modify it after the call.
            grid: Blocks in x, y and z.
            block: Threads per block.
            stream: Address of a CUstream.

        Raises:
            InvalidArgument: `args` has another type, or a size is out of range.
            DriverError: the launch or an earlier kernel failed.
        """
        # Hot path: avoid work here.
        if (grid, block, stream) != self._last:
            self._configure(grid, block, stream)
        if type(args) is not self._struct:
            raise InvalidArgument(
                f"kernel {self.function.name!r} needs a {self._struct.__name__}, "
                f"not a {type(args).__name__}"
            )
        ctypes.memmove(self._address, ctypes.addressof(args), self._size)
        status = self._enter(self._config, self._handle, self._params_address, 0)[0]
        if status != 0:
            self._raise_error(status, grid, block, stream)

    def _configure(self, grid: tuple[int, int, int], block: int, stream: int) -> None:
        name = self.function.name
        if len(grid) != 3 or min(grid) < 1:
            raise InvalidArgument(f"grid of {name!r} is {grid}; pass three numbers of at least 1")
        if not 1 <= block <= _THREAD_LIMIT:
            raise InvalidArgument(
                f"block of {name!r} is {block}; pass 1 to {_THREAD_LIMIT} threads"
            )
        self._last = None  # until the configuration is complete
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.hStream = load_driver().CUstream(stream)
        self._last = (grid, block, stream)

    def _raise_error(
        self, status: Any, grid: tuple[int, int, int], block: int, stream: int
    ) -> NoReturn:
        raise DriverError(
            f"launching {self.function.name!r} with grid {grid}, block {block}, "
            f"{self.function.shared} bytes of dynamic shared memory, {self._size} bytes of "
            f"arguments on stream {stream:#x}: {describe_status(status)}"
        )


def _build_config(cuda: Any, shared: int, use_pdl: bool, cluster: int) -> Any:
    """Create a CUlaunchConfig with the fields that are constant between calls."""
    attributes = []
    if use_pdl:
        attribute = cuda.CUlaunchAttribute()
        which = cuda.CUlaunchAttributeID
        attribute.id = which.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cluster > 1:
        attributes.append(build_cluster_attribute(cuda, cluster))
    config = cuda.CUlaunchConfig()
    config.sharedMemBytes = shared
    if attributes:
        config.attrs = attributes
        config.numAttrs = len(attributes)
    return config
