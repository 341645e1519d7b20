# SPDX-License-Identifier: Apache-2.0
"""Survivors of killed ranks, which agree on the dead: shared by recovery tests."""

import ctypes
import mmap
from collections.abc import Callable, Iterable

import weft
from tests.faults import DIE, plan_fault
from tests.patience import HasHeap
from weft.errors import GroupError

_libc = ctypes.CDLL(None, use_errno=True)
PATIENCE = 60.0  # seconds, for a peer on a busy machine
ROUNDS = 5  # a death is noticed in so many rounds, or never


class Survivors:
    def __init__(self, group: weft.Group) -> None:
        self.group = group

    @property
    def ranks(self) -> list[int]:
        return list(self.group.living)

    def barrier(self) -> None:
        self.group.barrier(timeout=PATIENCE)

    def lose(self, *dead: int, sealed: Iterable[HasHeap] = ()) -> None:
        """Continue without these ranks, whose processes end.

        sealed: operators on CPU ranks that may not touch these ranks' memory any more: it faults.
        """
        result = self.group.recover(timeout=PATIENCE)
        assert set(dead) <= set(result.dead), result
        for operator in sealed:
            heap = operator.heap
            pages = -(-heap.size // mmap.PAGESIZE) * mmap.PAGESIZE
            for rank in dead:
                where = ctypes.c_void_p(heap.address(rank))
                assert _libc.mprotect(where, ctypes.c_size_t(pages), 0) == 0


def plan_death(operator: HasHeap, point: int) -> None:
    plan_fault(operator, point, DIE)


def run_until_broken(one_round: Callable[[], object]) -> str:
    """Run rounds until a death is noticed, and return the error."""
    for _ in range(ROUNDS):
        try:
            one_round()
        except GroupError as error:
            return str(error)
    raise AssertionError(f"{ROUNDS} rounds went on, though a rank is dead")
