# SPDX-License-Identifier: Apache-2.0
"""What a launched rank reports, and which report names the cause of a failure."""

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
    """How one rank ended. `when` is time.monotonic(), which all processes of a host share."""

    rank: int
    kind: Literal["returned", "raised", "died", "running"]
    value: Any = None
    error: BaseException | None = None
    name: str = ""
    text: str = ""
    trace: str = ""
    when: float = 0.0
    echo: int = 0  # how surely the error only repeats another rank's
    blamed: tuple[int, ...] = ()  # ranks that this one waited for, as its error names them

    @classmethod
    def raised(cls, rank: int, error: BaseException) -> Report:
        """The report of a rank whose function raised `error`."""
        trace = "".join(traceback.format_exception(error))
        return cls(
            rank,
            "raised",
            error=error,
            name=type(error).__name__,
            text=str(error),
            trace=trace,
            when=time.monotonic(),
            echo=_echo(error),
            blamed=_blamed(rank, error),
        )

    def line(self, ranks: str = "") -> str:
        """The failure in one line. ranks: " of 4", where that is said."""
        how = "died" if self.kind == "died" else f"raised {self.name}"
        return f"rank {self.rank}{ranks} {how}: {self.text}"

    def packed(self) -> bytes:
        """The report for the launcher's own pipe; an error that cannot be pickled stays here."""
        if self.error is not None:
            try:
                pickle.loads(pickle.dumps(self.error))
            except Exception:
                self.error = None  # its name, text and traceback travel as text
        return pickle.dumps(self)


def report_of(rank: int, group: AbstractContextManager[Any], body: Callable[[], Any]) -> Report:
    """Run `body` within `group` and report how it ended.

    Its time is taken before the group informs the others: no echo is earlier than its cause.
    """
    report: Report | None = None
    try:
        with group:
            try:
                return Report(rank, "returned", value=body(), when=time.monotonic())
            except BaseException as error:
                report = Report.raised(rank, error)
                raise
    except BaseException:
        if report is None:
            raise
        return report


def _echo(error: BaseException, seen: frozenset[int] = frozenset()) -> int:
    """How surely `error` only repeats another rank's: 0 not at all, 1 perhaps, 2 surely."""
    if isinstance(error, GroupError | RendezvousFailed):
        return 2
    if isinstance(error, CreationFailed):
        return 2 if isinstance(error.__cause__, RendezvousFailed) else int(error.__cause__ is None)
    # What a function raised because of such an error, or while it cleared up after one.
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    seen |= {id(error)}
    if before is None or id(before) in seen:  # an error may be its own cause: raise e from e
        return 0
    return min(1, _echo(before, seen))


def _blamed(rank: int, error: BaseException) -> tuple[int, ...]:
    """The other ranks that `error` names, where it says that the group broke under this rank.

    Every text of weft calls a rank "rank 3". Ranks with another geometry were waited for in vain
    by nobody.
    """
    waited = isinstance(error, GroupError | RendezvousFailed)
    if not waited or isinstance(error, GeometryMismatch):
        return ()
    named = (int(each) for each in re.findall(r"\brank (\d{1,9})\b", str(error)))
    return tuple(each for each in dict.fromkeys(named) if each != rank)


def failure(reports: list[Report], ranks: int, timeout: float) -> RankFailed | None:
    """The error that a launch raises for `reports`, one a rank; None if every rank returned.

    A rank that raised or died on its own comes before ranks that noticed it; among these, one that
    names a rank which had returned comes first; else the first in time. The chosen rank's own
    exception is the cause where it could travel.
    """
    failed = [r for r in reports if r.kind in ("raised", "died")]
    running = [r.rank for r in reports if r.kind == "running"]
    if not failed and not running:
        return None
    if not failed:
        return RankFailed(
            f"rank {_list(running)} of {ranks} still ran after {timeout:g} s and was ended; raise "
            "`timeout`, or look for what it waits for"
        )
    returned = {r.rank: r.when for r in reports if r.kind == "returned"}
    missed = {
        r.rank: [each for each in r.blamed if returned.get(each, r.when) < r.when] for r in failed
    }
    first = min(failed, key=lambda r: (r.echo, not missed[r.rank], r.when))
    text = first.line(f" of {ranks}")
    for rank in missed[first.rank]:
        text += (
            f"\nRank {rank} had returned from its function {first.when - returned[rank]:.2f} s "
            "before: every rank must make the same sequence of calls."
        )
    others = [f"rank {r.rank} ({r.name})" for r in failed if r is not first]
    if others:
        text += f"\nAlso failed: {', '.join(others)}."
    if running:
        text += f"\nEnded while still running: rank {_list(running)}."
    if first.trace:
        text += f"\n\nOn rank {first.rank}:\n{first.trace}"
    error = RankFailed(text)
    error.__cause__ = first.error
    return error


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
