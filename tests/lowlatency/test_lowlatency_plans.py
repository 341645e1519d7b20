# SPDX-License-Identifier: Apache-2.0
"""Launch plans of the low-latency kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.lowlatency.config import CHUNK_TOKENS, LowLatencyShape
from weft.lowlatency.kernels import plan_launch

PLAIN = LowLatencyShape(8, 128, 8, 256, 32, 7168, "bf16")


@pytest.mark.parametrize("tokens", [0, 1, 8, 32, 33, 128, 512, 8192])
@pytest.mark.parametrize("name", ["dispatch", "combine"])
@pytest.mark.parametrize("part", ["", "_send", "_receive"])
def test_plans_fit_on_the_gpu_and_cover_every_rank(tokens, name, part):
    shape = replace(PLAIN, tokens=8192)
    threads = 128 if tokens <= 32 else 256
    resident = 132 * 3 * (256 // threads)
    plan = plan_launch(shape, name + part, tokens, threads, 132, resident)
    assert plan.ctas >= 1
    waits = plan.senders + plan.receivers
    assert waits <= max(resident, 2)
    if part != "_send":
        assert plan.receivers >= 1  # peers' tokens come even where there are none of one's own
    if part != "_receive":
        assert plan.metadata + plan.senders >= 1  # one CTA sends credits
        assert plan.metadata * CHUNK_TOKENS >= tokens or name == "combine"
    else:
        assert plan.metadata == plan.senders == 0
