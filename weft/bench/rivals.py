"""Other libraries, measured in the same run where they are installed: same inputs, same clock.

Each runs in processes of its own, after ours: one that traps or hangs costs nothing but its rows.
What it returns is compared with `weft.reference` before it is timed. They promise less than we do
(order of slots, rounding), so the comparison is of numbers within a tolerance, not of bytes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from weft.bench.adapters import (
    DEEPEP_MOST,
    DeepEP,
    FlashInfer,
    deepep_refuses,
    flashinfer_refuses,
)
from weft.bench.allreduce_adapters import forbid_multicast
from weft.bench.cases import Settings
from weft.bench.clock import Phases, measure
from weft.bench.moe import first_problem, gather_samples
from weft.bench.peers import THIS_RUN, Peer
from weft.bench.trial import Inputs, make_inputs, rows_of
from weft.errors import RankFailed, WeftError
from weft.memory import launch
from weft.ops import reference
from weft.ops.placement import Placement

if TYPE_CHECKING:
    from weft.memory import Group

LIMIT_SECONDS = 900.0  # of one library, what it compiles included
MEASURED, ABSENT = "measured", "not installed"
_TEXT_LIMIT = 300  # characters of a failure's text


class Call(Protocol):
    """One size of a library, bound to its inputs. Collective."""

    def dispatch(self) -> object:
        """Send the tokens."""

    def experts(self) -> None:
        """Write identity experts' answers where `combine` reads them; not timed."""

    def combine(self) -> torch.Tensor:
        """Return the sums, `[tokens, hidden]`."""


class Library(Protocol):
    """A library made for the largest size. tolerance: error allowed, of the largest number."""

    tolerance: float

    def call(self, inputs: Inputs, tokens: int) -> Call:
        """Bind one size."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A library that may be installed.

    name: as the records begin.  module: to import.  distribution: to ask for its version.
    make: `(group, settings, most tokens)` to the library; collective.
    refuses: why it cannot run these settings, or None.  most: tokens a rank that it serves.
    setting: what tells it from others of that name, in words.
    fp8_home: its rows come back as FP8; measured only where ours do.
    """

    name: str
    module: str
    distribution: str
    make: Callable[[Group, Settings, int], Library]
    refuses: Callable[[Settings], str | None]
    most: int | None = None
    setting: str = ""
    fp8_home: bool = False

    def sizes(self, settings: Settings) -> list[int]:
        """The sizes of the run that it serves."""
        return [size for size in settings.tokens if self.most is None or size <= self.most]


_FLASHINFER = "flashinfer-python"
RIVALS: tuple[Rival, ...] = (
    Rival("FlashInfer", "flashinfer", _FLASHINFER, FlashInfer, flashinfer_refuses),
    Rival(
        "FlashInfer",
        "flashinfer",
        _FLASHINFER,
        partial(FlashInfer, home="fp8"),
        flashinfer_refuses,
        setting="low-precision back",
        fp8_home=True,
    ),
    Rival(
        "FlashInfer",
        "flashinfer",
        _FLASHINFER,
        partial(FlashInfer, home="fp8-staged"),
        flashinfer_refuses,
        setting="low-precision back, staged",
        fp8_home=True,
    ),
    Rival("DeepEP v1", "deep_ep", "deep_ep", DeepEP, deepep_refuses, most=DEEPEP_MOST),
)


@dataclass(frozen=True, slots=True)
class RivalRun:
    """What became of one library in this run.

    status: "measured", "not installed", or why there is no figure.
    samples_us: tokens -> phase -> for each rank, us per call of each sample.
    phase: the one that is shown beside ours.  setting, fp8_home: as in `Rival`.
    """

    name: str
    version: str
    status: str
    method: str = ""
    samples_us: dict[int, dict[str, list[list[float]]]] = field(default_factory=dict)
    phase: str = "pair"
    setting: str = ""
    fp8_home: bool = False

    @property
    def library(self) -> str:
        """Name, version and setting, as tables show it."""
        name = f"{self.name} {self.version}".strip()
        return f"{name}, {self.setting}" if self.setting else name

    def peer(self, date: str) -> Peer:
        """The times as they are shown beside ours: median, slowest rank."""
        shown = {
            tokens: max(statistics.median(samples) for samples in phases[self.phase])
            for tokens, phases in self.samples_us.items()
        }
        return Peer(
            self.library, shown, "this machine", date, source=THIS_RUN, fp8_home=self.fp8_home
        )


def measure_rivals(settings: Settings) -> list[RivalRun]:
    """Measure every library that is installed and serves these settings; a failure is a status."""
    return [_attempt(rival, settings) for rival in RIVALS]


def beside(recorded: Sequence[Peer], runs: Sequence[RivalRun], date: str) -> list[Peer]:
    """Return what to show: the measured libraries, and the records of all others."""
    measured = [run for run in runs if run.status == MEASURED]
    kept = [
        peer
        for peer in recorded
        if not any(
            peer.library.startswith(run.name) and peer.fp8_home == run.fp8_home for run in measured
        )
    ]
    return [*(run.peer(date) for run in measured), *kept]


def _attempt(rival: Rival, settings: Settings) -> RivalRun:
    told: dict[str, Any] = {"setting": rival.setting, "fp8_home": rival.fp8_home}
    if importlib.util.find_spec(rival.module) is None:
        return RivalRun(rival.name, "", ABSENT, **told)
    version = version_of(rival.distribution)
    asked = settings.rival
    if asked is None:
        return RivalRun(rival.name, version, f"sends no {settings.quantize}", **told)
    reason = rival.refuses(asked)
    if rival.fp8_home and settings.combine_by != "fp8":
        reason = "not compared: our rows do not come back as fp8"
    if settings.device != "cuda":
        reason = "needs GPUs"
    if reason is not None:
        return RivalRun(rival.name, version, reason, **told)
    settings = asked
    try:
        first, *_ = launch(
            rival_body,
            rival.name,
            rival.setting,
            settings,
            ranks=settings.ranks,
            device=settings.device,
            timeout=LIMIT_SECONDS,
        )
    except WeftError as error:
        return RivalRun(rival.name, version, failure_text(error), **told)
    return RivalRun(rival.name, version, **first, **told)


def rival_body(group: Group, name: str, setting: str, settings: Settings) -> dict[str, Any]:
    """What every rank does for one library; all ranks return the same."""
    forbid_multicast()
    rival = next(rival for rival in RIVALS if (rival.name, rival.setting) == (name, setting))
    sizes = rival.sizes(settings)
    library = group.together(
        lambda: rival.make(group, settings, max(sizes)), doing=f"making {name}"
    )
    result: dict[str, Any] = {"status": MEASURED, "method": "", "samples_us": {}}
    for tokens in sizes:
        inputs = make_inputs(settings, tokens, group.rank).to(group.device)
        call = library.call(inputs, tokens)
        if problem := first_problem(group, _check(group, settings, inputs, call, library)):
            return {**result, "status": f"check failed, {tokens} tokens: {problem}"}
        phases = Phases(dispatch=call.dispatch, combine=call.combine)
        samples = measure(group, phases, samples=settings.samples, graph=settings.graph)
        result["method"] = samples.method
        result["samples_us"][tokens] = gather_samples(group, samples)
    return result


def _check(
    group: Group, settings: Settings, inputs: Inputs, call: Call, library: Library
) -> str | None:
    """Run one round; return how far its sums are from the reference, or None. Collective."""
    call.dispatch()
    call.experts()
    got = call.combine()
    expected = reference.identity_round_trip(
        rows_of(inputs.payloads, settings.out_dtype),
        inputs.ids,
        inputs.weights,
        Placement.blocks(settings.experts, group.size),
        ranks=group.size,
    )
    error = float((got.float() - expected.float()).abs().max())
    allowed = library.tolerance * float(expected.float().abs().max())
    if error <= allowed:  # false for NaN
        return None
    return f"rank {group.rank}: a sum is off by {error:.3g}, allowed are {allowed:.3g}"


def version_of(distribution: str) -> str:
    """The version of an installed distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


def failure_text(error: WeftError) -> str:
    """What became of a library whose ranks raised this."""
    cause = error.__cause__ if isinstance(error, RankFailed) else None
    told = cause or error
    return f"failed: {type(told).__name__}: {told}"[:_TEXT_LIMIT]
