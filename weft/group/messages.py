# SPDX-License-Identifier: Apache-2.0
"""The messages between the ranks of a group, by which they make an object together or not at all.

What a rank said while it made an object is noted, to be said again for one that joins later.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, cast

from weft.arguments import function, instance, integer, seconds
from weft.errors import (
    CreationFailed,
    GeometryMismatch,
    InvalidArgument,
    UsageError,
    WeftError,
)
from weft.group.wire import JSON

T = TypeVar("T")
Step = Callable[[Any], object]  # with the group that says it again
_TEXT_LIMIT = 4000  # characters of an error's text that a vote carries


class Control(Protocol):
    """What carries a group's control messages."""

    rank: int
    size: int

    def gather(self, op: str, value: JSON, timeout: float) -> list[Any]: ...
    def exchange_fds(self, fd: int, timeout: float) -> list[int | None]: ...
    def close(self, why: str | None = None) -> None: ...


class Creation:
    """The control messages of one constructor, and what it made: the object and its heaps.

    Attributes:
        workspace: Creation of the memory that this object shares with others, or None.
    """

    def __init__(self, workspace: Creation | None = None) -> None:
        self.steps: list[Step] = []
        self.workspace = workspace
        self._made: list[weakref.ref[object]] = []
        self._ended = False

    def add(self, made: object) -> None:
        """Belongs to this creation."""
        self._made.append(weakref.ref(made))

    def end(self) -> None:
        """Mark the object as closed: a new process does not make it."""
        self._ended = True

    @property
    def exists(self) -> bool:
        """Whether everything that was made is still there, and open."""
        made = [each() for each in self._made]
        is_open = all(each is not None and not getattr(each, "closed", False) for each in made)
        return bool(made) and is_open and not self._ended


class Messages:
    """The collective calls of a group, among the ranks that take part."""

    def __init__(self, control: Control, *, timeout: float) -> None:
        self.rank = control.rank
        self.size = size = control.size
        self.timeout = timeout
        self._control = control
        self._living = (1 << size) - 1  # bit r: rank r takes part
        self._generation = 0
        self._creations: list[Creation] = []
        self._creation: Creation | None = None  # that is under way
        self._is_newcomer = False  # between `join` and `enter`

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks that take part: all of them until a recovery continues without the dead."""
        return tuple(self._taking_part(range(self.size)))

    def _taking_part(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if self._living >> rank & 1]

    def all_gather(self, value: JSON, *, timeout: float | None = None) -> list[Any]:
        """Return every rank's value in rank order; None for a dead rank. Collective.

        Args:
            value: At most 1 MiB of JSON. Tuples return as lists.
            timeout: Seconds to wait. Default: the group's `timeout`.

        Raises:
            InvalidArgument: JSON cannot represent the value.
            RendezvousFailed: a rank died, closed its group or did not come in time.
        """
        return self.noted(lambda group: group._gather("all_gather", value, timeout))

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank has called it. Collective.

        Args:
            timeout: Seconds to wait. Default: the group's `timeout`.

        Raises:
            RendezvousFailed: a rank died, closed its group or did not come in time.
        """
        self.noted(lambda group: group._gather("barrier", None, timeout))

    def vote(
        self, error: BaseException | None, *, doing: str, undo: Callable[[], None] | None = None
    ) -> None:
        """Go on only if every rank can.

        Each rank passes what stopped it in `doing`, or None. If any passed an error, every rank
        raises the same: where all passed UsageErrors of one class, that class, with the first
        rank's text, for then the call is wrong on each; else CreationFailed naming the ranks. A
        rank's own error is the cause. On ranks that passed none `undo` gives back first what they
        had made; so it does if the vote itself fails.
        """
        if error is not None:
            instance("error", error, BaseException)
        instance("doing", doing, str)
        if undo is not None:
            function("undo", undo, "which gives back what was made")
        try:
            self.noted(lambda group: group._vote(None, doing), lambda: self._vote(error, doing))
        except BaseException:
            if error is None and undo is not None:
                undo()
            raise

    def _vote(
        self,
        error: BaseException | None,
        doing: str,
        timeout: float | None = None,
        *,
        alike: type[WeftError] = UsageError,
    ) -> None:
        """alike: errors that are raised as what they are where every rank has the same one."""
        mine = None if error is None else [type(error).__name__, str(error)[:_TEXT_LIMIT]]
        said = self._gather("vote", {"doing": doing, "error": mine}, timeout)
        votes = {rank: said[rank] for rank in self.living}
        failed = [r for r, vote in votes.items() if vote["error"] is not None]
        if not failed:
            return
        first = failed[0]
        name, text = votes[first]["error"]
        if isinstance(error, alike) and all(
            vote["error"] is not None and vote["error"][0] == name for vote in votes.values()
        ):
            raise type(error)(text) from error
        others = f" (and on rank {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
        raise CreationFailed(
            f"{votes[first]['doing']} failed on rank {first} of {self.size}{others}: {name}: {text}"
        ) from error

    def together(self, step: Callable[[], T], *, doing: str) -> T:
        """Run `step` on every rank, vote on how it went, and return its result.

        Raises as `vote` does, the same on every rank, if `step` raised on any.
        """
        function("step", step, "which every rank runs")
        instance("doing", doing, str)
        result, problem = None, None
        try:
            result = step()
        except Exception as error:
            problem = error
        try:
            self.vote(problem, doing=doing)
        finally:
            problem = None  # its traceback holds this frame, and its callers' frames
        return cast("T", result)

    def agree(self, value: JSON, *, what: str) -> None:
        """Check that every rank passes an equal `value`; `what` names it in the error.

        Raises GeometryMismatch with the same text on every rank, naming two ranks and, key by key
        for dicts, both values.
        """
        instance("what", what, str)
        self.noted(lambda group: group._agree(value, what))

    def _agree(self, value: JSON, what: str) -> None:
        values = self._gather(f"agreement on {what}", value, None)
        first = self.living[0]
        for rank in self.living:
            if values[rank] != values[first]:
                theirs, ours = _difference(values[rank], values[first])
                raise GeometryMismatch(
                    f"{what} differs: rank {first} has {ours} and rank {rank} has {theirs}; pass "
                    "the same on every rank"
                )

    def exchange_fds(self, fd: int, *, timeout: float | None = None) -> list[int | None]:
        """One file descriptor of every rank, in rank order; the own entry is a duplicate.

        None for a rank that is gone. The caller closes all of them. Raises RendezvousFailed as
        all_gather does, and InvalidArgument for a group without shared memory.
        """
        fd = integer("fd", fd, 0, (1 << 31) - 1)
        try:
            os.fstat(fd)
        except OSError as error:
            raise InvalidArgument(f"fd is {fd}; it must be an open descriptor: {error}") from error
        return self._control.exchange_fds(fd, self._deadline(timeout))

    def map_shares(
        self,
        export: Callable[[], int],
        take: Callable[[Mapping[int, int]], None],
        *,
        doing: str,
    ) -> None:
        """Pass a descriptor of every rank's share to all, which map them. Collective.

        export: a new descriptor of the own share.   take: maps shares, from the descriptor of each
        rank. None of them stays open: that would keep the memory alive after its owner's death.
        Raises CreationFailed on every rank, which names what was being done.
        """

        def pass_on(group: Any, ranks: Collection[int]) -> None:
            with contextlib.ExitStack() as opened:

                def exported() -> int:
                    fd = export()
                    opened.callback(os.close, fd)
                    return fd

                fds = group.exchange_fds(group.together(exported, doing="exporting memory"))
                found = {rank: fd for rank, fd in enumerate(fds) if fd is not None}
                for fd in found.values():
                    opened.callback(os.close, fd)
                wanted = {rank: fd for rank, fd in found.items() if rank in ranks}
                group.together(lambda: take(wanted), doing=doing)

        # What is noted must not hold this group: dropped, it is to be given back at once.
        self.noted(lambda group: pass_on(group, group.joining), lambda: pass_on(self, self.living))

    def next_generation(self) -> int:
        """Return 1, 2, ... 65535, 1, ...: the same on every rank. Collective."""
        self._generation = self.next_number("generation", self._generation, 0xFFFF)
        return self._generation

    def next_number(self, what: str, last: int, limit: int) -> int:
        """Return the number after `last`, from 1 to `limit`, the same on every rank. Collective.

        A new process gets the number that the survivors have given to the same object.
        """
        chosen: list[int] = []

        def choose() -> int:
            proposed = None if self._is_newcomer else last % limit + 1
            proposals = self._gather(what, proposed, None)
            # The largest: a creation that was interrupted had begun on some ranks only.
            chosen.append(max(each for each in proposals if each is not None))
            return chosen[0]

        return cast("int", self.noted(lambda group: group._gather(what, chosen[0], None), choose))

    @contextlib.contextmanager
    def creation(
        self, *, is_workspace: bool = False, workspace: Creation | None = None
    ) -> Iterator[Creation]:
        """Note the control messages inside, for a new process that makes the same object.

        Args:
            is_workspace: The object is memory that others share. A new process makes it with the
                first of them that is open.
            workspace: Creation of the memory that the object shares.
        """
        if self._creation is not None:  # part of another object
            yield self._creation
            return
        self._creation = Creation(workspace)
        try:
            yield self._creation
            if not is_workspace:
                self._creations = [each for each in self._creations if each.exists]
                self._creations.append(self._creation)
        finally:
            self._creation = None

    def creations_to_repeat(self) -> list[Creation]:
        """Return what a new process makes, in its order: all that is open."""
        creations: list[Creation] = []
        for each in self._creations:
            if each.exists:
                if each.workspace is not None and each.workspace not in creations:
                    creations.append(each.workspace)
                creations.append(each)
        return creations

    def noted(self, step: Callable[[Any], T], now: Callable[[], T] | None = None) -> T:
        """Take `step` with this group, and again for a rank that joins. now: what stands for it
        the first time.
        """
        creation, self._creation = self._creation, None
        try:
            found = step(self) if now is None else now()
        finally:
            self._creation = creation
        if creation is not None:
            creation.steps.append(step)
        return found

    def _gather(self, op: str, value: JSON, timeout: float | None) -> list[Any]:
        return self._control.gather(op, value, self._deadline(timeout))

    def _deadline(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else seconds("timeout", timeout)


def _difference(other: Any, first: Any) -> tuple[str, str]:
    """How two unequal values differ, as texts: key by key where both are dicts."""
    if not (isinstance(other, dict) and isinstance(first, dict)):
        return repr(other), repr(first)
    unset = object()
    keys = [k for k in {**first, **other} if other.get(k, unset) != first.get(k, unset)]
    theirs, ours = (
        ", ".join(f"{k}={d[k]!r}" if k in d else f"no {k}" for k in keys) for d in (other, first)
    )
    return theirs, ours
