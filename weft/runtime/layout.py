"""Proof that Python's mirrors of what lies in a share are those of the compiled entry."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from weft.errors import LayoutMismatch
from weft.memory.header import ABI

LINE = 128  # bytes: what the parts of a share are aligned to


def up(size: int, unit: int = LINE) -> int:
    return -(-size // unit) * unit


def struct_numbers(mirrors: Sequence[type[ctypes.Structure]]) -> list[tuple[str, int]]:
    """The numbers of mirrored structs, as every layout table begins with them."""
    rows: list[tuple[str, int]] = [("abi", ABI)]
    for struct in mirrors:
        rows.append((f"sizeof({struct.__name__})", ctypes.sizeof(struct)))
        rows += [
            (f"{struct.__name__}.{field[0]}", getattr(struct, field[0]).offset)
            for field in struct._fields_
            if not field[0].startswith("_pad")
        ]
    return rows


def compare(expected: list[tuple[str, int]], theirs: Sequence[int], whose: str) -> None:
    """Raise LayoutMismatch naming the first number on which Python and C++ differ."""
    if len(theirs) != len(expected):
        raise LayoutMismatch(
            f"{whose} tells {len(theirs)} layout numbers, Python expects {len(expected)}: "
            "reinstall weft and run `weft cache clear`"
        )
    for (name, ours), other in zip(expected, theirs, strict=True):
        if ours != other:
            raise LayoutMismatch(
                f"{name}: Python says {ours}, {whose} says {other}; "
                "reinstall weft and run `weft cache clear`"
            )
