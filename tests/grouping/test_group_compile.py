# SPDX-License-Identifier: Apache-2.0
"""The kernels of grouping compile for every architecture, keep everything in registers, and agree
with Python on their arguments."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.emulator.machine_code import disassemble
from weft.grouping.config import GroupConfig
from weft.grouping.kernels import cuda_program, results
from weft.jit.cache import Cache
from weft.jit.nvrtc import CUDA_OPTIONS, compile_cubin
from weft.shape import Shape

pytestmark = pytest.mark.slow

DEEPSEEK = Shape(8, 4096, 8, 256, 7168, "bf16", (14336,))
PUSHED = replace(DEEPSEEK, tokens=128, combine="push")
CASES: dict[str, tuple[Shape, GroupConfig]] = {
    "deepseek-v3": (DEEPSEEK, GroupConfig("contiguous", 32, 8 * 4096 * 8, 1)),
    "fp8, masked": (
        Shape(8, 128, 8, 256, 7168, "bf16", (7168, 224)),
        GroupConfig("masked", 32, 1024, 128),
    ),
    "pushed": (PUSHED, GroupConfig("contiguous", 32, 8 * 128 * 8, 16)),
    "fp8 of fp32": (
        replace(PUSHED, combine="push_fp8", dtype="fp32"),
        GroupConfig("masked", 32, 1024, 16),
    ),
    "choices": (replace(PUSHED, combine="gemm_push"), GroupConfig("masked", 32, 1024, 16)),
    "choices, odd": (
        Shape(3, 33, 9, 18, 264, "fp16", (528, 20, 7), combine="gemm_push"),
        GroupConfig("contiguous", 6, 640, 16),
    ),
    "odd rows": (
        Shape(3, 33, 9, 18, 264, "fp16", (528, 20, 7)),
        GroupConfig("contiguous", 6, 640, 16),
    ),
    "one rank holds all": (
        Shape(1, 16, 32, 1024, 512, "fp32", (2048,)),
        GroupConfig("masked", 1024, 16, 1),
    ),
}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_without_spills(name: str, arch: str, tmp_path: Path) -> None:
    cache, (shape, grouping) = Cache(tmp_path), CASES[name]
    sends = shape.combine != "pull"
    program = cuda_program(shape, grouping, sends=sends)
    cubin = compile_cubin(
        program.source,
        name="group",
        arch=arch,
        options=(*CUDA_OPTIONS, "--ptxas-options=-v"),
        cache=cache,
    )
    assert all(program.kernel(name).encode() in cubin for name in program.entry_points)
    (entry,) = tmp_path.rglob("*.data")
    log = entry.read_bytes().partition(b"\n")[0].decode()  # JSON: what is known of the entry
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    assert spills == [("0", "0")] * (2 + len(results(shape, sends))), log


@pytest.mark.parametrize("combine", ["push", "push_fp8", "gemm_push"])
def test_all_rows_of_a_token_are_loaded_before_the_first_is_used(combine: str) -> None:
    shape = replace(PUSHED, combine=combine)
    program = cuda_program(shape, GroupConfig("contiguous", 32, 8192, 1), sends=True)
    cubin = compile_cubin(program.source, name="group", arch="sm_90a", options=CUDA_OPTIONS)
    code = disassemble(cubin).partition(f".text.{program.kernel('send')}:")[2]
    code = code.partition(".text.")[0]
    used = re.search(r"\bSTG\.E\.NA\.128|\bFMUL", code)
    assert used
    assert len(re.findall(r"\bLDG\.E\.NA\.128", code[: used.start()])) == shape.top_k
