# SPDX-License-Identifier: Apache-2.0
"""The routing kernel compiles for every architecture and rule, and keeps all in registers."""

from __future__ import annotations

import pytest

from tests.emulator.machine_code import frames
from tests.moe.routed import RULES
from weft.jit.nvrtc import CUDA_OPTIONS, compile_cubin
from weft.moe.kernels import NORMALIZE, ROUTE

pytestmark = pytest.mark.slow


CASES = {
    **{name: (ROUTE, rule.literal()) for name, rule in RULES.items()},
    "normalize_topk": (NORMALIZE, ""),
}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_without_spills(name: str, arch: str) -> None:
    kernel, rule = CASES[name]
    cubin = compile_cubin(kernel.source(rule), name=kernel.name, arch=arch, options=CUDA_OPTIONS)
    assert kernel.name.encode() in cubin
    assert set(frames(cubin).values()) == {0}
