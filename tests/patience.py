# SPDX-License-Identifier: Apache-2.0
"""A machine under load is late, not dead: tests that name no deadline wait ten minutes for a peer.

A test of a deadline gives one (`hurry`) to the waits that are to end by it, and to no round before.
The fork server of the ranks imports this module, and so does the conftest.
"""

from __future__ import annotations

import inspect
from typing import Protocol

import weft
from tests.headers import Header
from weft.heap import Heap


class HasHeap(Protocol):
    """An operator, as far as its deadlines go."""

    @property
    def heap(self) -> Heap: ...


SECONDS = 600.0
PATIENT = (weft.AllToAll, weft.LowLatencyAllToAll, weft.AllReduce, weft.MoE)

for each in PATIENT:
    defaults = inspect.unwrap(each.__init__).__kwdefaults__
    assert defaults is not None
    assert {"timeout", "first_timeout"} <= defaults.keys()
    defaults.update(timeout=SECONDS, first_timeout=SECONDS)


def hurry(operator: HasHeap, seconds: float) -> None:
    """From now on this rank waits so long and no longer."""
    heap = operator.heap
    limit = int(seconds * 1e9).to_bytes(8, "little")
    for field in (Header.deadline_ns, Header.first_deadline_ns):
        heap.write(heap.group.rank, field.offset, limit)
