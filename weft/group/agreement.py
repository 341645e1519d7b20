# SPDX-License-Identifier: Apache-2.0
"""Which ranks are gone: one set that all survivors take. There is no coordinator that could die.

Each rank has a page of shared memory that it alone writes, and which outlives it. In a round it
publishes there the set of ranks that it knows to be gone, and reads what every other rank outside
that set has published. A rank that ends instead is read once more: after its end its page is final.
So all survivors read the same values of a round. If all are equal and nobody ended unpublished, the
set is decided, by all who finish the round; else the next round begins with the union.

A bit beside the set says whether this rank has met new processes, whom all survivors take in or
none (`Group.replace`); a rank that has not takes it from all, as a rank that is gone joins the set.

A rank is gone only when the kernel says that its process has ended: its address space and its
GPU context are torn down before that, so nothing that it stored can still arrive. A rank that is
suspected and does not publish is killed first. models/spin/agreement.pml has the protocol, and
shows that two slots are enough: nobody begins round r + 2 before all have read round r.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from weft.errors import RecoveryFailed
from weft.group.control import ControlPlane
from weft.group.liveness import Liveness
from weft.group.pages import check_sealed, map_shared, sealed_memfd, unmap
from weft.group.reminder import Reminder

_SET_BITS = 32  # of a set of ranks, in a word
SLOTS = 2
_PAGE = mmap.PAGESIZE
_LATE = 0.5  # seconds that a suspect has to come to a round before it is killed
_LOOK = 0.0005  # seconds between two looks at the pages
_ROUND_LIMIT = (1 << 31) - 1
_KEEP = 1 << _SET_BITS
_log = logging.getLogger(__name__)
_ROUND_AT = _SET_BITS + 1  # the bit of a word where the round begins


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the survivors agreed on.

    dead, living: all ranks of the group, in order.
    finished: of each operator, by kind and generation as in "AllToAll 3" and in order of creation,
        the last round that all survivors had finished.
    seconds: how long `recover` took on this rank.
    """

    dead: tuple[int, ...]
    living: tuple[int, ...]
    finished: Mapping[str, int]
    seconds: float


class Decision(NamedTuple):
    """round: in which the survivors decided.   dead: who is gone.   keep: what all of them have."""

    round: int
    dead: frozenset[int]
    keep: bool


class Agreement:
    """This rank's page, and those of its peers. Owns its mappings.

    A word of a page is, from the top, a round of 31 bits, `keep`, and a set of 32 ranks in as many
    bits. More ranks take more words, one after the other; a peer reads them as published once each
    of them has the round, so it never takes some of one round and some of another.
    """

    def __init__(
        self,
        control: ControlPlane,
        processes: Liveness,
        exchange: Callable[[int], Mapping[int, int]],
    ) -> None:
        """processes: of the peers.

        exchange: passes a descriptor to all peers, and returns theirs, by rank.

        Raises what `exchange` does, HandleUnsupported or OSError.
        """
        self._rank = control.rank
        self._size = control.size
        self._name = control.name
        self._processes = processes
        self._owner = os.getpid()
        self._round = 0
        self._published = False  # in this round, which is not over
        self._dead: frozenset[int] = frozenset()
        self._keep = False
        self._words = -(-self._size // _SET_BITS)  # that a set takes
        self._pages: dict[int, int] = {}
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as opened:
            undo.callback(self.close)
            own = sealed_memfd("weft-page", _PAGE)
            opened.callback(os.close, own)
            self._pages[self._rank] = map_shared(own, _PAGE, writable=True)
            peers = exchange(own)
            for fd in peers.values():
                opened.callback(os.close, fd)
            for peer, fd in peers.items():
                check_sealed(peer, fd, _PAGE)
                self._pages[peer] = map_shared(fd, _PAGE, writable=False)
            undo.pop_all()

    def decide(self, suspects: Collection[int], deadline: float, *, keep: bool = False) -> Decision:
        """What the survivors decided.

        keep: does this rank have new processes to take in? Counts where a decision begins.

        Raises RecoveryFailed at the deadline, or where a suspect cannot be killed; to be called
        again it goes on in the same round. Raises it, too, on all survivors alike, where a rank
        says that a living one is gone, which the others do not believe.
        """
        if not self._published:
            self._keep = keep
        while True:
            if not self._published:
                self._publish()
            said, gone = self._collect(suspects, deadline)
            self._published = False
            wrong = {rank for rank, (dead, _) in said.items() if any(map(self._lives, dead))}
            if wrong:
                raise RecoveryFailed(
                    f"{self._names(wrong)} took a living rank for dead, and so lost descriptors by "
                    f"which it would know (os.closerange?): {_end_it(wrong)}"
                )
            mine = self._dead, self._keep
            self._dead = self._dead.union(gone, *(dead for dead, _ in said.values()))
            self._keep = self._keep and all(keep for _, keep in said.values())
            if not gone and all(each == mine for each in said.values()):
                return Decision(self._round, *mine)

    def close(self) -> None:
        """Give the pages back. Idempotent; a forked child does nothing."""
        if os.getpid() == self._owner:
            while self._pages:
                unmap(self._pages.popitem()[1], _PAGE)

    def _publish(self) -> None:
        others = set(range(self._size)) - {self._rank} - self._dead
        self._dead |= {rank for rank in others if self._processes.ended(rank)}
        self._round += 1
        if self._round > _ROUND_LIMIT:
            raise RecoveryFailed(f"this group has recovered {_ROUND_LIMIT} times; make a new one")
        tag = self._round << _ROUND_AT | (_KEEP if self._keep else 0)
        bits = sum(1 << rank for rank in self._dead)
        for i, word in enumerate(self._slot(self._rank)):
            word.value = tag | (bits >> i * _SET_BITS & _KEEP - 1)
        self._published = True

    def _collect(
        self, suspects: Collection[int], deadline: float
    ) -> tuple[dict[int, tuple[frozenset[int], bool]], set[int]]:
        """What the others published in this round, and which ranks ended without that."""
        waiting = set(range(self._size)) - {self._rank} - self._dead
        said: dict[int, tuple[frozenset[int], bool]] = {}
        gone: set[int] = set()
        reminder = Reminder()
        fence_at = min(time.monotonic() + _LATE, deadline)  # of each round: a suspect may have come
        while True:
            for rank in sorted(waiting):
                ended = self._processes.ended(rank)  # first: after its end its page is final
                found = self._read(rank)
                if found is not None:
                    said[rank] = found
                elif ended:
                    gone.add(rank)
                else:
                    continue
                waiting.remove(rank)
            if not waiting:
                return said, gone
            now = time.monotonic()
            if now >= fence_at:
                for rank in waiting.intersection(suspects):
                    self._kill(rank)
            if now >= deadline:
                raise RecoveryFailed(self._late(waiting))
            if (waited := reminder.due()) is not None:
                _log.warning(
                    "rank %d has waited %.0f s in recover for %s, which neither called it nor "
                    "ended",
                    *(self._rank, waited, self._names(waiting)),
                )
            time.sleep(_LOOK)

    def _read(self, rank: int) -> tuple[frozenset[int], bool] | None:
        """What `rank` has published in this round."""
        words = [word.value for word in self._slot(rank)]
        rounds = [word >> _ROUND_AT for word in words]
        if max(rounds) > self._round:
            raise RecoveryFailed(
                f"{self._name(rank)} is in round {max(rounds)} of the agreement and this rank in "
                f"round {self._round}: it has not waited for this rank; make a new group"
            )
        if min(rounds) < self._round:
            return None
        bits = sum((word & _KEEP - 1) << i * _SET_BITS for i, word in enumerate(words))
        dead = frozenset(each for each in range(self._size) if bits >> each & 1)
        return dead, bool(words[0] & _KEEP)

    def _slot(self, rank: int) -> list[ctypes.c_uint64]:
        """Words of eight bytes, each loaded and stored at once: none is ever seen half."""
        first = self._pages[rank] + 8 * self._words * (self._round % SLOTS)
        return [ctypes.c_uint64.from_address(first + 8 * i) for i in range(self._words)]

    def _lives(self, rank: int) -> bool:
        return rank == self._rank or not self._processes.ended(rank)

    def _kill(self, rank: int) -> None:
        try:
            self._processes.kill(rank)
        except OSError as error:
            raise RecoveryFailed(
                f"{self._name(rank)} is suspected, lives, and cannot be killed from here "
                f"({error.strerror}): end its process, then call recover again"
            ) from error

    def _late(self, waiting: set[int]) -> str:
        return (
            f"{self._names(waiting)} neither called recover nor ended in time: {_end_it(waiting)}"
        )

    def _names(self, ranks: set[int]) -> str:
        return ", ".join(self._name(rank) for rank in sorted(ranks))


def _end_it(ranks: set[int]) -> str:
    return f"end the process, or call recover again with suspects={sorted(ranks)} to have it killed"
