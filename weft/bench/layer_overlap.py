"""Does sending hide behind the second product? Each alone, then together, on one round's rows.

Together is what the layer does in its mode: parts sent while the next are multiplied, or rows that
the product stores at their owners. In every round the steps stand in one stream, with an event
between two of them, which each step's time holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from weft.bench.clock import measure_steps
from weft.bench.layer_arrival import watch_rows
from weft.bench.layer_cases import LayerSettings
from weft.bench.layer_trial import LayerTrial
from weft.bench.moe import first_problem
from weft.memory import Group
from weft.moe import ExpertWeights, MoE
from weft.moe.mlp import Mlp, layout_for, make_mlp
from weft.moe.overlap import HOME, PARTS, SEND_SMS, Beside, send_by_columns
from weft.ops.alltoall import AllToAll
from weft.ops.grouping import ExpertGroups, Grouped

OVERLAPPED = ("columns", "push")  # modes that send while the second product runs
ALONE = ("product", "send")
TOGETHER = "together"


class SecondHalf:
    """A layer's round in steps, on an exchange of its own that has halves."""

    def __init__(
        self,
        group: Group,
        settings: LayerSettings,
        trial: LayerTrial,
        layer: MoE,
        weights: ExpertWeights,
        overlap: str,
    ) -> None:
        self.group, self.trial, self.weights, self.overlap = group, trial, weights, overlap
        config, routing, device = layer.config, layer.config.routing, group.device
        self.ids, self.scale = layer.route(trial.logits)
        self.add = None if trial.shared is None else trial.shared(trial.x)
        self.a2a = AllToAll(
            group,
            max_tokens=len(trial.x),
            top_k=routing.top_k,
            num_experts=routing.num_experts,
            hidden=config.hidden,
            dtype=config.dtype,
            timeout=30.0,
            quantize=settings.wire,
            combine_by=settings.combine_by or HOME[overlap],
            halves=True,
        )
        layout, align = layout_for(layer.gemm)
        self.groups = ExpertGroups(self.a2a, max_rows=settings.max_rows, align=align, layout=layout)
        experts, rows = self.a2a.num_local_experts, self.groups.max_rows
        shape = (experts, rows) if layout == "masked" else (rows,)
        fp8 = settings.dtype == "fp8"
        self.mlp: Mlp = make_mlp(
            layer.gemm, config, shape, experts, fp8=fp8, quantize=settings.wire,
            programmatic=True, device=device,
        )  # fmt: skip
        total = len(trial.x) * group.size * routing.top_k
        self.mlp.expect(-(-total // routing.num_experts))
        self.hidden, self.sends = config.hidden, Beside(device, priority=-1)
        self.num_sms = SEND_SMS if device.type == "cuda" else None
        self.grouped: Grouped | None = None
        self.y = trial.x

    def before(self) -> None:
        """All that comes before the second product."""
        trial = self.trial
        self.grouped = self.groups.gather(self.a2a.dispatch(trial.x, self.ids, self.scale))
        self.mlp.up(self.weights, self.grouped)

    def product(self) -> None:
        """The second product, all columns."""
        self.y = self.mlp.down(self.weights)

    def send(self) -> None:
        """Every result to its owner, on all SMs."""
        self.groups.send(self.y)

    def together(self) -> None:
        """Both, as the mode has it."""
        if self.overlap == "push":
            self.mlp.push(self.weights)
            self.groups.sent()
            return
        send_by_columns(
            self.mlp,
            self.weights,
            self.groups,
            self.sends,
            hidden=self.hidden,
            parts=PARTS,
            num_sms=self.num_sms,
        )

    def after(self) -> None:
        """The sums at their owners."""
        self.a2a.combine_recv(out=self.trial.out, add=self.add)

    def close(self) -> None:
        """Give everything back."""
        self.groups.close()
        self.a2a.close()


@contextlib.contextmanager
def second_half(
    group: Group,
    settings: LayerSettings,
    trial: LayerTrial,
    layer: MoE,
    weights: ExpertWeights,
    overlap: str,
) -> Iterator[SecondHalf]:
    """A SecondHalf that is closed when no peer reads it any more. Collective."""
    half = SecondHalf(group, settings, trial, layer, weights, overlap)
    try:
        yield half
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        group.barrier()
    finally:
        half.close()


def measure_overlap(
    group: Group,
    settings: LayerSettings,
    trial: LayerTrial,
    layer: MoE,
    weights: ExpertWeights,
    overlap: str,
) -> tuple[dict[str, list[float]], str | None]:
    """us by the names of ALONE and TOGETHER for each sample of this rank; what any found wrong.

    On GPUs with overlap "push" also what layer_arrival.py watches. Collective. The sums are
    compared with the reference after either way.
    """
    graph = settings.graph and layer.gemm != "loop"
    times: dict[str, list[float]] = {}

    with second_half(group, settings, trial, layer, weights, overlap) as half:

        def timed(**steps: Callable[[], None]) -> str | None:
            trial.poison()
            every = (half.before, *steps.values(), half.after)
            found = measure_steps(group, every, samples=settings.samples, graph=graph)
            times.update(zip(steps, found[1:-1], strict=True))
            half.a2a.check()
            return first_problem(group, trial.compare(layer))

        problem = timed(product=half.product, send=half.send) or timed(together=half.together)
        if problem is None and overlap == "push" and group.device.type == "cuda":
            times |= watch_rows(half)
    return times, problem
