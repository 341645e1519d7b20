# SPDX-License-Identifier: Apache-2.0
"""Reports of launched ranks, and the error that a launch raises for them."""

from __future__ import annotations

import pickle
import re
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from weft.errors import (
    CreationFailed,
    GeometryMismatch,
    GroupError,
    RankFailed,
    RendezvousFailed,
)


@dataclass(slots=True)
class Report:
    """Outcome of one rank.

    Attributes:
        timestamp: Time of the outcome in time.monotonic seconds, which are equal for all processes.
        echo: Whether the error only repeats another rank's: 0 for no, 1 for maybe, 2 for yes.
        blamed_ranks: Ranks that the error names as the ones that this rank waited for.
    """

    rank: int
    kind: Literal["returned", "raised", "died", "running"]
    value: Any = None
    error: BaseException | None = None
    name: str = ""
    text: str = ""
    trace: str = ""
    timestamp: float = 0.0
    echo: int = 0
    blamed_ranks: tuple[int, ...] = ()

    @classmethod
    def from_error(cls, rank: int, error: BaseException) -> Report:
        """Create the report of a rank whose function raised `error`."""
        trace = "".join(traceback.format_exception(error))
        return cls(
            rank,
            "raised",
            error=error,
            name=type(error).__name__,
            text=str(error),
            trace=trace,
            timestamp=time.monotonic(),
            echo=_classify_echo(error),
            blamed_ranks=_find_named_ranks(rank, error),
        )

    def summary(self, ranks: str = "") -> str:
        """Return the failure in one line; `ranks` is text such as " of 4"."""
        how = "died" if self.kind == "died" else f"raised {self.name}"
        return f"rank {self.rank}{ranks} {how}: {self.text}"

    def to_pickle(self) -> bytes:
        """Return the pickled report, without its error if that cannot be pickled."""
        if self.error is not None:
            try:
                pickle.loads(pickle.dumps(self.error))
            except Exception:
                self.error = None  # its name, text and traceback are in the report
        return pickle.dumps(self)


def run_and_report(
    rank: int, group: AbstractContextManager[Any], body: Callable[[], Any]
) -> Report:
    """Run `body` within `group` and return the report of its outcome.

    The timestamp precedes the close of the group, so that the errors of peers are later.
    """
    report: Report | None = None
    try:
        with group:
            try:
                return Report(rank, "returned", value=body(), timestamp=time.monotonic())
            except BaseException as error:
                report = Report.from_error(rank, error)
                raise
    except BaseException:
        if report is None:
            raise
        return report


def _classify_echo(error: BaseException, seen: frozenset[int] = frozenset()) -> int:
    """Return `Report.echo` of an error: whether it only repeats another rank's error."""
    if isinstance(error, GroupError | RendezvousFailed):
        return 2
    if isinstance(error, CreationFailed):
        return 2 if isinstance(error.__cause__, RendezvousFailed) else int(error.__cause__ is None)
    # The error may have been raised because of such an error, or while handling one.
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    seen |= {id(error)}
    if before is None or id(before) in seen:  # an error may be its own cause (raise e from e)
        return 0
    return min(1, _classify_echo(before, seen))


def _find_named_ranks(rank: int, error: BaseException) -> tuple[int, ...]:
    """Return the other ranks that `error` names if this rank's group broke while it waited.

    All errors of weft write a rank as "rank 3". A GeometryMismatch is not about a wait.
    """
    is_wait = isinstance(error, GroupError | RendezvousFailed)
    if not is_wait or isinstance(error, GeometryMismatch):
        return ()
    named = (int(number) for number in re.findall(r"\brank (\d{1,9})\b", str(error)))
    return tuple(other for other in dict.fromkeys(named) if other != rank)


def build_launch_error(reports: list[Report], ranks: int, timeout: float) -> RankFailed | None:
    """Return the error that a launch raises for its reports, or None if every rank returned.

    The error names one rank: preferably one that raised or died on its own, then one whose error
    names a rank that had returned, then the first in time. The exception of that rank is the
    `__cause__` if it could be pickled.
    """
    failed = [r for r in reports if r.kind in ("raised", "died")]
    running = [r.rank for r in reports if r.kind == "running"]
    if not failed and not running:
        return None
    if not failed:
        return RankFailed(
            f"rank {_join_ranks(running)} of {ranks} still ran after {timeout:g} s and was ended; "
            "raise `timeout`, or check what the rank waits for"
        )
    returned = {r.rank: r.timestamp for r in reports if r.kind == "returned"}
    missed = {
        r.rank: [rank for rank in r.blamed_ranks if returned.get(rank, r.timestamp) < r.timestamp]
        for r in failed
    }
    first = min(failed, key=lambda r: (r.echo, not missed[r.rank], r.timestamp))
    text = first.summary(f" of {ranks}")
    for rank in missed[first.rank]:
        seconds = first.timestamp - returned[rank]
        text += (
            f"\nRank {rank} had returned from its function {seconds:.2f} s before: every rank must "
            "make the same sequence of calls."
        )
    others = [f"rank {r.rank} ({r.name})" for r in failed if r is not first]
    if others:
        text += f"\nAlso failed: {', '.join(others)}."
    if running:
        text += f"\nEnded while still running: rank {_join_ranks(running)}."
    if first.trace:
        text += f"\n\nOn rank {first.rank}:\n{first.trace}"
    error = RankFailed(text)
    error.__cause__ = first.error
    return error


def _join_ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
