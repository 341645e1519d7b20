"""C++ to a shared library with the system's compiler: the CPU backend's half."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from weft.errors import CompileError
from weft.jit.cache import Cache, key_of
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
    path = compile_file(entry, name=name, options=options, cache=cache or Cache())
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(
            f"{name!r} was compiled to {path} but cannot be loaded: {error}; if its directory is "
            "mounted noexec, set WEFT_CACHE to one that is not"
        ) from error


def compile_file(entry: str, *, name: str, options: Sequence[str], cache: Cache) -> Path:
    """Return the file in the cache that the compiler makes of an entry, with these options.

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
    cache.fetch(key, lambda: _build(entry, name=name, command=command, flags=flags), meta)
    return cache.file(key)


def find_compiler() -> tuple[str, ...]:
    """Return the compiler's command: `$CXX` if set, else the first of c++, g++ and clang++.

    Raises CompileError where it is not installed.
    """
    if chosen := shlex.split(os.environ.get("CXX", "")):
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
