# SPDX-License-Identifier: Apache-2.0
"""`memory_bytes` predicts the allocations of a low-latency all-to-all to the byte."""

from __future__ import annotations

from typing import Any

import weft
from tests.lowlatency.test_lowlatency_calls import SIZES, make
from weft.lowlatency.operator import LowLatencyAllToAll


def memory_of(group: weft.Group) -> tuple[int, int, int]:
    with make(group) as a2a:
        slots = a2a.result_buffers
        results = sum(t.numel() * t.element_size() for slot in slots for t in slot.tensors.values())
        sizes: dict[str, Any] = {"ranks": group.size, **SIZES}
        reported = LowLatencyAllToAll.memory_bytes(**sizes)
        assert reported == a2a.memory
        assert reported.shared == a2a.heap.size
        assert reported.ordinary == results
        return reported.shared, reported.ordinary, reported.total


def test_memory_bytes_is_exact(ranks):
    assert len(set(ranks(2, "threads")(memory_of))) == 1


def test_memory_bytes_includes_an_expert_map():
    sizes: dict[str, Any] = {"ranks": 2, **SIZES}
    uneven = [0] * (SIZES["num_experts"] - 1) + [1]
    reported = LowLatencyAllToAll.memory_bytes(**sizes, expert_map=uneven)
    assert reported.ordinary > 1.5 * LowLatencyAllToAll.memory_bytes(**sizes).ordinary
