# SPDX-License-Identifier: Apache-2.0
"""Collective control calls of a group: an object is created on all ranks or on none.

The calls that create an object are recorded, and replayed for a rank that joins later.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from weft.arguments import check_callable, check_instance, check_int, check_seconds
from weft.errors import (
    CreationFailed,
    GeometryMismatch,
    InvalidArgument,
    UsageError,
    WeftError,
)
from weft.group.control import Control
from weft.group.membership import Roster
from weft.group.wire import JSON

T = TypeVar("T")
_TEXT_LIMIT = 4000  # characters of an error's text in a vote
_SAME_OBJECTS = (
    "create in a new process the objects that the survivors have created, in the same order, and "
    "close those that they have closed"
)


class Closable(Protocol):
    """Interface of a heap to a creation."""

    @property
    def closed(self) -> bool: ...


class Creation:
    """Recorded control messages of one constructor, with the object and heaps it created.

    Attributes:
        steps: Calls to replay for a rank that joins later.
        workspace: Creation of the memory that this object shares with others, or None.
    """

    def __init__(self, workspace: Creation | None = None) -> None:
        self.steps: list[Step] = []
        self.workspace = workspace
        self._objects: list[weakref.ref[object]] = []
        self._heaps: list[weakref.ref[Closable]] = []
        self._ended = False

    def add(self, item: object) -> None:
        """Record an object that the constructor created, by a weak reference."""
        self._objects.append(weakref.ref(item))

    def add_heap(self, heap: Closable) -> None:
        """Record a heap that the constructor created, by a weak reference."""
        self._heaps.append(weakref.ref(heap))

    def mark_closed(self) -> None:
        """Mark the object as closed, so that a new process does not create it."""
        self._ended = True

    @property
    def exists(self) -> bool:
        """Whether all objects exist and all heaps are open."""
        if self._ended or not (self._objects or self._heaps):
            return False
        heaps = [heap() for heap in self._heaps]
        is_open = all(heap is not None and not heap.closed for heap in heaps)
        return is_open and all(item() is not None for item in self._objects)


class Messages:
    """Collective calls of the participating ranks over a control channel.

    Attributes:
        control: Channel of the messages. A recovery with new processes replaces it.
        timeout: Default timeout of a message in seconds.
        generation: Latest number from `next_generation`.
    """

    def __init__(self, control: Control, roster: Roster, *, timeout: float) -> None:
        self.control = control
        self.timeout = timeout
        self.generation = 0
        self._ranks_to_map: tuple[int, ...] = ()
        self._roster = roster
        self._creations: list[Creation] = []
        self._creation: Creation | None = None  # of the constructor that is running

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.control.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.control.size

    @property
    def living(self) -> tuple[int, ...]:
        """Participating ranks."""
        return self._roster.living

    @property
    def ranks_to_map(self) -> tuple[int, ...]:
        """Ranks whose memory this rank has to map. In a creation, all living ranks."""
        return self._ranks_to_map or self.living

    @ranks_to_map.setter
    def ranks_to_map(self, ranks: tuple[int, ...]) -> None:
        self._ranks_to_map = ranks

    def gather(self, op: str, value: JSON, timeout: float | None = None) -> list[Any]:
        """Return every rank's value without recording the call. Collective."""
        return self.control.gather(op, value, self._resolve_timeout(timeout))

    def all_gather(self, value: JSON, *, timeout: float | None = None) -> list[Any]:
        """See `Group.all_gather`."""
        return self.record(lambda messages: messages.gather("all_gather", value, timeout))

    def barrier(self, *, timeout: float | None = None) -> None:
        """See `Group.barrier`."""
        self.record(lambda messages: messages.gather("barrier", None, timeout))

    def vote(
        self, error: BaseException | None, *, action: str, undo: Callable[[], None] | None = None
    ) -> None:
        """See `Group.vote`."""
        if error is not None:
            check_instance("error", error, BaseException)
        check_instance("action", action, str)
        if undo is not None:
            check_callable("undo", undo, "which releases the created resources")
        try:
            self.record(
                lambda messages: messages.vote_unrecorded(None, action),
                lambda: self.vote_unrecorded(error, action),
            )
        except BaseException:
            if error is None and undo is not None:
                undo()
            raise

    def vote_unrecorded(
        self,
        error: BaseException | None,
        action: str,
        timeout: float | None = None,
        *,
        common_error: type[WeftError] = UsageError,
    ) -> None:
        """Vote without recording the call. Collective.

        If every rank has the same error and it is a `common_error`, that error is raised.
        """
        own = None if error is None else [type(error).__name__, str(error)[:_TEXT_LIMIT]]
        values = self.gather("vote", {"action": action, "error": own}, timeout)
        votes = {rank: values[rank] for rank in self.living}
        failed = [rank for rank, vote in votes.items() if vote["error"] is not None]
        if not failed:
            return
        first = failed[0]
        action, (name, text) = votes[first]["action"], votes[first]["error"]
        if isinstance(error, common_error) and all(
            vote["error"] is not None and vote["error"][0] == name for vote in votes.values()
        ):
            raise type(error)(text) from error
        others = f" (and on rank {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
        raise CreationFailed(
            f"{action} failed on rank {first} of {self.size}{others}: {name}: {text}"
        ) from error

    def run_collective(self, step: Callable[[], T], *, action: str) -> T:
        """See `Group.run_collective`."""
        check_callable("step", step, "which every rank runs")
        check_instance("action", action, str)
        result, problem = None, None
        try:
            result = step()
        except Exception as error:
            problem = error
        try:
            self.vote(problem, action=action)
        finally:
            problem = None  # its traceback references this frame and those of the callers
        return cast("T", result)

    def agree(self, value: JSON, *, label: str) -> None:
        """See `Group.agree`."""
        check_instance("label", label, str)
        self.record(lambda messages: messages.check_equal(value, label))

    def check_equal(
        self, value: JSON, label: str, *, fix: str = "pass the same on every rank"
    ) -> None:
        """Check that all ranks pass an equal value, without recording the call. Collective.

        `fix` tells in the error what to do.
        """
        values = self.gather(f"agreement on {label}", value)
        first = self.living[0]
        for rank in self.living:
            if values[rank] != values[first]:
                theirs, ours = _describe_difference(values[rank], values[first])
                raise GeometryMismatch(
                    f"{label} differs: rank {first} has {ours} and rank {rank} has {theirs}; {fix}"
                )

    def exchange_fds(self, fd: int, *, timeout: float | None = None) -> list[int | None]:
        """See `Group.exchange_fds`."""
        fd = check_int("fd", fd, 0, (1 << 31) - 1)
        try:
            os.fstat(fd)
        except OSError as error:
            raise InvalidArgument(f"fd is {fd}; it must be an open descriptor: {error}") from error
        return self.control.exchange_fds(fd, self._resolve_timeout(timeout))

    def next_generation(self) -> int:
        """See `Group.next_generation`."""
        self.generation = self.next_number("generation", self.generation, 0xFFFF)
        return self.generation

    def next_number(self, label: str, last: int, limit: int) -> int:
        """See `Group.next_number`."""
        chosen: list[int] = []

        def choose() -> int:
            proposals = self.gather(label, last % limit + 1)
            # The maximum, because an interrupted creation may have begun on some ranks only.
            chosen.append(max(proposals[rank] for rank in self.living))
            return chosen[0]

        def check(messages: Messages) -> None:
            messages.check_equal(chosen[0], f"the {label} of an object", fix=_SAME_OBJECTS)

        return cast("int", self.record(check, choose))

    @contextlib.contextmanager
    def creation(
        self, *, is_workspace: bool = False, workspace: Creation | None = None
    ) -> Iterator[Creation]:
        """See `Group.creation`."""
        if self._creation is not None:  # part of another object
            yield self._creation
            return
        self._creation = Creation(workspace)
        try:
            yield self._creation
            if not is_workspace:
                self._creations = [entry for entry in self._creations if entry.exists]
                self._creations.append(self._creation)
        finally:
            self._creation = None

    def replay_creations(self) -> None:
        """Replay the calls that created all open objects, in order, with new processes."""
        creations: list[Creation] = []
        for creation in self._creations:
            if creation.exists:
                if creation.workspace is not None and creation.workspace not in creations:
                    creations.append(creation.workspace)
                creations.append(creation)
        self.check_equal(len(creations), "the number of open objects", fix=_SAME_OBJECTS)
        for creation in creations:
            for step in creation.steps:
                step(self)

    def record(self, step: Callable[[Messages], T], first_run: Callable[[], T] | None = None) -> T:
        """See `Group.record`."""
        creation, self._creation = self._creation, None
        try:
            result = step(self) if first_run is None else first_run()
        finally:
            self._creation = creation
        if creation is not None:
            creation.steps.append(step)
        return result

    def _resolve_timeout(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else check_seconds("timeout", timeout)


Step: TypeAlias = Callable[[Messages], object]


def _describe_difference(other: Any, first: Any) -> tuple[str, str]:
    """Format two unequal values for an error; of two dicts, only the keys that differ."""
    if not (isinstance(other, dict) and isinstance(first, dict)):
        return repr(other), repr(first)
    unset = object()
    keys = [k for k in {**first, **other} if other.get(k, unset) != first.get(k, unset)]
    theirs, ours = (
        ", ".join(f"{k}={d[k]!r}" if k in d else f"no {k}" for k in keys) for d in (other, first)
    )
    return theirs, ours
