# SPDX-License-Identifier: Apache-2.0
"""C++ to a shared library with the system's compiler: the CPU backend's half."""

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
from weft.jit.cache import Cache, key_of, open_private_directory
from weft.jit.source import INCLUDE_ROOT, checked_name, clipped, header_digest, numbered

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-std=c++20",
    "-O2",
    "-g0",
    "-pthread",
    "-fno-strict-aliasing",  # inboxes are bytes that are read as many types
    "-Wall",
    "-Wextra",
    "-Werror",
)
_TIMEOUT = 300.0  # seconds for one compile; cpu.cpp takes about one
_REMEDY = "install g++ or clang++ (Debian, Ubuntu: apt install g++), or set CXX to a C++20 compiler"

_loaded: dict[str, ctypes.CDLL] = {}  # by digest: libraries of this process, which are never closed
_loading = threading.Lock()
_slashes = itertools.count(1)

# One rounding for each operation, as in the kernels: a fused multiply-add has one for two.
HOST_OPTIONS = ("-ffp-contract=off",)


def compile_shared(
    entry: str,
    *,
    name: str,
    options: Sequence[str] = (),
    cache: Cache | None = None,
) -> ctypes.CDLL:
    """Return a generated entry as a loaded library, from the cache if it was compiled before.

    Calls through it release the interpreter lock, so ranks that are threads can wait in it.

    entry: C++20 with `extern "C"` functions; headers are `<weft/device/header.cuh>`.
    name, cache: as in `compile_cubin`.   options: more of the compiler's; the last win.

    Raises InvalidArgument for the name; CompileError without a compiler, where it refuses, or where
    the library cannot be loaded; SetupError where the cache cannot be used.
    """
    options = ("-fPIC", "-shared", *options)
    code = compile_code(entry, name=name, options=options, cache=cache or Cache())
    try:
        return load_library(code, name=name)
    except OSError as error:
        raise CompileError(
            f"{name!r} was compiled to {len(code)} bytes but cannot be loaded from memory: "
            f"{error}; look whether a security policy (SELinux, vm.memfd_noexec=2) forbids code in "
            "a memfd, and whether the compiler that CXX names is for this machine"
        ) from error


def load_library(code: bytes, *, name: str) -> ctypes.CDLL:
    """Load a shared library from its bytes. Raises OSError.

    The bytes that were checked are the bytes that run: they are loaded from memory, and no file is
    opened a second time. Equal bytes are loaded once.
    """
    digest = hashlib.sha256(code).hexdigest()
    with _loading:
        if digest not in _loaded:
            fd = os.memfd_create(f"weft-{name}", os.MFD_CLOEXEC)
            with os.fdopen(fd, "wb") as file:
                file.write(code)
                file.flush()
                # dlopen() takes equal paths for one library, and descriptors are used again: the
                # slashes tell this library from those before it.
                path = f"/proc/self/fd{'/' * next(_slashes)}{fd}"
                _loaded[digest] = ctypes.CDLL(path)
        # An object of its own for each caller, who sets the types of its functions.
        return ctypes.CDLL(None, handle=_loaded[digest]._handle)


def compile_code(entry: str, *, name: str, options: Sequence[str], cache: Cache) -> bytes:
    """Return the bytes that the compiler makes of an entry, with these options.

    Raises InvalidArgument, CompileError, SetupError.
    """
    checked_name(name)
    command = find_compiler()
    identity = compiler_identity(command)
    cpu = cpu_identity()
    flags = (*(("-march=native",) if cpu else ()), *_FLAGS, *options)
    key = key_of(
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

    Raises CompileError where it is not installed.
    """
    asked = os.environ.get("CXX", "")
    try:
        chosen = shlex.split(asked)
    except ValueError as error:
        raise CompileError(f"CXX is {asked!r}, which is no command: {error}; {_REMEDY}") from error
    if chosen:
        found = shutil.which(chosen[0])
        if found is None:
            raise CompileError(f"CXX is {shlex.join(chosen)!r}, which is not installed; {_REMEDY}")
        return (found, *chosen[1:])
    for candidate in _COMPILERS:
        if found := shutil.which(candidate):
            return (found,)
    raise CompileError(f"no C++ compiler: none of {', '.join(_COMPILERS)} is in PATH; {_REMEDY}")


@functools.cache
def compiler_identity(command: tuple[str, ...]) -> str:
    """Return the command, the first line of its `--version` and this machine's architecture.

    Raises CompileError where it does not answer.
    """
    result = _run((*command, "--version"), timeout=30.0, cwd=None)
    if result.returncode != 0 or not result.stdout.strip():
        raise CompileError(
            f"{shlex.join(command)} --version failed with status {result.returncode}: "
            f"{clipped(result.stdout + result.stderr)}; {_REMEDY}"
        )
    return f"{shlex.join(command)}: {result.stdout.splitlines()[0]}, {platform.machine()}"


@functools.cache
def cpu_identity() -> str | None:
    """Return model and a digest of the features of this CPU, or None if it will not say.

    Code made with `-march=native` may not run on another CPU, and caches travel with home
    directories, so the key of such code holds this.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    models, features = set(), set()
    for line in text.splitlines():
        label, _, value = line.partition(":")
        match label.strip():
            case "model name" | "CPU implementer" | "CPU variant" | "CPU part" as which:
                models.add(f"{which}={value.strip()}")
            case "flags" | "Features":
                features.update(value.split())
    if not models or not features:
        return None
    digest = hashlib.sha256(" ".join(sorted(features)).encode()).hexdigest()
    return f"{', '.join(sorted(models))}; features {digest[:16]}"


def _build(entry: str, *, name: str, command: Sequence[str], flags: Sequence[str]) -> bytes:
    """Run the compiler in a directory of its own and return what it made."""
    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
        # Where others could exchange the folder (TMPDIR), they could exchange what is compiled.
        purpose = "code that is compiled in it would be run"
        os.close(
            open_private_directory(Path(scratch).resolve(), purpose=purpose, variable="TMPDIR")
        )
        output = Path(scratch, "out")
        file = f"{name}.cpp"  # a short relative name, so that the log reads `dispatch.cpp:3:5`
        Path(scratch, file).write_text(entry)
        # Options after the file: libraries among them must come after what needs them.
        full = (*command, f"-I{INCLUDE_ROOT}", "-o", str(output), file, *flags)
        result = _run(full, timeout=_TIMEOUT, cwd=scratch)
        if result.returncode != 0 or not output.is_file():
            raise CompileError(
                f"the C++ compiler refused {name!r} (status {result.returncode})\n"
                f"command: {shlex.join(full)}\n{numbered(entry)}\n"
                f"{clipped(result.stdout + result.stderr)}\n"
                "Fix the line that the log names; weft needs a C++20 compiler (g++ 11 or "
                "clang++ 14 and newer; CXX chooses another)."
            )
        return output.read_bytes()


def _run(
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
            f"{shlex.join(command)} did not end within {timeout:g} s and was killed; "
            "is this machine overloaded, or does CXX wait for input?"
        ) from error
    except OSError as error:
        raise CompileError(f"cannot run {shlex.join(command)}: {error}; {_REMEDY}") from error
