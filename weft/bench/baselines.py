"""Baselines: other libraries, measured in the same run where they are installed.

They get the same inputs and the same clock. Each runs in processes of its own, after weft: one that
traps or hangs loses its own rows only. Its results are compared with `weft.reference` before it is
timed. Other libraries promise less than weft (order of slots, rounding), so numbers are compared
within a tolerance, and not bytes.
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


class BaselineTrial(Protocol):
    """One size of a library, bound to its inputs. Collective."""

    def calls(self) -> Calls:
        """What is timed."""

    def check(self) -> str | None:
        """Call once; return how far the result is from the reference, or None."""


class Library(Protocol):
    """A library made for the largest size of a run."""

    def trial(self, tokens: int) -> BaselineTrial:
        """Bind one size."""


def runs_all(case: Any) -> None:
    """Refuses no case."""


def all_sizes(case: Any) -> list[int]:
    """Every size of the run."""
    return list(case.tokens)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A library that may be installed. It is sent to processes: its functions are a module's own.

    name: as the records begin.  setting: how it differs from others of that name.
    module: to import.  distribution: to ask for its version.
    make: `(group, case, most tokens)` to the library; collective.
    refuses: why it cannot run this case, or None.
    sizes: the tokens of the run that it serves.
    fp8_back: its combine returns rows as FP8; measured only where weft's does.
    """

    name: str
    module: str
    distribution: str
    make: Callable[[Group, Any, int], Library]
    refuses: Callable[[Any], str | None] = runs_all
    sizes: Callable[[Any], list[int]] = all_sizes
    setting: str = ""
    fp8_back: bool = False


@dataclass(frozen=True, slots=True)
class BaselineRun:
    """What became of one library in this run.

    status: "measured", "not installed", or why there is no figure.
    samples_us: tokens -> phase -> for each rank, us per call of each sample.
    phase: the one that is shown next to weft's.  setting, fp8_back: as in `Baseline`.
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
        """The times as they are shown next to weft's: median, slowest rank."""
        shown = {
            int(tokens): max(statistics.median(samples) for samples in phases[self.phase])
            for tokens, phases in self.samples_us.items()
        }
        return Peer(
            self.library, shown, "this machine", date, source=THIS_RUN, fp8_back=self.fp8_back
        )


def measure_baselines(case: Case, baselines: Sequence[Baseline]) -> list[BaselineRun]:
    """Measure those that are installed and serve this case; a failure is a status."""
    return [_attempt(baseline, case) for baseline in baselines]


def merge_peers(recorded: Sequence[Peer], runs: Sequence[BaselineRun], date: str) -> list[Peer]:
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


def _attempt(baseline: Baseline, case: Case) -> BaselineRun:
    known: dict[str, Any] = {"setting": baseline.setting, "fp8_back": baseline.fp8_back}
    known["phase"] = case.whole
    if importlib.util.find_spec(baseline.module) is None:
        return BaselineRun(baseline.name, "", ABSENT, **known)
    try:
        version = importlib.metadata.version(baseline.distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "(unknown version)"
    asked = case.comparable
    if asked is None:
        reason: str | None = "has nothing like it"
    elif baseline.fp8_back and not case.fp8_back:
        reason = "not compared: weft's combine returns no fp8 rows"
    else:
        reason = baseline.refuses(asked)
        if reason is None and not baseline.sizes(asked):
            reason = "serves none of these sizes"
    if reason is not None:
        return BaselineRun(baseline.name, version, reason, **known)
    try:
        first, *_ = launch(
            baseline_body,
            baseline,
            asked,
            ranks=case.ranks,
            device=case.device,
            timeout=LIMIT_SECONDS,
        )
    except WeftError as error:
        cause = error.__cause__ if isinstance(error, RankFailed) else None
        what = cause or error
        text = f"failed: {type(what).__name__}: {what}"[:_TEXT_LIMIT]
        return BaselineRun(baseline.name, version, text, **known)
    return BaselineRun(baseline.name, version, **first, **known)


def baseline_body(group: Group, baseline: Baseline, case: Case) -> dict[str, Any]:
    """What every rank does for one library; all ranks return the same."""
    os.environ.update(NO_MULTICAST)  # the figures are for machines where it is off
    sizes = baseline.sizes(case)
    library = group.together(
        lambda: baseline.make(group, case, max(sizes)), doing=f"making {baseline.name}"
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
