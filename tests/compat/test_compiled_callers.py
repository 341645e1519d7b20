# SPDX-License-Identifier: Apache-2.0
"""Functions that call the compat classes under torch.compile: the calls are not traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from tests.public import MODES
from tests.test_defaults import differ

NAMES = ["MoeAlltoAll", "allreduce_fusion", "EPLowLatencyAllToAllLayer"]
NAMES += [name for name in MODES if name.split()[0] == "Buffer"]


def compiled(group: weft.Group, name: str) -> list[list[int]]:
    """Return the results that differ in a compiled caller, and in a plain one after it."""
    made = MODES[name](group)
    want = made.call()
    traced = torch.compile(made.call, backend="eager")
    result = [differ(call(), want) for call in (traced, traced, made.call)]
    made.give_back()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_compiled_caller_gets_the_same_bits(
    ranks: Callable[..., Any], name: str, device: str
) -> None:
    assert ranks(2, device)(compiled, name, timeout=900.0) == [[[], [], []]] * 2
