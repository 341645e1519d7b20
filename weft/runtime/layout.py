# SPDX-License-Identifier: Apache-2.0
"""Where things are in a share and in an argument struct: told by Python, asserted by C++.

Python sizes memory and makes views before anything is compiled. Every generated source asserts the
same sizes and offsets of the C++ structs, so that a difference is a compile error.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from weft.memory.header import ABI, ErrorRecord, Fault, Record, Site, mirrors

P = ParamSpec("P")
G = TypeVar("G")
T = TypeVar("T")
LINE = 128  # bytes: what the parts of a share are aligned to
Numbers = Sequence[tuple[str, int]]  # C++ expressions and their values
# What every share and every call has.
COMMON = (ErrorRecord, Record, Fault, Site)
# Fields of Header that C++ keeps together, to be read by one 16-byte load.
STATE = {"epoch": "state.epoch", "failed": "state.failed", "rows": "state.rows"}


def up(size: int, unit: int = LINE) -> int:
    """`size` rounded up to whole units."""
    return -(-size // unit) * unit


def vector_bytes(row_bytes: int) -> int:
    """The widest vector that rows of this size are whole numbers of; as in device/copy.cuh."""
    return next(n for n in (16, 8, 4, 2, 1) if row_bytes % n == 0)


def common_assertions(ranks: int) -> str:
    """C++ that compiles only if what every share and call has is laid out as Python has it."""
    structs = (*COMMON, *mirrors(ranks))
    return f"static_assert(weft::abi == {ABI});\n" + assertions(structs)


def assertions(structs: Iterable[type[ctypes.Structure]], numbers: Numbers = ()) -> str:
    """C++ that compiles only if the structs of the same names have these sizes and offsets.

    structs: mirrors of argument structs; fields `_pad...` are not asserted.
    numbers: further expressions, and their values.
    """
    rows = [*numbers]
    for struct in structs:
        name = f"weft::{struct.__name__}"
        rows.append((f"sizeof({name})", ctypes.sizeof(struct)))
        fields = [f[0] for k in reversed(struct.__mro__) for f in vars(k).get("_fields_", ())]
        rows += [
            (offset(name, _member(struct, field)), getattr(struct, field).offset)
            for field in fields
            if not field.startswith("_pad")
        ]
    return "".join(f"static_assert({expression} == {value});\n" for expression, value in rows)


def offset(struct: str, member: str) -> str:
    """The C++ expression for the offset of a member, which may be one of a member."""
    return f"WEFT_OFFSET(weft::{struct.removeprefix('weft::')}, {member})"


def _member(struct: type[ctypes.Structure], field: str) -> str:
    return STATE.get(field, field) if struct.__name__ == "Header" else field


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank. shared: symmetric memory, which peers write.  ordinary: all other."""

    shared: int
    ordinary: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.shared + self.ordinary


def sizes_of(make: Callable[P, G], size: Callable[[G], T], doc: str) -> Callable[P, T]:
    """A function that takes what `make` takes, and returns `size` of what that makes."""

    def memory_bytes(*args: P.args, **kwargs: P.kwargs) -> T:
        return size(make(*args, **kwargs))

    memory_bytes.__doc__ = doc
    returned = inspect.signature(size, eval_str=True).return_annotation
    signature = inspect.signature(make, eval_str=True).replace(return_annotation=returned)
    memory_bytes.__signature__ = signature  # type: ignore[attr-defined]
    return memory_bytes


class ShareConfig(Protocol):
    """What takes memory that is shared."""

    @property
    def share_bytes(self) -> int:
        """Bytes of one rank's share of the heap."""


def share_bytes_of(make: Callable[P, ShareConfig]) -> Callable[P, int]:
    """A function that takes what `make` takes, and returns the bytes of a share."""

    def share_bytes(config: ShareConfig) -> int:
        return config.share_bytes

    doc = """Bytes of symmetric memory that each rank will allocate, before anything is allocated.

    Takes the constructor's sizes, and `ranks`. Raises InvalidArgument as the constructor does.
    """
    return sizes_of(make, share_bytes, doc)
