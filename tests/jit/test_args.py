"""Struct mirrors are checked against the numbers that C++ exports."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from weft.errors import CompileError, LayoutMismatch
from weft.jit.args import decode, expected, table_source, verify
from weft.jit.cache import Cache
from weft.jit.host import compile_shared

CPP = "struct Args { void* heap[2]; unsigned rank; float scale; unsigned short tail; };\n"
NATIVE = {"sizeof": 32, "heap": 0, "rank": 16, "scale": 20, "tail": 24}


class Args(ctypes.Structure):
    _fields_ = (
        ("heap", ctypes.c_void_p * 2),
        ("rank", ctypes.c_uint32),
        ("scale", ctypes.c_float),
        ("tail", ctypes.c_uint16),
    )


class More(Args):
    _fields_ = (("extra", ctypes.c_uint64),)  # type: ignore[assignment]


def test_expected_lists_size_and_offsets_in_order() -> None:
    assert expected(Args) == NATIVE
    assert list(expected(Args)) == list(NATIVE)
    assert list(expected(More))[-2:] == ["tail", "extra"]


def test_equal_layouts_pass() -> None:
    verify(Args, NATIVE)
    verify(Args, list(NATIVE.values()))


def test_size_is_reported() -> None:
    with pytest.raises(LayoutMismatch, match="Args is 32 bytes long in Python, 40 bytes in C"):
        verify(Args, {**NATIVE, "sizeof": 40})


def test_offset_is_reported_by_field() -> None:
    with pytest.raises(LayoutMismatch) as caught:
        verify(Args, {**NATIVE, "scale": 24})
    assert "Args.scale is at offset 20 in Python, at offset 24 in C++" in str(caught.value)
    assert "rank" not in str(caught.value)


def test_every_difference_is_reported() -> None:
    with pytest.raises(LayoutMismatch, match=r"40 bytes.*Args\.scale.*Args\.tail"):
        verify(Args, [40, 0, 16, 24, 28])


def test_absent_fields_are_reported_by_name() -> None:
    less = {name: number for name, number in NATIVE.items() if name != "tail"}
    with pytest.raises(LayoutMismatch, match=r"Args\.tail is at offset 24 in Python, at no offset"):
        verify(Args, less)
    with pytest.raises(LayoutMismatch, match=r"Args\.new is at no offset \(absent\) in Python"):
        verify(Args, {**NATIVE, "new": 28})
    with pytest.raises(LayoutMismatch, match="of unknown size in C"):
        verify(Args, {name: NATIVE[name] for name in list(NATIVE)[1:]})


def test_another_number_of_fields_is_reported() -> None:
    with pytest.raises(LayoutMismatch, match=r"4 fields in Python, C\+\+ exported 3"):
        verify(Args, [32, 0, 16, 20])


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler is installed")
def test_table_exported_by_cpp(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    source = CPP + table_source(Args, "Args", "args_table", device=False)
    library = compile_shared(source, name="table", cache=cache)
    raw = bytes((ctypes.c_uint64 * len(NATIVE)).in_dll(library, "args_table"))
    assert decode(raw) == tuple(NATIVE.values())
    verify(Args, decode(raw))
    absent = CPP + table_source(More, "Args", "more_table", device=False)
    with pytest.raises(CompileError, match="extra"):
        compile_shared(absent, name="table", cache=cache)


def test_table_for_the_device_is_a_device_variable() -> None:
    assert "__device__ const unsigned long long t[5]" in table_source(Args, "A", "t", device=True)
