"""Other libraries, measured in the same run where they are installed: same inputs, same clock.

Each runs in processes of its own, after ours: one that traps or hangs costs nothing but its rows.
What it returns is compared with `weft.reference` before it is timed. They promise less than we do
(order of slots, rounding), so the comparison is of numbers within a tolerance, not of bytes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from weft.bench.case import Case
from weft.bench.clock import Calls, measure
from weft.bench.peers import THIS_RUN, Peer
from weft.bench.run import SamplesOfRank, first_problem, gather
from weft.errors import RankFailed, WeftError
from weft.memory import launch

if TYPE_CHECKING:
    from weft.memory import Group

LIMIT_SECONDS = 900.0  # of one library, what it compiles included
MEASURED, ABSENT = "measured", "not installed"
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
_TEXT_LIMIT = 300  # characters of a failure's text


class RivalTrial(Protocol):
    """One size of a library, bound to its inputs. Collective."""

    def calls(self) -> Calls:
        """What is timed."""

    def check(self) -> str | None:
        """Call once; return how far the result is from the reference, or None."""


class Library(Protocol):
    """A library made for the largest size of a run."""

    def trial(self, tokens: int) -> RivalTrial:
        """Bind one size."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A library that may be installed.

    name: as the records begin.  setting: what tells it from others of that name, in words.
    module: to import.  distribution: to ask for its version.
    make: `(group, case, most tokens)` to the library; collective.
    refuses: why it cannot run this case, or None.
    sizes: `(case)` to those tokens of the run that it serves.
    fp8_back: its rows come home as FP8; measured only where ours do.
    """

    name: str
    module: str
    distribution: str
    make: Callable[[Group, Any, int], Library]
    refuses: Callable[[Any], str | None] = lambda case: None
    sizes: Callable[[Any], list[int]] = lambda case: list(case.tokens)
    setting: str = ""
    fp8_back: bool = False


@dataclass(frozen=True, slots=True)
class RivalRun:
    """What became of one library in this run.

    status: "measured", "not installed", or why there is no figure.
    samples_us: tokens -> phase -> for each rank, us per call of each sample.
    phase: the one that is shown beside ours.  setting, fp8_back: as in `Rival`.
    """

    name: str
    version: str
    status: str
    method: str = ""
    samples_us: dict[int, SamplesOfRank] = field(default_factory=dict)
    phase: str = "pair"
    setting: str = ""
    fp8_back: bool = False

    @property
    def library(self) -> str:
        """Name, version and setting, as tables show it."""
        name = f"{self.name} {self.version}".strip()
        return f"{name}, {self.setting}" if self.setting else name

    def peer(self, date: str) -> Peer:
        """The times as they are shown beside ours: median, slowest rank."""
        shown = {
            int(tokens): max(statistics.median(samples) for samples in phases[self.phase])
            for tokens, phases in self.samples_us.items()
        }
        return Peer(
            self.library, shown, "this machine", date, source=THIS_RUN, fp8_back=self.fp8_back
        )


def rivals_of(case: Case) -> tuple[Rival, ...]:
    """The libraries that do what this operator does."""
    if case.operator == "moe":
        from weft.bench.moe_rivals import RIVALS
    elif case.operator == "allreduce":
        from weft.bench.allreduce_rivals import RIVALS
    else:
        return ()
    return RIVALS


def measure_rivals(case: Case) -> list[RivalRun]:
    """Measure every library that is installed and serves this case; a failure is a status."""
    return [_attempt(rival, case) for rival in rivals_of(case)]


def beside(recorded: Sequence[Peer], runs: Sequence[RivalRun], date: str) -> list[Peer]:
    """Return what to show: the measured libraries, and the records of all others."""
    measured = [run for run in runs if run.status == MEASURED]
    kept = [
        peer
        for peer in recorded
        if not any(
            peer.library.startswith(run.name) and peer.fp8_back == run.fp8_back for run in measured
        )
    ]
    return [*(run.peer(date) for run in measured), *kept]


def _attempt(rival: Rival, case: Case) -> RivalRun:
    told: dict[str, Any] = {"setting": rival.setting, "fp8_back": rival.fp8_back}
    told["phase"] = case.whole
    if importlib.util.find_spec(rival.module) is None:
        return RivalRun(rival.name, "", ABSENT, **told)
    try:
        version = importlib.metadata.version(rival.distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "(unknown version)"
    asked = case.rival
    if asked is None:
        reason: str | None = "has nothing like it"
    elif rival.fp8_back and not case.fp8_back:
        reason = "not compared: our rows do not come back as fp8"
    else:
        reason = rival.refuses(asked)
        if reason is None and not rival.sizes(asked):
            reason = "serves none of these sizes"
    if reason is not None:
        return RivalRun(rival.name, version, reason, **told)
    try:
        first, *_ = launch(
            rival_body,
            (rival.name, rival.setting),
            asked,
            ranks=case.ranks,
            device=case.device,
            timeout=LIMIT_SECONDS,
        )
    except WeftError as error:
        cause = error.__cause__ if isinstance(error, RankFailed) else None
        what = cause or error
        text = f"failed: {type(what).__name__}: {what}"[:_TEXT_LIMIT]
        return RivalRun(rival.name, version, text, **told)
    return RivalRun(rival.name, version, **first, **told)


def rival_body(group: Group, which: tuple[str, str], case: Case) -> dict[str, Any]:
    """What every rank does for one library; all ranks return the same."""
    os.environ.update(NO_MULTICAST)  # the figures are for machines where it is off
    rival = next(each for each in rivals_of(case) if (each.name, each.setting) == which)
    sizes = rival.sizes(case)
    library = group.together(
        lambda: rival.make(group, case, max(sizes)), doing=f"making {rival.name}"
    )
    result: dict[str, Any] = {"status": MEASURED, "method": "", "samples_us": {}}
    for tokens in sizes:
        trial = library.trial(tokens)
        if problem := first_problem(group, trial.check()):
            return {**result, "status": f"check failed, {tokens} tokens: {problem}"}
        samples = measure(group, trial.calls(), samples=case.samples, graph=case.graph)
        result["method"] = samples.method
        result["samples_us"][tokens] = gather(group, samples)
    return result


def off_by(group: Group, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str | None:
    """How far numbers are from those wanted, or None; tolerance: a part of the largest one."""
    error = float((got.float() - want.float()).abs().max())
    allowed = tolerance * float(want.float().abs().max())
    if error <= allowed:  # false for NaN
        return None
    return f"rank {group.rank}: a number is off by {error:.3g}, allowed are {allowed:.3g}"
