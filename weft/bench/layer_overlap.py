"""Does sending hide behind the second product? Each alone, then together, on one round's rows.

Together is what the layer does in its mode: rows that the product stores at their owners. In every
round the steps stand in one stream, with an event between two of them, which each step's time
holds.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.bench.clock import measure_steps
from weft.bench.layer_arrival import watch_rows
from weft.bench.layer_cases import LayerSettings
from weft.bench.layer_trial import LayerTrial
from weft.bench.moe import first_problem
from weft.errors import InvalidArgument
from weft.memory import Group
from weft.moe import ExpertWeights, MoE
from weft.moe.rank_major import RankMajor
from weft.ops.grouping import Grouped

OVERLAPPED = ("push",)  # modes that send while the second product runs
ALONE = ("product", "send")
TOGETHER = "together"


class SecondHalf:
    """Rounds of a layer in steps: its own exchange, rows, experts and way of overlapping.

    Raises InvalidArgument where the layer's exchange is another than that of rows by rank.
    """

    def __init__(self, trial: LayerTrial, layer: MoE, weights: ExpertWeights) -> None:
        work = layer._workspace
        if not isinstance(work, RankMajor):
            raise InvalidArgument("sending is measured with exchange 'rank' only")
        self._work, self._trial, self.weights = work, trial, weights
        self.group, self.a2a, self.hidden = work.group, work.exchange, layer.config.hidden
        self.pushes = work.options.overlap == "push"
        self._choice = layer.route(trial.logits)
        self._add = None if trial.shared is None else trial.shared(trial.x)
        work.expect(len(trial.x))
        self.groups, self.mlp = work._ready(), work._mlp
        self.grouped: Grouped | None = None
        self._y = trial.x

    def before(self) -> None:
        """All that comes before the second product."""
        received = self._work.dispatch(self._trial.x, *self._choice, None)
        self.grouped = self.groups.gather(received)
        self.mlp.up(self.weights, self.grouped)

    def product(self) -> None:
        """The second product."""
        self._y = self.mlp.down(self.weights)

    def send(self) -> None:
        """Every result to its owner, on all SMs."""
        self.groups.send(self._y)

    def together(self) -> None:
        """Both, as the mode has it."""
        self._work._come_home(self.weights, self.groups)
        if self.pushes:
            self.groups.sent()

    def after(self) -> None:
        """The sums at their owners."""
        self.a2a.combine_recv(out=self._trial.out, add=self._add)


def measure_overlap(
    group: Group,
    settings: LayerSettings,
    trial: LayerTrial,
    layer: MoE,
    weights: ExpertWeights,
) -> tuple[dict[str, list[float]], str | None]:
    """us by the names of ALONE and TOGETHER for each sample of this rank; what any found wrong.

    On GPUs with overlap "push" also what layer_arrival.py watches. Collective. The sums are
    compared with the reference after either way.
    """
    graph = settings.graph and layer.gemm != "loop"
    times: dict[str, list[float]] = {}

    half = SecondHalf(trial, layer, weights)

    def timed(**steps: Callable[[], None]) -> str | None:
        trial.poison()
        every = (half.before, *steps.values(), half.after)
        found = measure_steps(group, every, samples=settings.samples, graph=graph)
        times.update(zip(steps, found[1:-1], strict=True))
        return first_problem(group, trial.compare(layer))

    problem = timed(product=half.product, send=half.send) or timed(together=half.together)
    if problem is None and half.pushes and group.device.type == "cuda":
        times |= watch_rows(half)
    return times, problem
