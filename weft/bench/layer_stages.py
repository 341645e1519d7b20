"""Where a layer's time goes: its parts, each timed alone on one round's rows.

Alone, a part finds its predecessor's rows in the caches as they are left by itself, and no launch
of a neighbour hides its own: the parts add up to more than the layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeAlias

import torch

from weft.bench.clock import Phases, measure, measure_call
from weft.bench.layer_cases import LayerSettings
from weft.bench.layer_trial import LayerTrial
from weft.errors import InvalidArgument
from weft.memory import Group
from weft.moe import ExpertWeights, MoE
from weft.moe.products import make
from weft.moe.rank_major import RankMajor
from weft.ops.alltoall import AllToAll
from weft.ops.grouping import ExpertGroups
from weft.ops.received import Received

SPLIT = ("padded", "loop")  # ways of MoE that weft.moe.products has
GATHER_SCATTER = "gather + scatter"  # a scatter needs a gather before it
Call: TypeAlias = Callable[[], object]
STAGES = (
    *("route", "dispatch", "combine", "pair"),
    *("experts", "gather", GATHER_SCATTER, "up", "gating", "down", "shared"),
)


def measure_stages(
    group: Group,
    settings: LayerSettings,
    trial: LayerTrial,
    layer: MoE,
    weights: ExpertWeights,
) -> dict[str, list[float]]:
    """us of each part by the names of STAGES, one for each sample of this rank. Collective.

    pair: dispatch and combine back to back; their split has events between, which cost some us.
    experts: all between dispatch and combine as the layer does it; gather to down are its parts.
    Tiled products gate in the first one's epilogue: there is no "gating" of its own.
    """
    times: dict[str, list[float]] = {}

    def alone(name: str, call: Call) -> None:
        samples, graph = settings.samples, settings.graph and layer.gemm != "loop"
        times[name] = measure_call(group, call, samples=samples, graph=graph)[1]

    alone("route", lambda: layer.route(trial.logits))
    if trial.shared is not None:
        shared = trial.shared
        alone("shared", lambda: shared(trial.x))
    exchange = _by_rank(layer)
    ids, scale = layer.route(trial.logits)

    def dispatch() -> Received:
        return exchange.dispatch(trial.x, ids, scale)

    phases = Phases(dispatch, lambda: exchange.combine(out=trial.out))
    found = measure(group, phases, samples=settings.samples, graph=settings.graph)
    times |= {"dispatch": found.dispatch, "combine": found.combine, "pair": found.pair}
    received = dispatch()
    alone("experts", lambda: layer.experts(received))
    if layer.gemm in SPLIT:
        with contextlib.closing(_groups(settings, layer)) as groups:
            _inside(groups, layer, weights, received, alone)
    else:
        _inside_tiled(layer, weights, received, alone)
    exchange.combine(out=trial.out)
    layer.check()
    return times


def _groups(settings: LayerSettings, layer: MoE) -> ExpertGroups:
    """Groups of our own over the layer's exchange, as the layer has them."""
    layout = make(layer.gemm).layout
    return ExpertGroups(_by_rank(layer), max_rows=settings.max_rows, layout=layout)


def _by_rank(layer: MoE) -> AllToAll:
    """The layer's exchange. Raises InvalidArgument where it is another: its parts are others."""
    if not isinstance(layer.exchange, AllToAll):
        raise InvalidArgument("stages are measured with exchange 'rank' only")
    return layer.exchange


def _inside_tiled(
    layer: MoE, weights: ExpertWeights, received: Received, alone: Callable[[str, Call], None]
) -> None:
    """The parts of `experts` in the layer's own buffers."""
    work = layer._workspace
    assert isinstance(work, RankMajor)
    groups, mlp = work._ready(), work._mlp
    grouped = groups.gather(received)
    alone("gather", lambda: groups.gather(received))
    alone("up", lambda: mlp.up(weights, grouped))
    alone("down", lambda: mlp.down(weights))
    y = mlp.down(weights)

    def regroup() -> None:
        groups.gather(received)
        groups.scatter(y)

    alone(GATHER_SCATTER, regroup)


def _inside(
    groups: ExpertGroups,
    layer: MoE,
    weights: ExpertWeights,
    received: Received,
    alone: Callable[[str, Call], None],
) -> None:
    """The parts of `experts`, on the rows of one round."""
    config = layer.config
    grouped = groups.gather(received)
    alone("gather", lambda: groups.gather(received))
    x = grouped.x if grouped.x.dtype == config.dtype else grouped.x.to(config.dtype)
    products = make(layer.gemm)
    used = products.begin(grouped)

    def rows(columns: int) -> torch.Tensor:
        # Zeros: rows that nobody has are multiplied, too, and must not be slower than others.
        return x.new_zeros(*x.shape[:-1], columns)

    h, act, y = rows(2 * config.intermediate), rows(config.intermediate), rows(config.hidden)
    before, inner, after = (buffer[:used] for buffer in (h, act, y))

    def up() -> None:
        products.multiply(x[:used], weights.gate_up, weights.gate_up_bias, before)

    def down() -> None:
        products.multiply(inner, weights.down, weights.down_bias, after)

    alone("up", up)
    alone("gating", lambda: config.gating.apply(before, out=inner))
    alone("down", down)

    def regroup() -> None:
        groups.gather(received)
        groups.scatter(y)

    alone(GATHER_SCATTER, regroup)
