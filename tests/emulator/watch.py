# SPDX-License-Identifier: Apache-2.0
"""Memory accesses of emulated kernels: all strong accesses and vectors, and their races."""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import weft

ACCESSES = ("reads", "writes", "updates")
ORDERS = ("weak", "relaxed", "acquire", "release", "acq_rel")
SCOPES = ("", "cta", "gpu", "sys")
SHARES = 1 << 56  # of memory.hpp: offsets in the heap count from here


class _Event(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint32),
        ("access", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("scope", ctypes.c_uint32),
        ("owner", ctypes.c_uint32),
        ("cta", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Event:
    """One access: `how` names its kind, order and scope, such as "writes release sys".

    rank: that made it.   share, offset: of the heap; share is -1 in memory of the rank's own.
    """

    how: str
    rank: int
    cta: int
    share: int
    offset: int
    size: int


class Watch:
    """The memory of one emulated library, of ranks whose shares are `stride` bytes."""

    def __init__(self, library: ctypes.CDLL, stride: int) -> None:
        self._library, self._stride = library, stride
        library.seen_race.restype = ctypes.c_char_p

    def begin(self) -> None:
        """Clear the record and start recording. No kernel may run now, nor at the end."""
        self._library.watch(1)

    def end(self) -> None:
        self._library.watch(0)

    def host(self, rank: int, share: int, offset: int, size: int, *, writes: bool = False) -> None:
        """Report an access of a rank's host between two kernels."""
        at = ctypes.c_uint64(share * self._stride + offset)
        self._library.touched_by_host(rank, at, size, int(writes))

    @property
    def race(self) -> str:
        """Return the first two accesses that nothing orders, or ""."""
        return bytes(self._library.seen_race()).decode()

    def events(self) -> list[Event]:
        """Return all accesses in an order in which they happened; of a poll, only the first."""
        first = ctypes.POINTER(_Event)()
        count = self._library.seen_events(ctypes.byref(first))
        return [self._event(first[i]) for i in range(count)]

    def _event(self, e: _Event) -> Event:
        words = (ACCESSES[e.access], ORDERS[e.order], SCOPES[e.scope])
        share, offset = -1, e.address
        if e.address >= SHARES:
            share, offset = divmod(e.address - SHARES, self._stride)
        return Event(" ".join(filter(None, words)), e.owner, e.cta, share, offset, e.bytes)


@contextmanager
def watching(
    group: weft.Group, library: ctypes.CDLL, stride: int, *, whole: bool = True
) -> Iterator[Watch]:
    """Record accesses while all ranks, which are threads of one process, use one library.

    Nothing may race, unless some of the kernels are not in it, and so not `whole`. What was seen
    may be asked for afterwards.
    """
    watch = Watch(library, stride)
    group.barrier()
    if group.rank == 0:
        watch.begin()
    group.barrier()
    yield watch
    group.barrier()
    if group.rank == 0:
        watch.end()
    group.barrier()
    assert not whole or watch.race == "", watch.race


def ways(events: Iterable[Event], places: dict[str, range]) -> dict[str, set[str]]:
    result: dict[str, set[str]] = {}
    for event in events:
        for name, place in places.items():
            if event.share >= 0 and event.offset in place:
                result.setdefault(name, set()).add(event.how)
    return result
