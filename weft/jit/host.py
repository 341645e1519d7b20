# SPDX-License-Identifier: Apache-2.0
"""Compilation of C++ to a shared library with the system's compiler, for the CPU backend."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from weft.errors import CompileError
from weft.jit.cache import Cache, build_key, open_private_directory
from weft.jit.source import INCLUDE_ROOT, check_name, header_digest, number_lines, truncate_log

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-std=c++20",
    "-O2",
    "-g0",
    "-pthread",
    "-fno-strict-aliasing",  # inboxes are bytes that are read as several types
    "-Wall",
    "-Wextra",
    "-Werror",
)
_TIMEOUT = 300.0  # seconds for one compile; cpu.cpp takes about one
_REMEDY = "install g++ or clang++ (Debian, Ubuntu: apt install g++), or set CXX to a C++20 compiler"

_loaded: dict[str, ctypes.CDLL] = {}  # libraries of this process by digest; never closed
_loading = threading.Lock()
_slash_counts = itertools.count(1)

# Round after each operation, as the kernels do: a fused multiply-add rounds only once.
HOST_OPTIONS = ("-ffp-contract=off",)


def compile_shared(
    entry: str,
    *,
    name: str,
    options: Sequence[str] = (),
    cache: Cache | None = None,
) -> ctypes.CDLL:
    """Compile a generated entry to a shared library and load it, from the cache if possible.

    Calls of its functions release the GIL, so that ranks that are threads can block in them.

    Args:
        entry: C++20 with `extern "C"` functions; may include `<weft/device/header.cuh>` etc.
        name: Name in errors and in the cache's listing.
        options: Further compiler options; later options take precedence.
        cache: Cache to use. Default: `Cache()`.

    Raises:
        InvalidArgument: the name is invalid.
        CompileError: there is no compiler, the compilation failed, or the library cannot be loaded.
        SetupError: the cache cannot be used.
    """
    options = ("-fPIC", "-shared", *options)
    code = compile_code(entry, name=name, options=options, cache=cache or Cache())
    try:
        return load_library(code, name=name)
    except OSError as error:
        raise CompileError(
            f"{name!r} was compiled to {len(code)} bytes but cannot be loaded from memory: "
            f"{error}; check whether a security policy (SELinux, vm.memfd_noexec=2) forbids to "
            "execute memfds, and whether the compiler in CXX targets this machine"
        ) from error


def load_library(code: bytes, *, name: str) -> ctypes.CDLL:
    """Load a shared library from its bytes. Raises OSError.

    The library is loaded from memory, so that exactly the checked bytes are executed. Equal bytes
    are loaded once.
    """
    digest = hashlib.sha256(code).hexdigest()
    with _loading:
        if digest not in _loaded:
            fd = os.memfd_create(f"weft-{name}", os.MFD_CLOEXEC)
            with os.fdopen(fd, "wb") as file:
                file.write(code)
                file.flush()
                # dlopen() identifies libraries by path, and descriptor numbers are reused: the
                # number of slashes makes the path unique.
                path = f"/proc/self/fd{'/' * next(_slash_counts)}{fd}"
                _loaded[digest] = ctypes.CDLL(path)
        # Each caller gets its own object, because callers set the types of the functions.
        return ctypes.CDLL(None, handle=_loaded[digest]._handle)


def compile_code(entry: str, *, name: str, options: Sequence[str], cache: Cache) -> bytes:
    """Compile an entry and return the output file's bytes, from the cache if possible.

    Raises InvalidArgument, CompileError or SetupError.
    """
    check_name(name)
    command = find_compiler()
    identity = compiler_identity(command)
    cpu = cpu_identity()
    flags = (*(("-march=native",) if cpu else ()), *_FLAGS, *options)
    key = build_key(
        kind="c++",
        name=name,
        entry=entry,
        headers=header_digest(),
        options=flags,
        compiler=identity,
        cpu=cpu or "",
    )
    meta = {"name": name, "kind": "c++", "arch": platform.machine(), "compiler": identity}
    return cache.fetch(key, lambda: _build(entry, name=name, command=command, flags=flags), meta)


def find_compiler() -> tuple[str, ...]:
    """Return the compiler's command: `$CXX` if set, else the first of c++, g++ and clang++.

    Raises:
        CompileError: the compiler is not installed.
    """
    cxx = os.environ.get("CXX", "")
    try:
        command = shlex.split(cxx)
    except ValueError as error:
        raise CompileError(f"CXX is {cxx!r}, which is not a command: {error}; {_REMEDY}") from error
    if command:
        path = shutil.which(command[0])
        if path is None:
            raise CompileError(f"CXX is {shlex.join(command)!r}, which is not installed; {_REMEDY}")
        return (path, *command[1:])
    for candidate in _COMPILERS:
        if path := shutil.which(candidate):
            return (path,)
    raise CompileError(f"no C++ compiler: none of {', '.join(_COMPILERS)} is in PATH; {_REMEDY}")


@functools.cache
def compiler_identity(command: tuple[str, ...]) -> str:
    """Return the command, the first line of its `--version` and this machine's architecture.

    Raises:
        CompileError: `--version` fails.
    """
    result = _run_command((*command, "--version"), timeout=30.0, cwd=None)
    if result.returncode != 0 or not result.stdout.strip():
        raise CompileError(
            f"{shlex.join(command)} --version failed with status {result.returncode}: "
            f"{truncate_log(result.stdout + result.stderr)}; {_REMEDY}"
        )
    return f"{shlex.join(command)}: {result.stdout.splitlines()[0]}, {platform.machine()}"


@functools.cache
def cpu_identity() -> str | None:
    """Return the model and a digest of the features of this CPU, or None if unknown.

    The keys of code compiled with `-march=native` include it, since such code may not run on
    another CPU, and several machines may share the cache in a home directory.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    models, features = set(), set()
    for line in text.splitlines():
        label, _, value = line.partition(":")
        match label.strip():
            case "model name" | "CPU implementer" | "CPU variant" | "CPU part" as key:
                models.add(f"{key}={value.strip()}")
            case "flags" | "Features":
                features.update(value.split())
    if not models or not features:
        return None
    digest = hashlib.sha256(" ".join(sorted(features)).encode()).hexdigest()
    return f"{', '.join(sorted(models))}; features {digest[:16]}"


def _build(entry: str, *, name: str, command: Sequence[str], flags: Sequence[str]) -> bytes:
    """Run the compiler in a temporary directory and return its output."""
    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
        # A user who can replace the directory (TMPDIR) could replace the compiled code.
        purpose = "code that is compiled in it would be executed"
        os.close(
            open_private_directory(Path(scratch).resolve(), purpose=purpose, variable="TMPDIR")
        )
        output = Path(scratch, "out")
        file = f"{name}.cpp"  # a short relative name, so that the log reads `dispatch.cpp:3:5`
        Path(scratch, file).write_text(entry)
        # Options follow the file, because the linker needs libraries after the objects using them.
        full = (*command, f"-I{INCLUDE_ROOT}", "-o", str(output), file, *flags)
        result = _run_command(full, timeout=_TIMEOUT, cwd=scratch)
        if result.returncode != 0 or not output.is_file():
            raise CompileError(
                f"the C++ compiler failed to compile {name!r} (status {result.returncode})\n"
                f"command: {shlex.join(full)}\n{number_lines(entry)}\n"
                f"{truncate_log(result.stdout + result.stderr)}\n"
                "Fix the line that the log names; weft needs a C++20 compiler (g++ 11 or "
                "clang++ 14 and newer; CXX selects another one)."
            )
        return output.read_bytes()


def _run_command(
    command: Sequence[str], *, timeout: float, cwd: str | None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(
            f"{shlex.join(command)} did not end within {timeout:g} s and was killed; check whether "
            "this machine is overloaded, or whether CXX waits for input"
        ) from error
    except OSError as error:
        raise CompileError(f"cannot run {shlex.join(command)}: {error}; {_REMEDY}") from error
