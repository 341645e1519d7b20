# SPDX-License-Identifier: Apache-2.0
"""NVRTC: machine code for real architectures on a machine without a GPU."""

from __future__ import annotations

import builtins
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.errors import CompileError, InvalidArgument
from weft.jit import nvrtc
from weft.jit.cache import Cache

KERNEL = """\
struct Args { int* x; int n; };
extern "C" __global__ void fill(const __grid_constant__ Args a) {
    if (threadIdx.x < unsigned(a.n)) a.x[threadIdx.x] = VALUE;
}
extern "C" __device__ const unsigned long long args_bytes = sizeof(Args);
"""


def missing() -> str | None:
    try:
        nvrtc.nvrtc_version()
    except CompileError as error:
        return str(error)
    return None


needs_nvrtc = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def fresh_memory() -> Iterator[None]:
    """The binding and its version are looked up once per process; forget both around a test."""
    nvrtc._bindings.cache_clear()
    nvrtc.nvrtc_version.cache_clear()
    yield
    nvrtc._bindings.cache_clear()
    nvrtc.nvrtc_version.cache_clear()


@needs_nvrtc
def test_a_log_of_one_byte_is_written_nowhere_else(cache: Cache) -> None:
    """CPython has one object for each bytes of length 1: who writes into it changes all of them."""
    nvrtc.compile_cubin(KERNEL, name="fill", arch="sm_90a", options=["-DVALUE=7"], cache=cache)
    assert [bytes([i])[0] for i in range(256)] == list(range(256))


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_compiles_without_a_gpu(cache: Cache, arch: str) -> None:
    cubin = nvrtc.compile_cubin(KERNEL, name="fill", arch=arch, options=["-DVALUE=7"], cache=cache)
    assert cubin.startswith(b"\x7fELF")
    assert b"fill" in cubin
    assert b"args_bytes" in cubin  # a constant that no kernel reads is still exported
    (entry,) = cache.entries()
    assert (entry.name, entry.kind, entry.arch) == ("fill", "cubin", arch)
    assert entry.bytes == len(cubin)


@needs_nvrtc
def test_second_compile_comes_from_the_cache(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    want: dict[str, Any] = {"name": "fill", "arch": "sm_90a", "cache": cache}
    first = nvrtc.compile_cubin(KERNEL, options=["-DVALUE=7"], **want)

    def refuse(*_: object, **__: object) -> tuple[bytes, str]:
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "_compile", refuse)
    assert nvrtc.compile_cubin(KERNEL, options=["-DVALUE=7"], **want) == first
    for change in (
        {"options": ["-DVALUE=8"]},
        {"options": ["-DVALUE=7"], "arch": "sm_100a"},
        {"options": ["-DVALUE=7", "-lineinfo"]},
    ):
        with pytest.raises(AssertionError, match="compiled again"):
            nvrtc.compile_cubin(KERNEL, **{**want, **change})
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: "NVRTC 99.0")
    with pytest.raises(AssertionError, match="compiled again"):
        nvrtc.compile_cubin(KERNEL, options=["-DVALUE=7"], **want)


@needs_nvrtc
def test_extra_options_reach_the_compiler(cache: Cache) -> None:
    nvrtc.compile_cubin(
        KERNEL,
        name="fill",
        arch="sm_90a",
        options=["-DVALUE=7", "--maxrregcount=32", "-lineinfo", "--ptxas-options=--verbose"],
        cache=cache,
    )
    (entry,) = cache.entries()
    log = json.loads(cache.file(entry.key).read_bytes().splitlines()[0])["log"]
    assert "registers" in log


@needs_nvrtc
def test_directories_among_the_options_are_searched(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "value.cuh").write_text("#define VALUE 9\n")
    cubin = nvrtc.compile_cubin(
        f"#include <value.cuh>\n{KERNEL}",
        name="fill",
        arch="sm_90a",
        options=[f"-I{tmp_path}/extra"],
        cache=cache,
    )
    assert cubin.startswith(b"\x7fELF")


@needs_nvrtc
def test_error_shows_entry_and_log(cache: Cache) -> None:
    source = 'extern "C" __global__ void fill() {\n    undeclared = 1;\n}\n'
    with pytest.raises(CompileError) as caught:
        nvrtc.compile_cubin(source, name="fill", arch="sm_90a", cache=cache)
    text = str(caught.value)
    assert "refused 'fill'" in text
    assert "   2 |     undeclared = 1;" in text
    assert 'fill.cu(2): error: identifier "undeclared" is undefined' in text
    assert "--gpu-architecture=sm_90a" in text
    assert cache.entries() == []


@needs_nvrtc
def test_unknown_architecture_is_a_compile_error(cache: Cache) -> None:
    with pytest.raises(CompileError, match=r"(?s)sm_77.*invalid value for --gpu-architecture"):
        nvrtc.compile_cubin(KERNEL, name="fill", arch="sm_77", options=["-DVALUE=7"], cache=cache)


@pytest.mark.parametrize("arch", ["compute_90a", "90a", "sm_90a -G", ""])
def test_only_real_architectures(cache: Cache, arch: str) -> None:
    with pytest.raises(InvalidArgument, match="real architecture such as 'sm_90a'"):
        nvrtc.compile_cubin(KERNEL, name="fill", arch=arch, cache=cache)


def test_absent_binding_is_explained(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, fresh_memory: None
) -> None:
    def absent(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(CompileError, match=r"\[gpu\]'"):
        nvrtc.compile_cubin(KERNEL, name="fill", arch="sm_90a", cache=cache)


class Binding:
    """Enough of cuda.bindings.nvrtc to be asked for its version."""

    def __init__(self, answer: tuple[int, int, int] | Exception) -> None:
        self.answer = answer

    def nvrtcVersion(self) -> tuple[int, int, int]:  # noqa: N802
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (builtins.RuntimeError("libnvrtc.so.13 not found"), r"\[gpu\]'"),
        ((0, 12, 6), r"NVRTC 12\.6 is too old.*12\.8 or newer"),
    ],
)
def test_absent_or_old_library_is_explained(
    answer: tuple[int, int, int] | Exception,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    fresh_memory: None,
) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: Binding(answer))
    with pytest.raises(CompileError, match=text):
        nvrtc.nvrtc_version()
