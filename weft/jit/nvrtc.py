# SPDX-License-Identifier: Apache-2.0
"""Compilation of CUDA C++ to cubins with NVRTC, without a GPU, driver or CUDA toolkit."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Sequence
from typing import Any

from weft.distribution import install_hint
from weft.errors import CompileError, InvalidArgument
from weft.jit.cache import Cache, build_key
from weft.jit.source import INCLUDE_ROOT, check_name, header_digest, number_lines, truncate_log

# A real architecture, not compute_*, so that the driver does not compile PTX at load time.
_ARCH = re.compile(r"sm_\d+[af]?")

# Functions without an annotation are device functions: the CPU backend shares the headers.
CUDA_OPTIONS = ("-default-device",)


def compile_cubin(
    entry: str,
    *,
    name: str,
    arch: str,
    options: Sequence[str] = (),
    cache: Cache | None = None,
) -> bytes:
    """Compile a generated entry to a cubin, from the cache if possible.

    Args:
        entry: CUDA C++20; weft's headers are included as `<weft/alltoall/dispatch.cuh>`.
        name: Name in errors and in the cache's listing.
        arch: Real architecture, e.g. `"sm_90a"`.
        options: Further NVRTC options, e.g. `("--maxrregcount=64", "-DNAME=VALUE")`.
        cache: Cache to use. Default: `Cache()`.

    Raises:
        InvalidArgument: the name or arch is invalid.
        CompileError: NVRTC is missing or the compilation failed. Has the entry and the log.
        SetupError: the cache cannot be used.
    """
    if not _ARCH.fullmatch(arch):
        raise InvalidArgument(f"arch is {arch!r}; pass a real architecture such as 'sm_90a'")
    check_name(name)
    # The installation path does not affect the code, so the key excludes the include root.
    key_options = ["--std=c++20", f"--gpu-architecture={arch}", *options]
    flags = [f"-I{INCLUDE_ROOT}", *key_options]
    version = nvrtc_version()
    key = build_key(
        kind="cubin",
        name=name,
        entry=entry,
        headers=header_digest(),
        options=key_options,
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

    Raises:
        CompileError: cuda.bindings or libnvrtc is missing, or NVRTC is too old.
    """
    nvrtc = _load_bindings()
    try:
        result = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as error:  # the binding loads libnvrtc at its first call
        raise CompileError(
            f"the NVRTC library was not found: {error}; {install_hint('gpu')}, "
            "or add its directory to LD_LIBRARY_PATH"
        ) from error
    major, minor = _check_value(nvrtc, result, "nvrtcVersion")
    if (major, minor) < (12, 8):
        raise CompileError(f"NVRTC {major}.{minor} is too old: weft's headers need 12.8 or newer")
    return f"NVRTC {major}.{minor}"


@functools.cache
def _load_bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise CompileError(
            f"CUDA kernels need cuda.bindings: {error}; {install_hint('gpu')}"
        ) from error


def _compile(entry: str, *, name: str, flags: Sequence[str]) -> tuple[bytes, str]:
    """Return (cubin, log) of one translation unit."""
    nvrtc = _load_bindings()
    program = _check_value(
        nvrtc,
        nvrtc.nvrtcCreateProgram(entry.encode(), f"{name}.cu".encode(), 0, None, None),
        "nvrtcCreateProgram",
    )
    try:
        encoded = [flag.encode() for flag in flags]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        # A bytearray, because the interpreter shares bytes objects of a single character.
        log = bytearray(
            _check_value(nvrtc, nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
        )
        _check_value(nvrtc, nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
        text = truncate_log(log.decode(errors="replace")) if log.strip(b"\0 \n") else ""
        if int(status) != 0:
            raise CompileError(
                f"{nvrtc_version()} failed to compile {name!r}: {_describe_status(nvrtc, status)}\n"
                f"options: {' '.join(flags)}\n{number_lines(entry)}\n{text}\n"
                "Line numbers refer to the entry above; fix it or the header that the log names."
            )
        cubin = bytearray(
            _check_value(nvrtc, nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
        )
        _check_value(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return bytes(cubin), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _check_value(nvrtc: Any, result: tuple[Any, ...], call: str) -> Any:
    status, *values = result
    if int(status) != 0:
        raise CompileError(
            f"{call} failed: {_describe_status(nvrtc, status)}; check that cuda-bindings and "
            "nvidia-cuda-nvrtc are of the same CUDA major version"
        )
    if len(values) == 1:
        return values[0]
    return tuple(values)


def _describe_status(nvrtc: Any, status: Any) -> str:
    _, text = nvrtc.nvrtcGetErrorString(status)
    return str(text.decode())
