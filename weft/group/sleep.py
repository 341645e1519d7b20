# SPDX-License-Identifier: Apache-2.0
"""Sleep of a group: the memory of its heaps is freed and later allocated at the same addresses."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from weft.errors import OutOfOrder, WeftError
from weft.group.membership import Lifecycle, Roster
from weft.group.messages import Messages


class LocalBuffers(Protocol):
    """Memory of this rank."""

    def release(self) -> None:
        """Free the memory and keep its addresses. Idempotent."""

    def restore(self) -> None:
        """Allocate new memory, zeroed, at the same addresses."""


class SymmetricMemory(LocalBuffers, Protocol):
    """Memory that the ranks of a group share. `restore` is collective."""

    generation: int

    @property
    def closed(self) -> bool: ...


class GroupSleep:
    """Sleep and waking of one group. The docstrings of `Group` describe the public methods.

    No message of before can be taken for one of after: all ranks have ended their calls before any
    frees memory, new memory has no flags, and no rank may store into it before every rank has
    initialised its own.

    Attributes:
        asleep: Whether the memory is freed.
    """

    def __init__(self, messages: Messages, roster: Roster) -> None:
        self.asleep = False
        self._messages = messages
        self._roster = roster
        self._lock = threading.Lock()  # held by the thread that sleeps or wakes
        self._heaps: weakref.WeakSet[SymmetricMemory] = weakref.WeakSet()
        self._buffers: weakref.WeakSet[LocalBuffers] = weakref.WeakSet()

    def add_heap(self, heap: SymmetricMemory) -> None:
        """Register a heap by a weak reference."""
        self._heaps.add(heap)

    def add_buffers(self, buffers: LocalBuffers) -> None:
        """Register local memory by a weak reference. Raises OutOfOrder while asleep."""
        self.check_awake("memory is allocated")
        self._buffers.add(buffers)

    def check_awake(self, action: str) -> None:
        """Raise OutOfOrder if the group is asleep."""
        if self.asleep:
            raise OutOfOrder(
                f"{action} while this group is asleep: call group.wake() first, on every rank"
            )

    def sleep(self) -> None:
        """See `Group.sleep`."""
        with self._exclusive("sleep"), contextlib.ExitStack() as stack:
            self.check_awake("sleep")
            members = self._roster.members().values()
            problem: Exception | None = None
            try:
                for member in members:
                    stack.enter_context(member.exclude_calls())
            except Exception as error:
                problem = error
            # No rank unmaps a share while a kernel of another rank may access it.
            self._vote(problem, "putting a group to sleep")
            self._vote(self.fall_asleep(), "freeing the memory of a group")

    def wake(self) -> None:
        """See `Group.wake`."""
        with self._exclusive("wake"):
            if not self.asleep:
                raise OutOfOrder("wake, but this group is awake: call group.sleep() before")
            open_heaps = {heap.generation: heap for heap in self._heaps if not heap.closed}
            reports = self._messages.gather("wake", sorted(open_heaps))
            living = self._messages.living
            # Heap of each generation, or the first rank that has closed it.
            common = [g for g in sorted(open_heaps) if all(g in reports[r] for r in living)]
            closers = {
                generation: next(rank for rank in living if generation not in reports[rank])
                for generation in open_heaps.keys() - set(common)
            }
            try:
                for generation in common:
                    open_heaps[generation].restore()
                self._messages.run_collective(self._restore_buffers, action="waking a group")
            except BaseException as error:
                problem = self._release_memory()
                if problem is not None:
                    error.add_note(f"freeing the memory again failed: {problem}")
                raise
            self.asleep = False
            members = self._members()
            problem = _first([self._restart(member, closers) for member in members])
            self._roster.renotify_ended(members)  # `restart` has cleared recorded deaths
            self._vote(problem, "waking a group")

    def fall_asleep(self) -> Exception | None:
        """Free the memory of this rank after its calls have ended; return the first error."""
        self.asleep = True
        marked = [_attempt(member.mark_asleep) for member in self._members()]
        return _first((*marked, self._release_memory()))

    def _members(self) -> list[Lifecycle]:
        return list(self._roster.members().values())

    def _release_memory(self) -> Exception | None:
        heaps = [heap for heap in self._heaps if not heap.closed]
        return _first([_attempt(memory.release) for memory in (*heaps, *self._buffers)])

    def _restore_buffers(self) -> None:
        for buffers in list(self._buffers):
            buffers.restore()

    def _restart(self, member: Lifecycle, closers: dict[int, int]) -> Exception | None:
        closer = closers.get(member.heap_generation)
        if closer is not None:
            return _attempt(lambda: member.leave_closed(closer))
        return _attempt(lambda: member.restart(self._roster.living_mask))

    def _vote(self, problem: Exception | None, action: str) -> None:
        self._messages.vote_unrecorded(problem, action, common_error=WeftError)

    @contextlib.contextmanager
    def _exclusive(self, call: str) -> Iterator[None]:
        """Exclude other threads of this rank: peers cannot tell their messages apart."""
        if not self._lock.acquire(blocking=False):
            raise OutOfOrder(
                f"{call} while another thread of rank {self._messages.rank} puts this group to "
                "sleep or wakes it; call both from one thread"
            )
        try:
            yield
        finally:
            self._lock.release()


def _first(problems: Iterable[Exception | None]) -> Exception | None:
    return next((problem for problem in problems if problem is not None), None)


def _attempt(step: Callable[[], None]) -> Exception | None:
    try:
        step()
    except Exception as error:
        return error
    return None
