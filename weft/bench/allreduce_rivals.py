"""Other all-reduces in the same run where they are installed: same rows, same clock.

Each runs in processes of its own, after ours: one that traps or hangs costs nothing but its rows.
What its first call returns is compared with `weft.reference`, within a tolerance, before it is
timed: they round after other sums than we do.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from weft.bench.allreduce_adapters import (
    ONE_SHOT_MOST,
    FlashInferReduce,
    SymmetricReduce,
    TorchReduce,
    forbid_multicast,
)
from weft.bench.allreduce_cases import ReduceSettings
from weft.bench.allreduce_trial import Rows, arguments_of, make_rows
from weft.bench.clock import measure_call
from weft.bench.moe import first_problem
from weft.bench.rivals import ABSENT, MEASURED, RivalRun, failure_text, version_of
from weft.errors import WeftError
from weft.memory import Group, launch
from weft.ops import reference

LIMIT_SECONDS = 600.0  # of one library, what it compiles included
TOLERANCE = 2.0**-5  # of the largest number: they may round after every add


class Reducer(Protocol):
    """A library made for the largest size."""

    def call(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Bind one size; the call returns the sum or the norm, `[tokens, hidden]`."""


@dataclass(frozen=True, slots=True)
class ReduceRival:
    """A library that may be installed.

    name: as the records begin.  module, distribution: to import, and to ask for its version.
    make: `(group, settings, most tokens)` to the library; collective.
    devices: where it runs.  ranks: numbers of ranks it serves.  least, most: tokens it serves;
    least as `(ranks)` tells.
    """

    name: str
    module: str
    distribution: str
    make: Callable[[Group, ReduceSettings, int], Reducer]
    devices: tuple[str, ...] = ("cuda",)
    ranks: tuple[int, ...] = tuple(range(2, 9))
    least: Callable[[int], int] = lambda ranks: 1
    most: int | None = None

    def sizes(self, settings: ReduceSettings) -> list[int]:
        """The sizes of the run that it serves."""
        least, most = self.least(settings.ranks), self.most or max(settings.tokens)
        return [size for size in settings.tokens if least <= size <= most]

    def refuses(self, settings: ReduceSettings) -> str | None:
        """Why it cannot run these settings, or None."""
        if settings.epilogue not in ("none", "norm"):
            return f"not compared with epilogue {settings.epilogue}"
        if settings.device not in self.devices:
            return "needs GPUs"
        if settings.ranks not in self.ranks:
            return f"serves {', '.join(map(str, self.ranks))} ranks, not {settings.ranks}"
        return None if self.sizes(settings) else "serves none of these sizes"


_EVEN = (2, 4, 8)  # numbers of ranks that FlashInfer has kernels for
_FLASHINFER = "flashinfer-python"
REDUCE_RIVALS: tuple[ReduceRival, ...] = (
    ReduceRival("torch all_reduce", "torch", "torch", TorchReduce, devices=("cuda", "cpu")),
    ReduceRival(
        "torch symm_mem one-shot",
        "torch",
        "torch",
        partial(SymmetricReduce, one_shot=True),
        most=ONE_SHOT_MOST,
    ),
    ReduceRival(
        "torch symm_mem two-shot", "torch", "torch", partial(SymmetricReduce, one_shot=False)
    ),
    ReduceRival(
        "FlashInfer trtllm one-shot",
        "flashinfer",
        _FLASHINFER,
        partial(FlashInferReduce, one_shot=True),
        ranks=_EVEN,
        most=ONE_SHOT_MOST,
    ),
    ReduceRival(
        "FlashInfer trtllm two-shot",
        "flashinfer",
        _FLASHINFER,
        partial(FlashInferReduce, one_shot=False),
        ranks=_EVEN,
        least=lambda ranks: ranks + 1,
    ),
)


def measure_reduce_rivals(settings: ReduceSettings) -> list[RivalRun]:
    """Measure every library that is installed and serves these settings; a failure is a status."""
    return [_attempt(rival, settings) for rival in REDUCE_RIVALS]


def _attempt(rival: ReduceRival, settings: ReduceSettings) -> RivalRun:
    if importlib.util.find_spec(rival.module) is None:
        return RivalRun(rival.name, "", ABSENT)
    version, reason = version_of(rival.distribution), rival.refuses(settings)
    if reason is not None:
        return RivalRun(rival.name, version, reason)
    try:
        first, *_ = launch(
            reduce_rival_body,
            rival.name,
            settings,
            ranks=settings.ranks,
            device=settings.device,
            timeout=LIMIT_SECONDS,
        )
    except WeftError as error:
        return RivalRun(rival.name, version, failure_text(error))
    return RivalRun(rival.name, version, phase="call", **first)


def reduce_rival_body(group: Group, name: str, settings: ReduceSettings) -> dict[str, Any]:
    """What every rank does for one library; all ranks return the same."""
    forbid_multicast()
    rival = next(rival for rival in REDUCE_RIVALS if rival.name == name)
    sizes = rival.sizes(settings)
    library = group.together(
        lambda: rival.make(group, settings, max(sizes)), doing=f"making {name}"
    )
    result: dict[str, Any] = {"status": MEASURED, "method": "", "samples_us": {}}
    for tokens in sizes:
        everyone = [make_rows(settings, tokens, rank, group.device) for rank in range(group.size)]
        rows = everyone[group.rank]
        call = library.call(rows)
        problem = _check(group, call, [each.x for each in everyone], settings, rows)
        if problem := first_problem(group, problem):
            return {**result, "status": f"check failed, {tokens} tokens: {problem}"}
        method, times = measure_call(group, call, samples=settings.samples, graph=settings.graph)
        result["method"] = method
        result["samples_us"][tokens] = {"call": group.all_gather(times)}
    return result


def _check(
    group: Group,
    call: Callable[[], torch.Tensor],
    xs: list[torch.Tensor],
    settings: ReduceSettings,
    rows: Rows,
) -> str | None:
    """Call once; return how far the result is from the reference, or None. Collective."""
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    group.barrier()
    got = call().float()
    found = reference.allreduce_fused(xs, **arguments_of(settings, rows))
    exact = found.out if settings.epilogue == "none" else found.norm
    assert exact is not None
    want = exact.float()
    error, allowed = float((got - want).abs().max()), TOLERANCE * float(want.abs().max())
    if error <= allowed:  # false for NaN
        return None
    return f"rank {group.rank}: a number is off by {error:.3g}, allowed are {allowed:.3g}"
