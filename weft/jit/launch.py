# SPDX-License-Identifier: Apache-2.0
"""One kernel, one struct argument, launched again and again at the cost of a driver call."""

from __future__ import annotations

import ctypes
from typing import Any

from weft.errors import DriverError, InvalidArgument
from weft.jit.module import Function, cluster_attribute
from weft.memory.driver import driver, error_text

_THREAD_LIMIT = 1024  # threads of a block, on every GPU so far


class Launcher:
    """Launches one kernel with a struct of arguments.

    Everything that a call does not change is made here once: the launch configuration, a private
    copy of the struct and the array of pointers that the driver reads. A call copies the struct and
    enters the driver, which has taken its own copy when the call returns. Calls must not overlap:
    give each thread a launcher of its own.

    function: the kernel; its module must stay loaded.
    struct: the ctypes mirror of the kernel's one argument.
    programmatic: let the kernel start before the previous one in its stream has ended
        (programmatic dependent launch); it must then wait by itself where it needs to.
    cluster: blocks in x that share a cluster; the grid must be a multiple of it.

    Raises InvalidArgument where struct and kernel argument differ in size, DriverError without
    cuda.bindings.
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
        programmatic: bool = False,
        cluster: int = 1,
    ) -> None:
        size = ctypes.sizeof(struct)
        if function.argument_bytes != size:
            raise InvalidArgument(
                f"kernel {function.name!r} takes {function.argument_bytes} bytes, "
                f"{struct.__name__} has {size}; make the mirror that of the kernel's argument"
            )
        cuda = driver()
        self.function = function
        self._struct = struct
        self._size = size
        self._values = struct()
        self._address = ctypes.addressof(self._values)
        self._params = (ctypes.c_void_p * 1)(self._address)
        self._params_address = ctypes.addressof(self._params)
        self._handle = function.handle
        self._enter = cuda.cuLaunchKernelEx
        self._config = _config(cuda, function.shared, programmatic, cluster)
        self._last: tuple[tuple[int, int, int], int, int] | None = None

    def __call__(
        self, args: ctypes.Structure, grid: tuple[int, int, int], block: int, stream: int
    ) -> None:
        """Launch the kernel; returns before it has run.

        args: an instance of the struct; may be changed as soon as this returns.
        grid: blocks in x, y and z.   block: threads of each.   stream: a CUstream's address.

        Raises InvalidArgument for another type or a size out of range; DriverError where the driver
        refuses, or an earlier kernel failed.
        """
        # This is the path of every call: no more than it needs.
        if (grid, block, stream) != self._last:
            self._shape(grid, block, stream)
        if type(args) is not self._struct:
            raise InvalidArgument(
                f"kernel {self.function.name!r} takes a {self._struct.__name__}, "
                f"not a {type(args).__name__}"
            )
        ctypes.memmove(self._address, ctypes.addressof(args), self._size)
        status = self._enter(self._config, self._handle, self._params_address, 0)[0]
        if status != 0:
            self._fail(status, grid, block, stream)

    def _shape(self, grid: tuple[int, int, int], block: int, stream: int) -> None:
        """Put grid, block and stream into the configuration."""
        name = self.function.name
        if len(grid) != 3 or min(grid) < 1:
            raise InvalidArgument(f"grid of {name!r} is {grid}; pass three counts of at least 1")
        if not 1 <= block <= _THREAD_LIMIT:
            raise InvalidArgument(
                f"block of {name!r} is {block}; pass 1 to {_THREAD_LIMIT} threads"
            )
        self._last = None  # until all of it is in
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.hStream = driver().CUstream(stream)
        self._last = (grid, block, stream)

    def _fail(self, status: Any, grid: tuple[int, int, int], block: int, stream: int) -> None:
        raise DriverError(
            f"launching {self.function.name!r} with grid {grid}, block {block}, "
            f"{self.function.shared} bytes of dynamic shared memory, {self._size} bytes of "
            f"arguments on stream {stream:#x}: {error_text(status)}"
        )


def _config(cuda: Any, shared: int, programmatic: bool, cluster: int) -> Any:
    """Return a CUlaunchConfig with all that does not change from call to call."""
    attributes = []
    if programmatic:
        attribute = cuda.CUlaunchAttribute()
        which = cuda.CUlaunchAttributeID
        attribute.id = which.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cluster > 1:
        attributes.append(cluster_attribute(cuda, cluster))
    config = cuda.CUlaunchConfig()
    config.sharedMemBytes = shared
    if attributes:
        config.attrs = attributes
        config.numAttrs = len(attributes)
    return config
