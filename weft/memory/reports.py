"""What a launched rank reports, and which report names the cause of a failure."""

from __future__ import annotations

import pickle
import time
import traceback
from dataclasses import dataclass
from typing import Any, Literal

from weft.errors import CreationFailed, GroupError, RankFailed, RendezvousFailed


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

    @classmethod
    def raised(cls, rank: int, error: BaseException) -> Report:
        """What a rank says when its function raised `error`."""
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
        )

    def packed(self) -> bytes:
        """The report for the launcher's own pipe; an error that cannot travel stays behind."""
        if self.error is not None:
            try:
                pickle.loads(pickle.dumps(self.error))
            except Exception:
                self.error = None  # its name, text and traceback travel as text
        return pickle.dumps(self)


def _echo(error: BaseException) -> int:
    if isinstance(error, GroupError | RendezvousFailed):
        return 2
    if isinstance(error, CreationFailed):
        return 2 if isinstance(error.__cause__, RendezvousFailed) else int(error.__cause__ is None)
    return 0


def failure(reports: list[Report], ranks: int, timeout: float) -> RankFailed | None:
    """The error that a launch raises for `reports`, one a rank; None if every rank returned.

    A rank that raised or died on its own comes before ranks that noticed it, and the first in time
    before the others. The chosen rank's own exception is the cause where it could travel.
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
    first = min(failed, key=lambda r: (r.echo, r.when))
    if first.kind == "died":
        text = f"rank {first.rank} of {ranks} died: {first.text}"
    else:
        text = f"rank {first.rank} of {ranks} raised {first.name}: {first.text}"
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
