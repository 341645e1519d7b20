# SPDX-License-Identifier: Apache-2.0
"""This process's place, and the counts and flags of its forward pass; tests write to STATE."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

STATE = SimpleNamespace(
    parallel=SimpleNamespace(
        tp_size=1, moe_ep_size=1, moe_ep_rank=0, attn_tp_size=1, enable_dp_attention=False
    ),
    backend=None,
    counts=None,
    real=None,
    redundant=0,
    groups={},  # GroupCoordinators of "tp", "attn", "ep" and "moe"
    ways=[],  # how each sum of this rank was made, by SGLang's own ways
    workspaces=0,
    flashinfer=False,
    dp_attention=False,
)


def get_parallel() -> Any:
    return STATE.parallel
