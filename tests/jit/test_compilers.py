# SPDX-License-Identifier: Apache-2.0
"""The system's C++ compiler and NVRTC: results, cached entries and refusals."""

import ctypes
import importlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from weft.errors import CompileError, InvalidArgument, SetupError, WeftError
from weft.jit import host, nvrtc, source
from weft.jit.cache import Cache

ADD = 'extern "C" int add(int a, int b) { return a + b + VALUE; }\n'
FILL = """\
struct Args { int* x; int n; };
extern "C" __global__ void fill(const __grid_constant__ Args a) {
    if (threadIdx.x < unsigned(a.n)) a.x[threadIdx.x] = VALUE;
}
extern "C" __device__ const unsigned long long args_bytes = sizeof(Args);
"""


def add(cache: Cache, source: str = ADD, **options: Any) -> ctypes.CDLL:
    return host.compile_shared(source, **{"name": "add", "options": ["-DVALUE=1"], **options},
                               cache=cache)  # fmt: skip


def fill(cache: Cache, source: str = FILL, **options: Any) -> bytes:
    kwargs = {"name": "fill", "arch": "sm_90a", "options": ["-DVALUE=7"], **options}
    return nvrtc.compile_cubin(source, **kwargs, cache=cache)


# `build` compiles; `identities`, the options and `arch` are in the key.
HOST = SimpleNamespace(
    compile=add, module=host, build="_build", identities=("cpu_identity", "compiler_identity"),
    options=({"options": ["-DVALUE=2"]}, {"options": ["-DVALUE=1", "-O1"]}),
    broken="int f() {\n    return undeclared;\n}\n",
    words=("failed to compile 'add'", "   2 |     return undeclared;", "add.cpp:2:12: error:",
           "-std=c++20"),
)  # fmt: skip
NVRTC = SimpleNamespace(
    compile=fill, module=nvrtc, build="_compile", identities=("nvrtc_version",),
    options=({"options": ["-DVALUE=8"]}, {"arch": "sm_100a"},
             {"options": ["-DVALUE=7", "-lineinfo"]}),
    broken='extern "C" __global__ void fill() {\n    undeclared = 1;\n}\n',
    words=("failed to compile 'fill'", "   2 |     undeclared = 1;", "--gpu-architecture=sm_90a",
           'fill.cu(2): error: identifier "undeclared" is undefined'),
)  # fmt: skip


def explain_missing_nvrtc() -> str:
    try:
        nvrtc.nvrtc_version()
    except CompileError as error:
        return str(error)
    return ""


needs_nvrtc = pytest.mark.skipif(bool(explain_missing_nvrtc()), reason=explain_missing_nvrtc())
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is installed"
)
BOTH = pytest.mark.parametrize(
    "compiler",
    [pytest.param(HOST, marks=needs_compiler), pytest.param(NVRTC, marks=needs_nvrtc)],
    ids=["host", "nvrtc"],
)


@pytest.fixture
def fresh_memory() -> Iterator[None]:
    """Clear the per-process caches of compiler lookups around a test."""
    asked = (host.compiler_identity, nvrtc._load_bindings, nvrtc.nvrtc_version)
    for each in asked:
        each.cache_clear()
    yield
    for each in asked:
        each.cache_clear()


def refuses(kind: type[WeftError], words: str, use: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words):
        use()


@needs_compiler
def test_library_is_compiled_and_called(cache: Cache) -> None:
    assert add(cache).add(2, 3) == 6
    (entry,) = cache.entries()
    assert (entry.name, entry.kind) == ("add", "c++")
    refuses(CompileError, "unused", lambda: add(cache, "void f() { int unused; }\n"))


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_kernels_compile_without_a_gpu(cache: Cache, arch: str) -> None:
    cubin = fill(cache, arch=arch)
    assert cubin.startswith(b"\x7fELF")
    assert b"fill" in cubin
    assert b"args_bytes" in cubin  # a constant that no kernel reads is still exported
    (entry,) = cache.entries()
    assert (entry.name, entry.kind, entry.arch) == ("fill", "cubin", arch)
    assert entry.bytes == len(cubin)
    # CPython has one object for each bytes of length 1: a log of one byte must not change it.
    assert [bytes([i])[0] for i in range(256)] == list(range(256))


@BOTH
def test_second_compile_comes_from_the_cache(cache, monkeypatch, compiler):
    first = compiler.compile(cache)
    build = Mock(side_effect=AssertionError("compiled again"))
    monkeypatch.setattr(compiler.module, compiler.build, build)
    again = compiler.compile(cache)
    assert again == first or again.add(1, 1) == 3
    for change in compiler.options:
        with pytest.raises(AssertionError, match="compiled again"):
            compiler.compile(cache, **change)
    for identity in compiler.identities:
        with monkeypatch.context() as patch:
            patch.setattr(compiler.module, identity, lambda *_: "another")
            with pytest.raises(AssertionError, match="compiled again"):
                compiler.compile(cache)


@BOTH
def test_error_shows_entry_and_log(cache: Cache, compiler: Any) -> None:
    with pytest.raises(CompileError) as caught:
        compiler.compile(cache, compiler.broken)
    assert [word for word in compiler.words if word not in str(caught.value)] == []
    assert cache.entries() == []


@needs_nvrtc
def test_options_of_kernels(cache: Cache, tmp_path: Path) -> None:
    verbose = ["-DVALUE=7", "--maxrregcount=32", "-lineinfo", "--ptxas-options=--verbose"]
    fill(cache, options=verbose)
    (entry,) = cache.entries()
    log = json.loads(cache.entry_path(entry.key).read_bytes().splitlines()[0])["log"]
    assert "registers" in log
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "value.cuh").write_text("#define VALUE 9\n")
    include = f"#include <value.cuh>\n{FILL}"
    assert fill(cache, include, options=[f"-I{tmp_path}/extra"]).startswith(b"\x7fELF")
    words = r"(?s)sm_77.*invalid value for --gpu-architecture"
    refuses(CompileError, words, lambda: fill(cache, arch="sm_77"))
    for arch in ("compute_90a", "90a", "sm_90a -G", ""):
        with pytest.raises(InvalidArgument, match="real architecture such as 'sm_90a'"):
            fill(cache, arch=arch)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (ModuleNotFoundError("No module named 'cuda'"), r"\[gpu\]'"),
        (RuntimeError("libnvrtc.so.13 not found"), r"\[gpu\]'"),
        ((0, 12, 6), r"NVRTC 12\.6 is too old.*12\.8 or newer"),
    ],
)
def test_absent_or_old_nvrtc_is_explained(cache, answer, text, monkeypatch, fresh_memory):
    ask = Mock(side_effect=[answer])
    binding = Mock(side_effect=answer) if isinstance(answer, ImportError) else Mock()
    binding.return_value.nvrtcVersion = ask
    monkeypatch.setattr(importlib, "import_module", binding)
    refuses(CompileError, text, lambda: fill(cache))


@needs_compiler
@pytest.mark.parametrize("cpu", ["some cpu", None])
def test_native_code_only_where_the_cpu_is_known(cache, monkeypatch, cpu):
    build = Mock(return_value=b"")
    monkeypatch.setattr(host, "_build", build)
    monkeypatch.setattr(host, "cpu_identity", lambda: cpu)
    host.compile_code("int x;", name="nothing", options=(), cache=cache)
    assert ("-march=native" in build.call_args.kwargs["flags"]) == (cpu is not None)


@needs_compiler
def test_build_and_load_failures_are_explained(cache, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", Mock(side_effect=OSError("failed to map segment")))
        words = "cannot be loaded from memory.*memfd"
        refuses(CompileError, words, lambda: add(cache, options=["-DVALUE=0"]))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    words = "shared has mode 0777.*set TMPDIR"
    refuses(SetupError, words, lambda: add(cache, options=["-DVALUE=7"]))
    words = "did not end within 0.1 s"
    run = partial(host._run_command, ("sleep", "60"), timeout=0.1, cwd=None)
    refuses(CompileError, words, run)


def test_a_compiler_is_found_or_its_absence_explained(cache, tmp_path, monkeypatch, fresh_memory):
    def program(name: str, text: str = "") -> str:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o700)
        return str(tmp_path / name)

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = r"none of c\+\+, g\+\+, clang\+\+.*apt install g\+\+"
    refuses(CompileError, words, lambda: add(cache))
    for name in ("clang++", "g++", "c++"):
        assert (program(name),) == host.find_compiler()
    monkeypatch.setenv("CXX", "mine -stdlib=libc++")
    assert (program("mine"), "-stdlib=libc++") == host.find_compiler()
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    words = "CXX is 'no-such-compiler -m64', which is not install"
    refuses(CompileError, words, lambda: add(cache))
    monkeypatch.setenv("CXX", program("broken++", "echo no license >&2\nexit 3\n"))
    refuses(CompileError, "status 3: no license", lambda: add(cache))


def test_header_digest_covers_path_and_content_of_what_entries_include(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "PACKAGE", tmp_path)
    digest = source.header_digest.__wrapped__  # past the once-per-process memory
    seen = [digest()]
    large = "// a line of forty characters, as an example\n" * 5000
    for path, text in (
        ("device/a.cuh", "1"),
        ("device/a.cuh", "2"),
        ("alltoall/cpu.cpp", "1"),
        ("alltoall/deep/b.hpp", "1"),
        ("device/large.cuh", large),
        ("device/large.cuh", large[:-10] + "!" + large[-9:]),
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
        seen.append(digest())
    (tmp_path / "device/a.cuh").rename(tmp_path / "alltoall/a.cuh")
    seen.append(digest())
    assert len(set(seen)) == len(seen)
    for name in ("notes.md", "x.py"):
        (tmp_path / "device" / name).write_text("1")
    assert digest() == seen[-1]


@pytest.mark.parametrize("name", ["", "a/b", "../a", "-o", "a b", "x" * 101])
def test_names_that_cannot_name_a_file_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a valid file name"):
        source.check_name(name)
