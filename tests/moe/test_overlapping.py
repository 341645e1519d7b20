# SPDX-License-Identifier: Apache-2.0
"""Rounds with and without overlap, compared on the device, under all schedules.

Every round draws or is given new tokens and routing, is poisoned where nothing of it may be read,
runs one layer without overlap and one with it, and adds the words in which they differ to a counter
on the device. No host waits between rounds, so fast ranks run ahead of slow ones.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import weft
from tests.moe.layers import EXPERTS, WIDER, Case
from tests.moe.test_layer import settle
from weft.alltoall.operator import AllToAll
from weft.moe import MoEConfig, Routing
from weft.moe.experts.grouped_experts import GroupedExperts

CONFIG = MoEConfig(WIDER, 128, Routing(EXPERTS, 3), shared=128)
MODES = ("shared_expert", "gemm_push")
SIZES = (1, 10, 40)  # tokens a rank
MOST_TOKENS = max(SIZES)
LEAN = 30.0  # of logits, that outdoes any that is drawn


def by_rank(layer: weft.MoE) -> AllToAll:
    assert isinstance(layer.exchange, AllToAll)
    return layer.exchange


class Poisoned:
    """A layer's experts, which overwrite their source rows once these are grouped.

    There the inbox and the output are this rank's own: all peers have dispatched, so all have done
    with the last round, and none begins the next before this rank has told them that this one ends.
    """

    def __init__(self, layer: weft.MoE) -> None:
        self.mlp = layer.workspace.experts
        self.on = True
        a2a = by_rank(layer)
        spoiled = [p.view(torch.uint8) for p in (*a2a.latest_received.payloads, a2a.output_buffer)]
        shape, offset = a2a.config.shape, a2a.config.offsets.returned
        size = (shape.returned_rows * shape.returned_bytes,)
        self.returned = a2a.heap.tensor(size, torch.uint8, offset=offset)
        self.buffers = self.mlp.buffers
        for name in ("run", "run_push"):
            run = getattr(self.mlp, name)

            def spoil(*args: Any, run: Callable[..., Any] = run, **kwargs: Any) -> Any:
                if self.on:
                    for tensor in spoiled:
                        tensor.fill_(0xFF)
                return run(*args, **kwargs)

            vars(self.mlp)[name] = spoil

    def begin(self) -> None:
        """Overwrite what the last round left: peers push rows back after this rank's dispatch."""
        if self.on:
            for buffer in (self.returned, *self.buffers):
                buffer.view(torch.uint8).fill_(0xFF)  # NaN in every float type


class Layers:
    """The layer without overlap, one of each mode, and the wrong words of each."""

    def __init__(
        self, group: weft.Group, case: Case, modes: tuple[str, ...], options: dict[str, Any]
    ) -> None:
        self.group, self.case, self.modes = group, case, modes
        self._stack = contextlib.ExitStack()
        options = {"timeout": 600.0, "max_tokens": MOST_TOKENS, "mode": "throughput", **options}

        def open_layer(overlap: str) -> weft.MoE:
            return self._stack.enter_context(case.open(group, overlap=overlap, **options))

        self.plain = open_layer("none")  # what all others are compared with
        self.others = {name: open_layer(name) for name in modes}
        every = (self.plain, *self.others.values())
        self.poisons = {id(layer): Poisoned(layer) for layer in every}
        self.fp8, self.fp8_home = bool(options.get("fp8")), "combine_dtype" in options
        d = group.device
        self.wrong = {name: torch.zeros((), dtype=torch.int64, device=d) for name in modes}

    def __enter__(self) -> Layers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            settle(self.group)  # peers may still be reading what is about to go
        self._stack.close()

    def call(self, layer: weft.MoE, poison: bool, *args: torch.Tensor, **more: Any) -> None:
        spoiler = self.poisons[id(layer)]
        spoiler.on = poison
        spoiler.begin()
        layer(*args, **more)

    def check(self) -> dict[str, int]:
        """Raise errors and wrong words once everything has run."""
        settle(self.group)
        for layer in (self.plain, *self.others.values()):
            layer.check()
        return {name: int(count) for name, count in self.wrong.items()}


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


class Step:
    """Rounds of one mode and one size in tensors of their own; a call only enqueues."""

    def __init__(
        self, layers: Layers, mode: str, tokens: int, *, poison: bool, seed: int = 0
    ) -> None:
        d, hidden = layers.group.device, layers.case.config.hidden
        self.layers, self.mode, self.poison = layers, mode, poison
        self.x = torch.zeros((tokens, hidden), dtype=layers.case.config.dtype, device=d)
        self.logits = torch.zeros((tokens, EXPERTS), device=d)
        self.count = torch.full((1,), tokens, dtype=torch.int32, device=d)
        self.turn = torch.zeros((), dtype=torch.int64, device=d)
        self.experts = torch.arange(EXPERTS, device=d)
        self.wanted, self.found = torch.zeros_like(self.x), torch.zeros_like(self.x)
        # A captured round draws from the device's own generator.
        self.source: torch.Generator | None = None
        if d.type == "cpu":
            self.source = torch.Generator().manual_seed(64 * seed + layers.group.rank)

    def draw(self) -> None:
        """Draw tokens, routing and row counts; in every fourth round all ranks share experts."""
        self.turn += 1
        self.x.normal_(generator=self.source)
        self.logits.normal_(generator=self.source)
        expected = (self.experts + self.turn) % EXPERTS < CONFIG.routing.top_k
        self.logits += (expected & (self.turn % 4 == 0)) * LEAN
        self.count.random_(0, len(self.x) + 1, generator=self.source)

    def compare(self) -> None:
        """Run one round of both layers into outputs of different values; both must write."""
        layers = self.layers
        args = (self.x, self.logits)
        self.wanted.fill_(float("nan"))
        self.found.fill_(float("inf"))
        layers.call(layers.plain, self.poison, *args, num_tokens=self.count, out=self.wanted)
        other = layers.others[self.mode]
        layers.call(other, self.poison, *args, num_tokens=self.count, out=self.found)
        wrong = (words(self.wanted) != words(self.found)).sum() + (~self.wanted.isfinite()).sum()
        layers.wrong[self.mode] += wrong

    def __call__(self) -> None:
        self.draw()
        self.compare()


def against_reference(layers: Layers) -> None:
    """Compare the layer without overlap with the reference; others must equal its bits."""
    case, group = layers.case, layers.group
    x, logits = case.inputs_of(group.rank, group.device)
    layers.call(layers.plain, True, x, logits, out=(out := torch.full_like(x, float("nan"))))
    settle(group)
    expected = case.expected(layers.plain, x, logits, fp8=layers.fp8)
    slack = max(3.0 if layers.fp8 else 1.0, 16 / 5 if layers.fp8_home else 1.0)
    case.check(out, expected, slack)


def captured(step: Step) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def replay(
    group: weft.Group,
    replays: int,
    options: dict[str, Any],
    beside: Callable[[int], None] = lambda done: None,
    *,
    modes: tuple[str, ...] = MODES,
    graphs: bool = True,
) -> dict[str, int]:
    """Replay graphs of every mode and size in an order that all ranks know, with eager calls.

    replays: of all modes together.   beside: called before each, with its number.
    """
    case = Case(CONFIG, tokens=(10,) * group.size)
    if group.device.type == "cuda":
        torch.cuda.manual_seed(group.rank)
    with Layers(group, case, modes, options) as layers:
        against_reference(layers)
        steps = [
            Step(layers, mode, tokens, poison=poison)
            for mode in modes
            for tokens in SIZES
            for poison in (False, True)
        ]
        for step in steps:
            step()  # compiles and loads everything
        settle(group)
        plays: list[Callable[[], None]] = list(steps)
        if group.device.type == "cuda" and graphs:
            plays = [captured(step) for step in steps]
        order = random.Random(5)
        for done in range(replays):
            which = order.randrange(len(plays))
            beside(done)
            if done % 97 == 0:
                steps[which]()
            plays[which]()
            if done % 5000 == 0:
                layers.check()
        return layers.check()


def odd_round(number: int, ranks: int, block: int) -> tuple[tuple[int, ...], int, int]:
    """Return round `number`: name, tokens of each rank, and the experts that all choose.

    block: rows of a tile.   count 0: no expert in particular.
    """
    last, turn = EXPERTS - 1, number // 10

    def spread(rows: int) -> tuple[int, ...]:
        """Distribute tokens over the ranks as evenly as possible."""
        least = [rows // ranks + ((r + turn) % ranks < rows % ranks) for r in range(ranks)]
        return tuple(min(tokens, MOST_TOKENS) for tokens in least)

    expert = turn % EXPERTS
    cases = (
        *((spread(block + more), expert, 1) for more in (-1, 0, 1)),  # rows around a tile's
        ((MOST_TOKENS,) * ranks, expert, 1),
        (spread(5 * ranks), last - 1, 2),  # all to the last rank
        (tuple(9 * (r != turn % ranks) for r in range(ranks)), 0, 0),  # one rank has no token
        (tuple(int(r == turn % ranks) for r in range(ranks)), expert, 1),  # one token in all
        ((0,) * ranks, 0, 0),
        (spread(7 * ranks), 0, EXPERTS // 2),  # experts that no token chooses
        (tuple((11 * number + 7 * r) % (MOST_TOKENS + 1) for r in range(ranks)), 0, 0),
    )
    return cases[number % len(cases)]


def delay_a_rank(group: weft.Group, number: int) -> None:
    """Delay one rank, on the host or on its device, by up to 2 ms."""
    chance = random.Random(number)
    if chance.randrange(group.size) != group.rank:
        return
    wait = chance.random() * 2e-3
    if number % 16 == 0 or group.device.type == "cpu":
        time.sleep(wait if number % 16 == 0 else 0.0)
    elif number % 4 == 0:
        torch.cuda._sleep(int(wait * 1e9))  # cycles, at about 2 GHz: half as long


def run_odd_rounds(group, rounds, top_k, rows, options):
    """Delayed ranks and unusual routing, round after round, all poisoned.

    rows: of each expert that products plan for.
    """
    config = replace(CONFIG, routing=replace(CONFIG.routing, top_k=top_k))
    with Layers(group, Case(config, (4,) * group.size), MODES, options) as layers:
        block = 16
        for poison in layers.poisons.values():
            if isinstance(poison.mlp, GroupedExperts):
                poison.mlp._compute_rows_per_expert = lambda tokens: rows  # type: ignore[method-assign]
                block = getattr(
                    poison.mlp._get_plans(4, poison.mlp._act.dtype).down, "block_m", block
                )
                poison.mlp._plans.clear()
        if group.device.type == "cuda":
            torch.cuda.manual_seed(group.rank)
        for number in range(rounds):
            for mode in layers.modes:
                tokens, first, count = odd_round(number, group.size, block)
                step = Step(layers, mode, tokens[group.rank], poison=True, seed=number)
                step.x.normal_(generator=step.source)
                step.logits.normal_(generator=step.source)[:, first : first + count] += LEAN
                delay_a_rank(group, number)
                step.compare()
        return layers.check()


TILED: dict[str, Any] = {"gemm": "grouped"}
SOUND = dict.fromkeys(MODES, 0)


def test_rounds_of_every_overlap_in_any_order(ranks):
    assert ranks(2, "threads")(replay, 14, {**TILED, "fp8": True}) == [SOUND] * 2


def test_late_ranks_and_odd_routing(ranks):
    assert ranks(3, "threads")(run_odd_rounds, 12, 3, 48, TILED) == [SOUND] * 3
