# SPDX-License-Identifier: Apache-2.0
"""The cache key of tensors: a change of anything that a check reads gives another key."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weft.runtime.check import build_tensors_key


def dense() -> torch.Tensor:
    return torch.zeros(4, 8, dtype=torch.float16)


def shifted(elements: int) -> torch.Tensor:
    return torch.zeros(48, dtype=torch.float16)[elements : elements + 32].view(4, 8)


OTHERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "true": lambda: True,
    "false": lambda: False,
    "shape": lambda: torch.zeros(8, 4, dtype=torch.float16),
    "rank": lambda: torch.zeros(32, dtype=torch.float16),
    "dtype": lambda: torch.zeros(4, 8, dtype=torch.bfloat16),
    "width": lambda: torch.zeros(4, 8, dtype=torch.int32),
    "strides": lambda: torch.zeros(8, 4, dtype=torch.float16).t(),
    "pitch": lambda: torch.zeros(4, 9, dtype=torch.float16)[:, :8],
    "alignment": lambda: shifted(1),
    "another alignment": lambda: shifted(4),
}


def test_equal_tensors_elsewhere_have_an_equal_key():
    first, second = dense(), dense()
    assert first.data_ptr() != second.data_ptr()
    assert first.data_ptr() % 16 == second.data_ptr() % 16
    assert build_tensors_key([first])[0] == build_tensors_key([second])[0]
    one, two = shifted(1), shifted(9)
    assert build_tensors_key([one, None])[0] == build_tensors_key([two, None])[0]


def test_each_difference_at_each_position_changes_the_key():
    keys = []
    for place, make in [(0, dense), *itertools.product(range(3), OTHERS.values())]:
        tensors: list[Any] = [dense() for _ in range(3)]
        tensors[place] = make()
        key, addresses = build_tensors_key(tensors)
        assert key is not None
        assert addresses == [t.data_ptr() if isinstance(t, torch.Tensor) else 0 for t in tensors]
        keys.append(key)
    assert len(set(keys)) == len(keys)


@pytest.mark.gpu
def test_another_device_changes_the_key():
    assert build_tensors_key([dense()])[0] != build_tensors_key([dense().cuda()])[0]


@pytest.mark.parametrize(
    "given", [1, 0, "x", torch.empty(0), torch.empty(2, device="meta"), torch.eye(2).to_sparse()]
)
def test_tensors_without_memory_have_no_key(given: Any):
    assert build_tensors_key([dense(), given])[0] is None


def test_a_tensor_with_gradient_has_a_key_under_no_grad():
    inputs = torch.zeros(4, 8, dtype=torch.float16, requires_grad=True)
    assert build_tensors_key([inputs])[0] is None
    with torch.no_grad():
        assert build_tensors_key([inputs])[0] == build_tensors_key([dense()])[0]
