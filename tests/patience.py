# SPDX-License-Identifier: Apache-2.0
"""Deadlines of tests: ten minutes for every wait, because a machine under load is slow.

A test of a deadline sets it with `hurry` just before the wait that must exceed it.
"""

import inspect
from typing import Protocol

import weft
from tests.headers import Header
from weft.heap import Heap


class HasHeap(Protocol):
    """An operator, reduced to its deadlines."""

    @property
    def heap(self) -> Heap: ...


SECONDS = 600.0
PATIENT = (weft.AllToAll, weft.LowLatencyAllToAll, weft.AllReduce, weft.MoE)

for each in PATIENT:
    defaults = inspect.unwrap(each.__init__).__kwdefaults__
    assert defaults is not None
    assert {"timeout", "first_timeout"} <= defaults.keys()
    defaults.update(timeout=SECONDS, first_timeout=SECONDS)
weft.launch.__globals__["_GROUP_TIMEOUT"] = SECONDS


def hurry(operator: HasHeap, seconds: float) -> None:
    """Shorten the deadline of this rank's waits from now on."""
    heap = operator.heap
    limit = int(seconds * 1e9).to_bytes(8, "little")
    for field in (Header.deadline_ns, Header.first_deadline_ns):
        heap.write(heap.group.rank, field.offset, limit)
