# SPDX-License-Identifier: Apache-2.0
"""Reports of launched ranks, and the choice of the report that names the cause of a failure."""

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
    """How one rank ended.

    Attributes:
        when: Time in time.monotonic seconds, which all processes of a host share.
        echo: How surely the error only repeats another rank's: 0 not at all, 1 perhaps, 2 surely.
        blamed: Ranks that this rank waited for, as its error names them.
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
        """Return the report of a rank whose function raised `error`."""
        trace = "".join(traceback.format_exception(error))
        return cls(
            rank,
            "raised",
            error=error,
            name=type(error).__name__,
            text=str(error),
            trace=trace,
            timestamp=time.monotonic(),
            echo=_echo_level(error),
            blamed_ranks=_named_ranks(rank, error),
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
    """Run `body` within `group` and report how it ended.

    The time is taken before the group informs the others, so no echo is earlier than its cause.
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


def _echo_level(error: BaseException, seen: frozenset[int] = frozenset()) -> int:
    """Return how surely `error` only repeats another rank's, see `Report.echo`."""
    if isinstance(error, GroupError | RendezvousFailed):
        return 2
    if isinstance(error, CreationFailed):
        return 2 if isinstance(error.__cause__, RendezvousFailed) else int(error.__cause__ is None)
    # Errors that a function raised because of such an error, or while it handled one.
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    seen |= {id(error)}
    if before is None or id(before) in seen:  # an error may be its own cause: raise e from e
        return 0
    return min(1, _echo_level(before, seen))


def _named_ranks(rank: int, error: BaseException) -> tuple[int, ...]:
    """Return the other ranks that `error` names if it reports that this rank's group broke.

    Every text of weft writes a rank as "rank 3". A GeometryMismatch blames no rank for a wait.
    """
    waited = isinstance(error, GroupError | RendezvousFailed)
    if not waited or isinstance(error, GeometryMismatch):
        return ()
    named = (int(each) for each in re.findall(r"\brank (\d{1,9})\b", str(error)))
    return tuple(each for each in dict.fromkeys(named) if each != rank)


def launch_error(reports: list[Report], ranks: int, timeout: float) -> RankFailed | None:
    """Return the error that a launch raises for its reports, or None if every rank returned.

    It names one rank: first those that raised or died on their own, then those that name a rank
    which had returned, then the first in time. The exception of that rank is the cause if it could
    be pickled.
    """
    failed = [r for r in reports if r.kind in ("raised", "died")]
    running = [r.rank for r in reports if r.kind == "running"]
    if not failed and not running:
        return None
    if not failed:
        return RankFailed(
            f"rank {_join_ranks(running)} of {ranks} still ran after {timeout:g} s and was ended; "
            "raise `timeout`, or look for what it waits for"
        )
    returned = {r.rank: r.timestamp for r in reports if r.kind == "returned"}
    missed = {
        r.rank: [each for each in r.blamed_ranks if returned.get(each, r.timestamp) < r.timestamp]
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
