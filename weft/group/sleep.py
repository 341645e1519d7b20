# SPDX-License-Identifier: Apache-2.0
"""Sleep of a group: the memory of its heaps is freed and later allocated at the same addresses."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

from weft.errors import OutOfOrder, WeftError
from weft.group.membership import Lifecycle, Roster
from weft.group.messages import Messages


class Memory(Protocol):
    """Memory that a sleep frees."""

    def release(self) -> None:
        """Free the memory and keep its addresses. Idempotent."""


class LocalBuffers(Memory, Protocol):
    """Memory of this rank."""

    def restore(self) -> None:
        """Allocate new memory, zeroed, at the same addresses."""


class SymmetricMemory(Memory, Protocol):
    """Memory that the ranks of a group share."""

    generation: int

    @property
    def closed(self) -> bool: ...

    def prepare_restore(self) -> Callable[[], None] | None:
        """Return a collective function that allocates new memory, or None if it is closed."""


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
            heaps = {heap.generation: heap.prepare_restore() for heap in list(self._heaps)}
            restores = {g: restore for g, restore in heaps.items() if restore is not None}
            reports = self._messages.gather("wake", sorted(restores))
            living = self._messages.living
            try:
                for generation in sorted(restores):
                    if all(generation in reports[rank] for rank in living):
                        restores[generation]()
                self._messages.run_collective(self._restore_buffers, action="waking a group")
            except BaseException as error:
                problem = self._release_memory()
                if problem is not None:
                    error.add_note(f"freeing the memory again failed: {problem}")
                raise
            self.asleep = False
            members, mask = self._members(), self._roster.living_mask
            problem = _first([_attempt(partial(member.restart, mask)) for member in members])
            self._roster.renotify_ended(members)  # `restart` has cleared recorded deaths
            self._leave_closed(members)
            self._vote(problem, "waking a group")

    def fall_asleep(self) -> Exception | None:
        """Free the memory of this rank after its calls have ended; return the first error."""
        self.asleep = True
        marked = [_attempt(member.mark_asleep) for member in self._members()]
        return _first((*marked, self._release_memory()))

    def _members(self) -> list[Lifecycle]:
        return list(self._roster.members().values())

    def _release_memory(self) -> Exception | None:
        return _first([_attempt(memory.release) for memory in (*self._heaps, *self._buffers)])

    def _restore_buffers(self) -> None:
        for buffers in list(self._buffers):
            buffers.restore()

    def _leave_closed(self, members: Iterable[Lifecycle]) -> None:
        """Make operators raise that another rank has closed. Collective, after all restarts.

        A rank that closes an operator before its restart cannot notify its peers.
        """
        open_heaps = [heap.generation for heap in list(self._heaps) if not heap.closed]
        reports = self._messages.gather("wake", open_heaps)
        for member in members:
            closers = (r for r in self._messages.living if member.heap_generation not in reports[r])
            closer = next(closers, self._messages.rank)
            if closer != self._messages.rank:
                member.leave_closed(closer)

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
