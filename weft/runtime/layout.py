# SPDX-License-Identifier: Apache-2.0
"""Layout of shares and argument structs: computed in Python, asserted in C++.

Python allocates memory and creates views before anything is compiled. Every generated source
asserts the sizes and offsets of the C++ structs, so that a mismatch is a compile error.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from weft.heap.header import (
    ABI,
    ErrorRecord,
    Fault,
    PeerWaits,
    Record,
    Site,
    WaitTimes,
    header_structs,
)

P = ParamSpec("P")
G = TypeVar("G")
T = TypeVar("T")
LINE = 128  # bytes; alignment of the parts of a share
CppValues = Sequence[tuple[str, int]]  # C++ expressions and their values
# Structs of every share or call.
COMMON_STRUCTS = (ErrorRecord, Record, WaitTimes, PeerWaits, Fault, Site)
# Fields of Header that C++ groups so that one 16-byte load reads them.
STATE_MEMBERS = {"epoch": "state.epoch", "failed": "state.failed", "rows": "state.rows"}


def round_up(size: int, unit: int = LINE) -> int:
    """Return `size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def vector_bytes(row_bytes: int) -> int:
    """Return the largest vector size (at most 16 bytes) that divides a row; see device/copy.cuh."""
    return next(n for n in (16, 8, 4, 2, 1) if row_bytes % n == 0)


def common_static_asserts(ranks: int) -> str:
    """Generate C++ assertions of the layout of the structs of every share and call."""
    structs = (*COMMON_STRUCTS, *header_structs(ranks))
    return f"static_assert(weft::abi == {ABI});\n" + static_asserts(structs)


def static_asserts(structs: Iterable[type[ctypes.Structure]], numbers: CppValues = ()) -> str:
    """Generate C++ assertions of the sizes and offsets of structs with the same names.

    Args:
        structs: Mirrors of C++ structs; fields `_pad...` are not asserted.
        numbers: Further C++ expressions and their values.
    """
    rows = [*numbers]
    for struct in structs:
        name = f"weft::{struct.__name__}"
        rows.append((f"sizeof({name})", ctypes.sizeof(struct)))
        fields = [f[0] for k in reversed(struct.__mro__) for f in vars(k).get("_fields_", ())]
        members = STATE_MEMBERS if struct.__name__ == "Header" else {}
        rows += [
            (cpp_offset(name, members.get(field, field)), getattr(struct, field).offset)
            for field in fields
            if not field.startswith("_pad")
        ]
    return "".join(f"static_assert({expression} == {value});\n" for expression, value in rows)


def cpp_offset(struct: str, member: str) -> str:
    """Return the C++ expression for the offset of a member, which may be nested (`a.b`)."""
    return f"WEFT_OFFSET(weft::{struct.removeprefix('weft::')}, {member})"


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one rank in bytes.

    Attributes:
        shared: Symmetric memory, which peers can access.
        ordinary: All other memory.
    """

    shared: int
    ordinary: int

    @property
    def total(self) -> int:
        """Sum of both."""
        return self.shared + self.ordinary


def build_size_function(make: Callable[P, G], size: Callable[[G], T], doc: str) -> Callable[P, T]:
    """Build a function with the parameters of `make` that returns `size` of its result."""

    def memory_bytes(*args: P.args, **kwargs: P.kwargs) -> T:
        return size(make(*args, **kwargs))

    memory_bytes.__doc__ = doc
    result = inspect.signature(size, eval_str=True).return_annotation
    signature = inspect.signature(make, eval_str=True).replace(return_annotation=result)
    memory_bytes.__signature__ = signature  # type: ignore[attr-defined]
    return memory_bytes


class ShareConfig(Protocol):
    """A config that determines the size of a share."""

    @property
    def share_bytes(self) -> int:
        """Bytes of one rank's share of the heap."""


def build_share_bytes_function(
    spec: Callable[P, G], configure: Callable[[G], ShareConfig]
) -> Callable[P, int]:
    """Build a function with the parameters of `spec` that returns the bytes of a share."""

    def share_bytes(parameters: G) -> int:
        return configure(parameters).share_bytes

    doc = """Return the bytes of symmetric memory that each rank will allocate.

    Accepts the sizes of the constructor, and `ranks`. Allocates nothing.

    Raises:
        InvalidArgument: as the constructor.
    """
    return build_size_function(spec, share_bytes, doc)
