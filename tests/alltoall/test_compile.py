# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every architecture without a GPU; a refusal shows the entry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.alltoall.kernels import cuda_program
from weft.errors import CompileError
from weft.shape import Shape

pytestmark = pytest.mark.slow

SHAPES = {
    "deepseek-v3": Shape(8, 2048, 8, 256, 7168, "bf16", (14336,)),
    "fp8 out": Shape(8, 2048, 8, 256, 7168, "bf16", (7168, 224)),
    "gpt-oss-120b": Shape(4, 512, 4, 128, 2880, "bf16", (5760,)),
    "three ranks, odd rows": Shape(3, 33, 9, 18, 264, "fp16", (528, 20, 7)),
    "pushed": Shape(8, 128, 8, 256, 7168, "bf16", (14336,), combine="push"),
    "fp8 both ways": Shape(
        8, 128, 8, 256, 7168, "bf16", (7168, 224), combine="push_fp8", quant="fp8"
    ),
    "mxfp8 of fp32": Shape(8, 128, 8, 256, 7168, "fp32", (7168, 224), quant="mxfp8"),
    "choices": Shape(8, 128, 8, 256, 7168, "bf16", (14336,), combine="gemm_push"),
    "choices, odd": Shape(3, 33, 9, 18, 264, "fp16", (528, 20, 7), combine="gemm_push", stats=3),
    "32 ranks, mapped": Shape(32, 16, 32, 61, 512, "fp32", (2048,), mapped=True),
    "statistics, pulled": Shape(8, 2048, 8, 256, 7168, "bf16", (14336,), stats=256),
    "statistics, pushed": Shape(
        8, 128, 8, 256, 7168, "bf16", (14336,), combine="push_fp8", stats=7
    ),
}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_compile_to_the_layout_that_python_expects(name, arch):
    assert cuda_program(SHAPES[name], 1).cubin(arch)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_halves_compile(arch):
    shape = SHAPES["deepseek-v3"]
    assert cuda_program(shape, 3, split_phase=True).cubin(arch)
    told = replace(shape, stats=256)
    assert cuda_program(told, 3, split_phase=True).cubin(arch)


def test_kernels_compile_with_fault_points():
    assert cuda_program(SHAPES["deepseek-v3"], 0).cubin("sm_90a", defines=("WEFT_FAULTS=1",))


def test_a_compile_error_shows_the_generated_entry():
    with pytest.raises(CompileError) as caught:
        cuda_program(SHAPES["deepseek-v3"], 0).cubin("sm_90a", defines=("payload=",))
    assert "__launch_bounds__" in str(caught.value)
