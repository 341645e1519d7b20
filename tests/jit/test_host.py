# SPDX-License-Identifier: Apache-2.0
"""The system's C++ compiler: libraries, and what is said when it is not there."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.errors import CompileError, InvalidArgument, SetupError
from weft.jit import host
from weft.jit.cache import Cache

ADD = 'extern "C" int add(int a, int b) { return a + b + EXTRA; }\n'

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is installed"
)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def fresh_memory() -> Iterator[None]:
    host.compiler_identity.cache_clear()
    yield
    host.compiler_identity.cache_clear()


@needs_compiler
def test_library_is_compiled_and_called(cache: Cache) -> None:
    library = host.compile_shared(ADD, name="add", options=["-DEXTRA=1"], cache=cache)
    assert library.add(2, 3) == 6
    (entry,) = cache.entries()
    assert (entry.name, entry.kind) == ("add", "c++")


@needs_compiler
def test_second_compile_comes_from_the_cache(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    host.compile_shared(ADD, name="add", options=["-DEXTRA=1"], cache=cache)

    def refuse(*_: object, **__: object) -> bytes:
        raise AssertionError("compiled again")

    monkeypatch.setattr(host, "_build", refuse)
    assert host.compile_shared(ADD, name="add", options=["-DEXTRA=1"], cache=cache).add(1, 1) == 3
    changes: list[dict[str, Any]] = [
        {"options": ["-DEXTRA=2"]},
        {"options": ["-DEXTRA=1", "-O1"]},
    ]
    for change in changes:
        with pytest.raises(AssertionError, match="compiled again"):
            host.compile_shared(ADD, name="add", **change, cache=cache)
    for asked in ("cpu_identity", "compiler_identity"):
        with monkeypatch.context() as patch:
            patch.setattr(host, asked, lambda *_: "another")
            with pytest.raises(AssertionError, match="compiled again"):
                host.compile_shared(ADD, name="add", options=["-DEXTRA=1"], cache=cache)


@needs_compiler
def test_native_code_only_where_the_cpu_is_known(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, ...]] = []

    def record(entry: str, *, flags: tuple[str, ...], **_: object) -> bytes:
        seen.append(flags)
        return b""

    monkeypatch.setattr(host, "_build", record)
    for cpu in ("some cpu", None):
        monkeypatch.setattr(host, "cpu_identity", lambda cpu=cpu: cpu)
        host.compile_code("int x;", name="nothing", options=(), cache=cache)
    assert ["-march=native" in flags for flags in seen] == [True, False]


@needs_compiler
def test_error_shows_entry_and_log(cache: Cache) -> None:
    with pytest.raises(CompileError) as caught:
        host.compile_shared("int f() {\n    return undeclared;\n}\n", name="broken", cache=cache)
    text = str(caught.value)
    assert "refused 'broken'" in text
    assert "   2 |     return undeclared;" in text
    assert "broken.cpp:2:12: error:" in text
    assert "-std=c++20" in text
    assert cache.entries() == []


@needs_compiler
def test_warnings_are_errors(cache: Cache) -> None:
    with pytest.raises(CompileError, match="unused"):
        host.compile_shared("void f() { int unused; }\n", name="warned", cache=cache)


@needs_compiler
def test_library_that_cannot_be_loaded_is_explained(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> ctypes.CDLL:
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(CompileError, match="cannot be loaded from memory.*memfd"):
        host.compile_shared(ADD, name="add", options=["-DEXTRA=0"], cache=cache)


@needs_compiler
@pytest.mark.parametrize("size", [0, 500, -1])
def test_cut_library_is_compiled_again(cache: Cache, size: int) -> None:
    code = ADD.replace("EXTRA", f"{1000 + size}")  # a library that this process has not loaded
    host.compile_shared(code, name="add", cache=cache)
    host._loaded.clear()
    (path,) = cache.path.glob("*.data")
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    assert host.compile_shared(code, name="add", cache=cache).add(1, 1) == 1002 + size


@needs_compiler
def test_scratch_that_others_could_exchange_is_refused(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    with pytest.raises(SetupError, match=r"shared has mode 0777.*set TMPDIR"):
        host.compile_shared(ADD, name="add", options=["-DEXTRA=7"], cache=cache)


def test_missing_compiler(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match=r"none of c\+\+, g\+\+, clang\+\+.*apt install g\+\+"):
        host.compile_shared(ADD, name="add", cache=cache)


def test_cxx_that_does_not_exist(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(CompileError, match="CXX is 'no-such-compiler -m64', which is not install"):
        host.compile_shared(ADD, name="add", cache=cache)


def test_cxx_comes_first_then_the_known_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for name in ("clang++", "g++", "c++", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o700)
        if name != "mine":
            assert host.find_compiler() == (str(tmp_path / name),)
    monkeypatch.setenv("CXX", "mine -stdlib=libc++")
    assert host.find_compiler() == (str(tmp_path / "mine"), "-stdlib=libc++")


def test_compiler_that_cannot_be_asked(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_memory: None
) -> None:
    broken = tmp_path / "broken++"
    broken.write_text("#!/bin/sh\necho no license >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(CompileError, match="status 3: no license"):
        host.compile_shared(ADD, name="add", cache=cache)


def test_compiler_that_hangs_is_stopped() -> None:
    with pytest.raises(CompileError, match=r"did not end within 0.1 s"):
        host._run(("sleep", "60"), timeout=0.1, cwd=None)


def test_bad_name_is_refused(cache: Cache) -> None:
    with pytest.raises(InvalidArgument, match="cannot name a file"):
        host.compile_shared(ADD, name="../add", cache=cache)
