# SPDX-License-Identifier: Apache-2.0
"""Agreement of the survivors on the set of dead ranks, without a coordinator that could die.

Each rank has a page of shared memory that only it writes and that outlives it. In each round a rank
publishes on its page the set of ranks that it knows to be dead, and reads what every rank outside
that set has published. If a rank ends instead of publishing, its page is read once more: after the
end of the process the page is final. All survivors therefore read the same values in a round. If
all values are equal and no rank ended without publishing, the set is decided. Otherwise the next
round begins with the union.

One more bit is set if the rank is connected to the new processes of `Group.replace`. It is
decided like the set, but as an intersection: one rank without the bit clears it on all.

A rank counts as dead only when the kernel reports that its process has ended. The kernel tears down
the address space and the GPU context before that, so no store of that rank can arrive later. A
suspect that does not publish is killed first. models/spin/agreement.pml specifies the protocol and
shows that two buffers suffice: no rank begins round r + 2 before all have read round r.
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
from weft.group.pages import check_sealed, create_sealed_memfd, map_shared, unmap
from weft.logs import WaitLogTimer

_SET_BITS = 32  # number of ranks that one word represents
ROUND_BUFFERS = 2
_PAGE = mmap.PAGESIZE
SUSPECT_SECONDS = 0.5  # grace period before a suspect that has not published is killed
_POLL_SECONDS = 0.0005  # interval between two reads of the pages
_ROUND_LIMIT = (1 << 31) - 1
_ADMIT_BIT = 1 << _SET_BITS
_log = logging.getLogger(__name__)
_ROUND_SHIFT = _SET_BITS + 1


@dataclass(frozen=True, slots=True)
class Recovery:
    """Result of `Group.recover`.

    Attributes:
        dead: Dead ranks, ascending.
        living: Living ranks, ascending.
        finished: Last round that all survivors had finished, for each operator in order of
            creation. Names are kind and generation, such as "AllToAll 3".
        seconds: Time that `recover` took on this rank.
    """

    dead: tuple[int, ...]
    living: tuple[int, ...]
    finished: Mapping[str, int]
    seconds: float


class Decision(NamedTuple):
    """Result of `Agreement.decide`.

    Attributes:
        round: Round in which the survivors decided.
        dead: Dead ranks.
        admit: Whether all survivors admit the new processes.
    """

    round: int
    dead: frozenset[int]
    admit: bool


class Agreement:
    """Agreement protocol of one rank; owns the mappings of its page and of its peers' pages.

    A word of a page holds, from the top bit down, 31 bits of the round, the bit `admit`, and 32
    bits of the set. More than 32 ranks need several words. A peer accepts the words only when all
    of them hold the current round, so it never mixes words of two rounds.
    """

    def __init__(
        self,
        control: ControlPlane,
        processes: Liveness,
        exchange: Callable[[int], Mapping[int, int]],
    ) -> None:
        """Create this rank's page and map the pages of its peers. Collective.

        Args:
            control: Sockets to the peers.
            processes: Processes of the peers.
            exchange: Sends a descriptor to all peers and returns their descriptors by rank.

        Raises:
            HandleUnsupported: a peer sent memory that it could resize.
            OSError: this rank is out of descriptors or memory. Errors of `exchange` are raised too.
        """
        self._rank = control.rank
        self._size = control.size
        self._name = control.format_rank
        self._processes = processes
        self._owner = os.getpid()
        self._round = 0
        self._published = False  # in the current round
        self._dead: frozenset[int] = frozenset()
        self._admit = False
        self._num_words = -(-self._size // _SET_BITS)  # per set
        self._pages: dict[int, int] = {}
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as opened:
            undo.callback(self.close)
            own = create_sealed_memfd("weft-page", _PAGE)
            opened.callback(os.close, own)
            self._pages[self._rank] = map_shared(own, _PAGE, writable=True)
            peers = exchange(own)
            for fd in peers.values():
                opened.callback(os.close, fd)
            for peer, fd in peers.items():
                check_sealed(peer, fd, _PAGE)
                self._pages[peer] = map_shared(fd, _PAGE, writable=False)
            undo.pop_all()

    def decide(
        self, suspects: Collection[int], deadline: float, *, admit: bool = False
    ) -> Decision:
        """Return the dead ranks that all survivors agree on. Collective.

        A call that raised at its deadline can be repeated; it continues in the same round.

        Args:
            suspects: Ranks to kill if they do not publish.
            deadline: Deadline in time.monotonic seconds.
            admit: Whether this rank can admit new processes. Read when a round begins.

        Raises:
            RecoveryFailed: a rank is late, a suspect cannot be killed, or, on all survivors, a rank
                took a living one for dead.
        """
        if not self._published:
            self._admit = admit
        while True:
            if not self._published:
                self._publish()
            published, ended = self._collect(suspects, deadline)
            self._published = False
            wrong = {
                rank for rank, (dead, _) in published.items() if any(map(self._is_alive, dead))
            }
            if wrong:
                raise RecoveryFailed(
                    f"{self._format_ranks(wrong)} took a living rank for dead: descriptors of its "
                    f"group were closed (os.closerange?); {_suggest_kill(wrong)}"
                )
            own = self._dead, self._admit
            self._dead = self._dead.union(ended, *(dead for dead, _ in published.values()))
            self._admit = self._admit and all(admit for _, admit in published.values())
            if not ended and all(entry == own for entry in published.values()):
                return Decision(self._round, *own)

    def close(self) -> None:
        """Unmap the pages. Idempotent; a forked child does nothing."""
        if os.getpid() == self._owner:
            while self._pages:
                unmap(self._pages.popitem()[1], _PAGE)

    def _publish(self) -> None:
        others = set(range(self._size)) - {self._rank} - self._dead
        self._dead |= {rank for rank in others if self._processes.has_ended(rank)}
        self._round += 1
        if self._round > _ROUND_LIMIT:
            raise RecoveryFailed(f"this group has recovered {_ROUND_LIMIT} times; create a new one")
        tag = self._round << _ROUND_SHIFT | (_ADMIT_BIT if self._admit else 0)
        bits = sum(1 << rank for rank in self._dead)
        for i, word in enumerate(self._round_words(self._rank)):
            word.value = tag | (bits >> i * _SET_BITS & _ADMIT_BIT - 1)
        self._published = True

    def _collect(
        self, suspects: Collection[int], deadline: float
    ) -> tuple[dict[int, tuple[frozenset[int], bool]], set[int]]:
        """Return the entries that peers published in this round, and the ranks that ended."""
        waiting = set(range(self._size)) - {self._rank} - self._dead
        published: dict[int, tuple[frozenset[int], bool]] = {}
        ended: set[int] = set()
        wait_timer = WaitLogTimer()
        # Restarted in each round, because a suspect may have published in the last one.
        kill_at = min(time.monotonic() + SUSPECT_SECONDS, deadline)
        while True:
            for rank in sorted(waiting):
                # Checked before the page is read: the page of an ended process is final.
                has_ended = self._processes.has_ended(rank)
                entry = self._read(rank)
                if entry is not None:
                    published[rank] = entry
                elif has_ended:
                    ended.add(rank)
                else:
                    continue
                waiting.remove(rank)
            if not waiting:
                return published, ended
            now = time.monotonic()
            if now >= kill_at:
                for rank in waiting.intersection(suspects):
                    self._kill(rank)
            if now >= deadline:
                raise RecoveryFailed(self._format_late(waiting))
            if (waited := wait_timer.due()) is not None:
                _log.warning(
                    "rank %d has waited %.0f s in recover for %s, which neither called it nor "
                    "has ended",
                    *(self._rank, waited, self._format_ranks(waiting)),
                )
            time.sleep(_POLL_SECONDS)

    def _read(self, rank: int) -> tuple[frozenset[int], bool] | None:
        """Return the entry that a rank has published in this round, or None."""
        words = [word.value for word in self._round_words(rank)]
        rounds = [word >> _ROUND_SHIFT for word in words]
        if max(rounds) > self._round:
            raise RecoveryFailed(
                f"{self._name(rank)} is in round {max(rounds)} of the agreement and this rank in "
                f"round {self._round}: it did not wait for this rank; create a new group"
            )
        if min(rounds) < self._round:
            return None
        bits = sum((word & _ADMIT_BIT - 1) << i * _SET_BITS for i, word in enumerate(words))
        dead = frozenset(peer for peer in range(self._size) if bits >> peer & 1)
        return dead, bool(words[0] & _ADMIT_BIT)

    def _round_words(self, rank: int) -> list[ctypes.c_uint64]:
        """Return the words of a rank's page for this round; accesses to each are atomic."""
        first = self._pages[rank] + 8 * self._num_words * (self._round % ROUND_BUFFERS)
        return [ctypes.c_uint64.from_address(first + 8 * i) for i in range(self._num_words)]

    def _is_alive(self, rank: int) -> bool:
        return rank == self._rank or not self._processes.has_ended(rank)

    def _kill(self, rank: int) -> None:
        try:
            self._processes.kill(rank)
        except OSError as error:
            raise RecoveryFailed(
                f"{self._name(rank)} is suspected but alive, and this rank cannot kill it "
                f"({error.strerror}): end its process, then call recover again"
            ) from error

    def _format_late(self, waiting: set[int]) -> str:
        names = self._format_ranks(waiting)
        return f"{names} neither called recover nor ended in time: {_suggest_kill(waiting)}"

    def _format_ranks(self, ranks: set[int]) -> str:
        return ", ".join(self._name(rank) for rank in sorted(ranks))


def _suggest_kill(ranks: set[int]) -> str:
    return f"end the process, or call recover again with suspects={sorted(ranks)} to have it killed"
