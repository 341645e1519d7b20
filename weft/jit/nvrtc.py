# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ to machine code through NVRTC; needs neither a GPU, a driver nor a toolkit."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Sequence
from typing import Any

from weft.distribution import install_hint
from weft.errors import CompileError, InvalidArgument
from weft.jit.cache import Cache, key_of
from weft.jit.source import INCLUDE_ROOT, checked_name, clipped, header_digest, numbered

# A real architecture, never compute_*: the driver's own compiler must have nothing left to do.
_ARCH = re.compile(r"sm_\d+[af]?")

# Functions that say nothing are for the device: the headers are those of the CPU backend, too.
CUDA_OPTIONS = ("-default-device",)


def compile_cubin(
    entry: str,
    *,
    name: str,
    arch: str,
    options: Sequence[str] = (),
    cache: Cache | None = None,
) -> bytes:
    """Return the cubin of a generated entry, from the cache if it was compiled before.

    entry: CUDA C++20; weft's headers are included as `<weft/alltoall/dispatch.cuh>`.
    name: shown in errors and by the cache's listing.   arch: a real one, e.g. `"sm_90a"`.
    options: more NVRTC options, e.g. `("--maxrregcount=64", "-DNAME=VALUE")`.
    cache: default `Cache()`.

    Raises InvalidArgument for name or arch; CompileError, which shows the entry and the log, where
    NVRTC is missing or refuses; SetupError where the cache cannot be used.
    """
    if not _ARCH.fullmatch(arch):
        raise InvalidArgument(f"arch is {arch!r}; pass a real architecture such as 'sm_90a'")
    checked_name(name)
    # Where weft is installed does not change the code, so the key leaves its include root out.
    meaning = ["--std=c++20", f"--gpu-architecture={arch}", *options]
    flags = [f"-I{INCLUDE_ROOT}", *meaning]
    version = nvrtc_version()
    key = key_of(
        kind="cubin",
        name=name,
        entry=entry,
        headers=header_digest(),
        options=meaning,
        compiler=version,
    )
    meta: dict[str, Any] = {"name": name, "kind": "cubin", "arch": arch, "compiler": version}

    def build() -> bytes:
        cubin, meta["log"] = _compile(entry, name=name, flags=flags)
        return cubin

    return (cache or Cache()).fetch(key, build, meta)


@functools.cache
def nvrtc_version() -> str:
    """Return NVRTC's version, e.g. `"NVRTC 13.0"`.

    Raises CompileError without cuda.bindings or libnvrtc.
    """
    nvrtc = _bindings()
    try:
        answer = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as error:  # the binding looks for libnvrtc at its first call
        raise CompileError(
            f"the NVRTC library was not found: {error}; {install_hint('gpu')}, "
            "or let LD_LIBRARY_PATH name its directory"
        ) from error
    major, minor = _value(nvrtc, answer, "nvrtcVersion")
    if (major, minor) < (12, 8):
        raise CompileError(f"NVRTC {major}.{minor} is too old: weft's headers need 12.8 or newer")
    return f"NVRTC {major}.{minor}"


@functools.cache
def _bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise CompileError(
            f"CUDA kernels need cuda.bindings: {error}; {install_hint('gpu')}"
        ) from error


def _compile(entry: str, *, name: str, flags: Sequence[str]) -> tuple[bytes, str]:
    """Return (cubin, log) of one translation unit."""
    nvrtc = _bindings()
    program = _value(
        nvrtc,
        nvrtc.nvrtcCreateProgram(entry.encode(), f"{name}.cu".encode(), 0, None, None),
        "nvrtcCreateProgram",
    )
    try:
        encoded = [flag.encode() for flag in flags]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        # Room of its own: the bytes object of a single character is shared by the whole process.
        log = bytearray(
            _value(nvrtc, nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
        )
        _value(nvrtc, nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
        text = clipped(log.decode(errors="replace")) if log.strip(b"\0 \n") else ""
        if int(status) != 0:
            raise CompileError(
                f"{nvrtc_version()} refused {name!r} ({_error_text(nvrtc, status)})\n"
                f"options: {' '.join(flags)}\n{numbered(entry)}\n{text}\n"
                "Lines are those of the entry above; fix it or the header that the log names."
            )
        cubin = bytearray(_value(nvrtc, nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize"))
        _value(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return bytes(cubin), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _value(nvrtc: Any, result: tuple[Any, ...], call: str) -> Any:
    status, *values = result
    if int(status) != 0:
        raise CompileError(
            f"{call} failed: {_error_text(nvrtc, status)}; check that cuda-bindings and "
            "nvidia-cuda-nvrtc are of the same CUDA major version"
        )
    if len(values) == 1:
        return values[0]
    return tuple(values)


def _error_text(nvrtc: Any, status: Any) -> str:
    _, text = nvrtc.nvrtcGetErrorString(status)
    return str(text.decode())
