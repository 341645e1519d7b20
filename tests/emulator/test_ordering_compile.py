# SPDX-License-Identifier: Apache-2.0
"""The litmus of tests/gpu compiles without a GPU, to the layout that its Python side expects."""

from __future__ import annotations

import pytest

from tests.emulator.machine_code import numbers_of
from tests.gpu.test_ordering import compile_litmus

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_ordering_litmus_compiles(arch):
    cubin = compile_litmus(arch)
    share_bytes, ctas, threads, noise_ctas, noise_threads = numbers_of(cubin, b"sizes")
    assert share_bytes >= ctas * 14336 + (64 << 20)
    # All of a GPU's CTAs must be on it at once: on 132 SMs each gets one of its own.
    assert ctas + noise_ctas <= 132
    assert max(threads, noise_threads) <= 1024
