"""The offsets that machine code uses are those that Python expects, not only its constants."""

from __future__ import annotations

import re

import pytest
from cuda.bindings import nvrtc

from tests.alltoall.test_compile import SHAPES
from tests.recorded import NVRTC, reads
from weft.alltoall.layout import Layout
from weft.alltoall.source import cuda_program
from weft.errors import LayoutMismatch
from weft.jit import CUDA_OPTIONS, source
from weft.runtime.layout import compare

pytestmark = reads(tools=(NVRTC,))


def ptx(text: str) -> str:
    """What NVRTC's back end makes of a source."""
    error, program = nvrtc.nvrtcCreateProgram(text.encode(), b"entry.cu", 0, [], [])
    assert int(error) == 0
    include = f"-I{source.INCLUDE_ROOT}"
    options = [*CUDA_OPTIONS, "--std=c++20", "--gpu-architecture=compute_90a", include]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    assert int(error) == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    code = bytearray(size)
    nvrtc.nvrtcGetPTX(program, code)
    return str(code.decode())


def stored_by(code: str, kernel: str, array: str) -> dict[int, int]:
    """The constants that a kernel stores, by their place in an array of 64-bit words."""
    body = code[code.index(f".entry {kernel}") :]
    body = body[: body.index("\n}")]
    known = dict(re.findall(r"mov\.[bu]64\s+(%rd\d+), (\d+);", body))
    stores = re.findall(rf"st\.global\.[bu]64\s+\[{array}(?:\+(\d+))?\], (\S+);", body)
    return {int(at or 0) // 8: int(known.get(value, value)) for at, value in stores}


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "three ranks, odd rows", "statistics, pushed", "choices"]
)
def test_code_agrees_with_constants(name):
    layout = Layout.of(SHAPES[name])
    stored = stored_by(ptx(cuda_program(SHAPES[name], 1).source), "weft_measure", "weft_measured")
    compare(layout.places(), [stored.get(i, 0) for i in range(len(layout.places()))])


def test_code_that_differs_is_refused():
    layout = Layout.of(SHAPES["deepseek-v3"])
    measured = [value for _, value in layout.places()]
    measured[[name for name, _ in layout.places()].index("outbox")] += 128
    with pytest.raises(LayoutMismatch, match=f"outbox: Python says {layout.outbox}.*the code"):
        compare(layout.places(), measured, "the code of the compiled entry")
