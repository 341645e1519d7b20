"""Proof that a ctypes struct and the C++ struct it mirrors lie alike in memory."""

from __future__ import annotations

import ctypes
import struct as packing
from collections.abc import Mapping, Sequence

from weft.errors import LayoutMismatch

SIZE = "sizeof"  # the name of a table's first number; no C++ field can be called so


def expected(struct: type[ctypes.Structure]) -> dict[str, int]:
    """Return Python's own table of `struct`: its size under `"sizeof"`, then each field's offset.

    All numbers are bytes; fields of a base class come first.
    """
    parents = reversed(struct.__mro__)
    fields = [field[0] for parent in parents for field in vars(parent).get("_fields_", ())]
    return {SIZE: ctypes.sizeof(struct), **{name: getattr(struct, name).offset for name in fields}}


def table_source(
    struct: type[ctypes.Structure], cpp_type: str, symbol: str, *, device: bool
) -> str:
    """Return C++ that exports the table of `cpp_type` as an array of 64-bit numbers.

    The array holds `sizeof(cpp_type)` and the offsets of the fields in the order of `struct`; a
    field that C++ does not have fails to compile.

    Args:
        struct: the Python mirror; names the fields.
        cpp_type: the C++ type, e.g. `"weft::DispatchArgs"`.
        symbol: the array's name, for `CudaModule.global_bytes` or `in_dll`.
        device: True in an entry for NVRTC, False in one for the host.
    """
    fields = list(expected(struct))[1:]
    # NVRTC before 13.4 has no offsetof; its front end has this constant expression instead.
    offset = "__INTADDR__(&(({0}*)0)->{1})" if device else "__builtin_offsetof({0}, {1})"
    numbers = [f"sizeof({cpp_type})", *(offset.format(cpp_type, name) for name in fields)]
    space = "__device__ " if device else ""
    return (
        f'extern "C" {{ extern {space}const unsigned long long {symbol}[{len(numbers)}]; }}\n'
        f"{space}const unsigned long long {symbol}[{len(numbers)}] = {{{', '.join(numbers)}}};\n"
    )


def decode(raw: bytes) -> tuple[int, ...]:
    """Return the numbers in an exported table: unsigned, 64 bits, as the machine orders them."""
    return packing.unpack(f"={len(raw) // 8}Q", raw)


def verify(struct: type[ctypes.Structure], table: Mapping[str, int] | Sequence[int]) -> None:
    """Compare `struct` with numbers that C++ exported.

    Args:
        struct: the Python mirror.
        table: bytes; a mapping with `"sizeof"` and one offset per field, or the same numbers in
            the order of `struct`, as `table_source` exports them.

    Raises:
        LayoutMismatch: naming every field that differs, with both values.
    """
    mirror = expected(struct)
    if isinstance(table, Mapping):
        native = dict(table)
    elif len(table) == len(mirror):
        native = dict(zip(mirror, table, strict=True))
    else:
        raise LayoutMismatch(
            f"{struct.__name__} has {len(mirror) - 1} fields in Python, C++ exported "
            f"{len(table) - 1}; give both the same fields in the same order"
        )
    wrong = [
        _difference(struct.__name__, name, mirror.get(name), native.get(name))
        for name in [*mirror, *(name for name in native if name not in mirror)]
        if mirror.get(name) != native.get(name)
    ]
    if wrong:
        raise LayoutMismatch(
            "; ".join(wrong) + ". Make order and types of the Python mirror those of the C++ struct"
        )


def _difference(struct: str, name: str, python: int | None, cpp: int | None) -> str:
    if name == SIZE:
        return f"{struct} is {_bytes(python)} long in Python, {_bytes(cpp)} in C++"
    return f"{struct}.{name} is at {_place(python)} in Python, at {_place(cpp)} in C++"


def _bytes(number: int | None) -> str:
    return "of unknown size" if number is None else f"{number} bytes"


def _place(number: int | None) -> str:
    return "no offset (absent)" if number is None else f"offset {number}"
