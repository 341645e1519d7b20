"""Proof that Python's mirrors of what lies in a share are those of the compiled entry."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, ParamSpec, TypeVar

from weft.errors import LayoutMismatch
from weft.memory.header import (
    ABI,
    ErrorRecord,
    Fault,
    Header,
    Mailbox,
    Record,
    Timeline,
)
from weft.runtime.args import Site

P = ParamSpec("P")
G = TypeVar("G")
T = TypeVar("T")
LINE = 128  # bytes: what the parts of a share are aligned to
Numbers = Sequence[tuple[str, int]]  # each by its name
# What every share and every call has, in the order of device/exports.cuh.
COMMON = (ErrorRecord, Mailbox, Record, Timeline, Fault, Header, Site)


def up(size: int, unit: int = LINE) -> int:
    return -(-size // unit) * unit


def vector_bytes(row_bytes: int) -> int:
    """The widest vector that rows of this size are whole numbers of; as in device/copy.cuh."""
    return next(n for n in (16, 8, 4, 2, 1) if row_bytes % n == 0)


def struct_numbers(*mirrors: type[ctypes.Structure]) -> list[tuple[str, int]]:
    """The numbers of mirrored structs, as compiled entries export them."""
    rows: list[tuple[str, int]] = []
    for struct in mirrors:
        rows.append((f"sizeof({struct.__name__})", ctypes.sizeof(struct)))
        rows += [
            (f"{struct.__name__}.{field[0]}", getattr(struct, field[0]).offset)
            for field in struct._fields_
            if not field[0].startswith("_pad")
        ]
    return rows


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


class ShareLayout:
    """Where the parts of a share lie: a Python mirror of a C++ struct.

    Told there, mirrored here, checked always: every compiled entry exports its own numbers. The
    mirror exists so that memory can be sized, and views made, before anything is compiled.
    """

    __slots__ = ()
    structs: ClassVar[tuple[type[ctypes.Structure], ...]] = ()  # that its table holds, with COMMON

    def places(self) -> list[tuple[str, int]]:
        """Where the parts lie: what `weft_measured` of a loaded cubin must hold.

        A compiler's constants and its code can differ: NVRTC 13.0 did, see alltoall/layout.cuh.
        """
        raise NotImplementedError

    def expected(self) -> list[tuple[str, int]]:
        """What `weft_layout` of a compiled entry must hold, in its order."""
        return [("abi", ABI), *struct_numbers(*COMMON, *self.structs), *self.places()]


def compare(expected: Numbers, theirs: Sequence[int], whose: str = "the compiled entry") -> None:
    """Raise LayoutMismatch naming the first number on which Python and C++ differ."""
    if len(theirs) != len(expected):
        raise LayoutMismatch(
            f"{whose} has {len(theirs)} layout numbers, Python expects {len(expected)}: "
            "reinstall weft and run `weft cache clear`"
        )
    for (name, ours), other in zip(expected, theirs, strict=True):
        if ours != other:
            raise LayoutMismatch(
                f"{name}: Python says {ours}, {whose} says {other}; "
                "reinstall weft and run `weft cache clear`"
            )
