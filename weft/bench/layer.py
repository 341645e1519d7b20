"""`weft bench layer`: whole MoE layers by size and overlap, checked first, then timed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from weft.bench.allreduce import gpu_names
from weft.bench.clock import measure_call
from weft.bench.layer_cases import LayerSettings
from weft.bench.layer_load import Load, load_of
from weft.bench.layer_overlap import OVERLAPPED, measure_overlap
from weft.bench.layer_stages import measure_stages
from weft.bench.layer_trial import LayerTrial
from weft.bench.layer_weights import shared_expert, stack
from weft.bench.machine import describe_machine
from weft.bench.moe import LIMIT_SECONDS, first_problem
from weft.bench.progress import progress
from weft.errors import CreationFailed, InvalidArgument
from weft.memory import Group, launch
from weft.moe import ExpertWeights, LayerChoice, MoE
from weft.ops.placement import Placement


@dataclass(frozen=True, slots=True)
class LayerMeasurement:
    """One size in one mode.

    samples: for each rank, us per layer of each sample.   method: how they were taken.
    stages: part -> the same, where they were asked for: of "none" those of layer_stages.py, of
        modes that overlap the second product with sending those of layer_overlap.py.
    """

    tokens: int
    overlap: str
    method: str
    samples: list[list[float]]
    stages: dict[str, list[list[float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerReport:
    """A whole run. problem: what a check found wrong; nothing is timed from there on.

    loads: by tokens.   refused: modes that weft.MoE does not offer for this layer, in its words,
    where all that there are were asked for.
    gemm: how the experts multiply.   choices: by tokens, what "auto" takes and why.
    """

    settings: LayerSettings
    machine: dict[str, Any]
    measurements: list[LayerMeasurement]
    loads: dict[int, Load]
    refused: list[str]
    gemm: str
    problem: str | None = None
    choices: dict[int, LayerChoice] = field(default_factory=dict)

    @property
    def nothing_offered(self) -> bool:
        """Was every mode refused, so that there was nothing to check and to time?"""
        return not self.measurements and self.problem == "; ".join(self.refused)


def run(settings: LayerSettings, *, quiet: bool = False) -> LayerReport:
    """Start the ranks, check and time every size in every mode.

    Raises what `weft.launch` raises.
    """
    results: list[dict[str, Any]] = launch(
        rank_body,
        settings,
        quiet,
        ranks=settings.ranks,
        device=settings.device,
        timeout=LIMIT_SECONDS,
    )
    return report_of(settings, results[0])


def report_of(settings: LayerSettings, result: dict[str, Any]) -> LayerReport:
    """What rank 0's result of `rank_body` says."""
    measurements = [LayerMeasurement(**found) for found in result["measurements"]]
    choices = {tokens: LayerChoice(**found) for tokens, found in result["choices"].items()}
    parts = {"measurements": measurements, "choices": choices}
    parts["loads"] = {tokens: load_of(settings, tokens) for tokens in settings.tokens}
    return LayerReport(settings, **(result | parts))


def rank_body(group: Group, settings: LayerSettings, quiet: bool) -> dict[str, Any]:
    """What every rank does; rank 0's result is complete."""
    result: dict[str, Any] = {
        "machine": describe_machine(gpu_names(group)),
        "measurements": [],
        "refused": [],
        "gemm": "",
        "problem": None,
        "choices": {},
    }
    words = settings.overlap_words
    placement = Placement.blocks(settings.config.routing.num_experts, group.size)
    weights = stack(settings, placement.experts_of(group.rank), group.device)
    shared = shared_expert(settings, group.device)
    steps = len(settings.tokens) * len(words)
    with progress(steps, quiet=quiet or group.rank != 0) as step:
        for tokens in settings.tokens:
            trial = LayerTrial(group, settings, shared, tokens)
            for overlap in words:
                step(f"{tokens} tokens, overlap {overlap}")
                try:
                    layer = open_layer(group, settings, trial, overlap, weights)
                except (CreationFailed, InvalidArgument) as error:
                    if settings.overlaps:
                        raise  # it was asked for by name
                    said = f"{type(error).__name__}: {error}"
                    result["refused"].append(f"{tokens} tokens, overlap {overlap}: {said}")
                    continue
                with layer:
                    result["gemm"] = layer.gemm
                    result["choices"].setdefault(tokens, asdict(layer.explain()))
                    found, problem = _measure(group, settings, trial, layer, weights, overlap)
                    group.barrier()  # a peer may still be reading what is about to go
                if problem is not None:
                    result["problem"] = f"{tokens} tokens, overlap {overlap}: {problem}"
                    return result
                result["measurements"].append({"tokens": tokens, "overlap": overlap, **found})
    if not result["measurements"]:
        result["problem"] = "; ".join(result["refused"])
    return result


def open_layer(
    group: Group,
    settings: LayerSettings,
    trial: LayerTrial,
    overlap: str,
    weights: ExpertWeights,
    *,
    profile: bool = False,
) -> MoE:
    """The layer of one mode, with room for exactly the trial's tokens. Collective."""
    return MoE(
        group,
        settings.config,
        weights,
        shared=trial.shared,
        correction=trial.correction,
        profile=profile,
        **settings.moe_options(overlap, len(trial.x)),
    )


def _measure(
    group: Group,
    settings: LayerSettings,
    trial: LayerTrial,
    layer: MoE,
    weights: ExpertWeights,
    overlap: str,
) -> tuple[dict[str, Any], str | None]:
    """Check, time, check again; the measurement, and what any rank found wrong."""
    if problem := first_problem(group, trial.check(layer)):
        return {}, problem
    trial.poison()
    graph = settings.graph and layer.gemm != "loop"
    method, times = measure_call(
        group, lambda: trial.call(layer), samples=settings.samples, graph=graph
    )
    if problem := first_problem(group, trial.compare(layer)):
        return {}, f"after timing, {problem}"
    stages: dict[str, list[float]] = {}
    if settings.stages and overlap == "none":
        stages = measure_stages(group, settings, trial, layer, weights)
    elif settings.stages and overlap in OVERLAPPED:
        stages, problem = measure_overlap(group, settings, trial, layer, weights)
        if problem is not None:
            return {}, f"product and send, {problem}"
    parts = group.all_gather(stages)
    return {
        "method": method,
        "samples": group.all_gather(times),
        "stages": {name: [each[name] for each in parts] for name in stages},
    }, None
