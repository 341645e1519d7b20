"""Every kernel compiles for every architecture without a GPU, and the compiler's report is what we want."""

from __future__ import annotations

import pytest

from weft.errors import CompileError
from weft.ops.entry import compile_cuda
from weft.shape import Shape

SHAPES = {
    "deepseek-v3": Shape(8, 2048, 8, 256, 7168, "bf16", (14336,)),
    "fp8 out": Shape(8, 2048, 8, 256, 7168, "bf16", (7168, 224)),
    "gpt-oss-120b": Shape(4, 512, 4, 128, 2880, "bf16", (5760,)),
    "three ranks, odd rows": Shape(3, 33, 9, 18, 264, "fp16", (528, 20, 7)),
    "32 ranks, mapped": Shape(32, 16, 32, 61, 512, "fp32", (2048,), mapped=True),
}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_compile(name, arch):
    assert compile_cuda(SHAPES[name], arch)[:4] == b"\x7fELF"


def test_kernels_compile_with_fault_points():
    assert compile_cuda(SHAPES["deepseek-v3"], "sm_90a", defines=("WEFT_FAULTS=1",))


def test_a_compile_error_shows_the_generated_entry():
    with pytest.raises(CompileError) as caught:
        compile_cuda(SHAPES["deepseek-v3"], "sm_90a", defines=("payload=",))
    assert "__launch_bounds__" in str(caught.value)
