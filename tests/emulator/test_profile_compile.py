# SPDX-License-Identifier: Apache-2.0
"""Profiled kernels compile everywhere, and what profiling keeps costs no registers that spill."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.alltoall.test_compile import SHAPES
from tests.emulator.machine_code import frames
from weft.alltoall.kernels import cuda_program
from weft.runtime.timeline import DEFINE

pytestmark = pytest.mark.slow

PLAIN = SHAPES["deepseek-v3"]
# These use all registers: there up to 24 bytes are spilled, once for each CTA.
TIGHT = ("32 ranks, mapped", "mxfp8 of fp32")


@pytest.mark.parametrize(
    "shape",
    [
        *(SHAPES[name] for name in SHAPES if name not in TIGHT),
        replace(PLAIN, combine="push"),
        replace(PLAIN, combine="push_fp8"),
        replace(PLAIN, quant="fp8", row_bytes=(7168, 224)),
    ],
)
def test_profiling_spills_nothing_on_hopper(shape):
    program = cuda_program(shape, 1, split_phase=True)
    plain = frames(program.cubin("sm_90a"))
    profiled = frames(program.cubin("sm_90a", defines=(DEFINE,)))
    assert {"dispatch", "combine"} <= plain.keys()
    assert profiled == plain == dict.fromkeys(plain, 0)


@pytest.mark.parametrize("name", TIGHT)
def test_where_registers_are_short_profiling_spills_few_words(name):
    profiled = frames(cuda_program(SHAPES[name], 1).cubin("sm_90a", defines=(DEFINE,)))
    assert max(profiled.values()) <= 24
