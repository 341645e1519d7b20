# SPDX-License-Identifier: Apache-2.0
"""A rank is killed while a graph is replayed; the same graph is right among the living.

Ranks may share one GPU. How long the first right replay after a death takes is printed
(`pytest -s`); with ranks that share a GPU it holds their turns on it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests import operators
from tests.moe.layers import CONFIGS, EXPERTS, Case
from tests.moe.test_relocation import hold, open_layer
from tests.recovery import Survivors, dropped, run_survivors, surviving
from weft import reference
from weft.bench.harness import capture, settle
from weft.errors import BadExpertId, GroupError
from weft.moe import MoE, balance, route

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
RANKS, ORDER = 4, (2, 0)  # the ranks die in this order
TOKENS, TOP_K, NUM_EXPERTS, HIDDEN = 24, 4, 16, 512
CALLS = 4  # of a graph
LIMITS: dict[str, Any] = {"timeout": 60.0, "first_timeout": 60.0}
KINDS = ("pull", "push", "fp8", "receiver", "sender", "oneshot")


def opened(group: weft.Group, kind: str) -> Any:
    """An operator of tests/operators.py, in the sizes of here."""
    sizes: dict[str, Any] = {"max_tokens": TOKENS, "hidden": HIDDEN, **LIMITS}
    if kind == "oneshot":
        sizes |= {"missing": "drop"}
    else:
        sizes |= {"top_k": TOP_K, "num_experts": NUM_EXPERTS}
    return operators.KINDS[kind].open(group, **sizes).made


class Captured:
    """Rounds of one operator in a graph: the tensors that it reads and writes."""

    def __init__(self, kind: str, made: Any) -> None:
        self.kind, self.made, group = kind, made, made.group
        self.rank, self.device = group.rank, group.device
        self.x = torch.zeros((TOKENS, HIDDEN), dtype=torch.bfloat16, device=self.device)
        self.ids = torch.zeros((TOKENS, TOP_K), dtype=torch.int64, device=self.device)
        self.outs = [torch.empty_like(self.x) for _ in range(CALLS)]
        self.draw(0)
        self.rounds()
        settle(group)
        self.graph = capture(self.rounds)
        settle(group)

    def draw(self, seed: int) -> None:
        """Rows of small integers, whose sums are exact, and other experts."""
        for out in self.outs:
            out.fill_(float("nan"))
        self.x.copy_(rows_of(self.rank, seed))
        generator = torch.Generator().manual_seed(seed * 64 + self.rank)
        scores = torch.rand((TOKENS, NUM_EXPERTS), generator=generator)
        self.ids.copy_(scores.topk(TOP_K, dim=1).indices)
        torch.cuda.synchronize()

    def rounds(self) -> None:
        for out in self.outs:
            if self.kind == "oneshot":
                self.made.fused(self.x, out=out)
                continue
            got = self.made.dispatch(self.x, self.ids)
            if self.kind in ("receiver", "sender"):
                self.made.combine(got.x, self.ids, None, got.handle, out=out)
            else:
                self.made.output().copy_(reference.identity_experts(got, torch.bfloat16))
                self.made.combine(out=out)

    def check(self, seed: int, living: list[int]) -> None:
        """Replay with other rows; every round must be right."""
        self.draw(seed)
        self.graph.replay()
        torch.cuda.synchronize()
        for out in self.outs:
            assert torch.equal(out.cpu(), self.wanted(seed, living))

    def replay(self) -> None:
        """Raises what broke the graph."""
        self.graph.replay()
        torch.cuda.synchronize()
        self.made.check()

    def wanted(self, seed: int, living: list[int]) -> torch.Tensor:
        if self.kind == "oneshot":
            return torch.stack([rows_of(r, seed).float() for r in living]).sum(0).bfloat16()
        placement, x = self.made.placement, self.x.cpu()
        ids = dropped(self.ids.cpu(), placement.ranks, living)
        if self.kind in ("receiver", "sender"):
            return (x.float() * (ids >= 0).sum(1, keepdim=True)).bfloat16()
        fp8 = "fp8" if self.kind == "fp8" else None
        return reference.identity_round_trip(
            x, ids, None, placement, ranks=RANKS, combine_dtype=fp8
        )


def rows_of(rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    return torch.randint(-8, 9, (TOKENS, HIDDEN), generator=generator).bfloat16()


def die_replaying(
    survivors: Survivors, rank: int, replay: Callable[[], None], folder: str
) -> float:
    """`rank` is killed while all replay, and the living recover. Returns when it was killed."""
    moment = Path(folder, f"moment {rank}")
    survivors.barrier()
    if survivors.group.rank == rank:

        def end() -> None:
            moment.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Timer(0.3, end).start()
    with pytest.raises(GroupError):
        until_it_raises(replay)
    survivors.lose(rank)
    return float(moment.read_text())


def until_it_raises(replay: Callable[[], None]) -> None:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        replay()


def graphs(group: weft.Group, folder: str, kind: str) -> None:
    with surviving(group, folder) as survivors, opened(group, kind) as made:
        captured = Captured(kind, made)
        for seed in range(3):
            captured.check(seed, survivors.ranks)
        made.check()
        for dies in ORDER:
            killed = die_replaying(survivors, dies, captured.replay, folder)
            for seed in range(5):
                captured.check(10 * dies + seed, survivors.ranks)
                if seed == 0:
                    took = time.monotonic() - killed
                    print(f"{kind}: rank {group.rank} right {took * 1e3:.0f} ms after the kill")
            if kind != "oneshot":
                with pytest.raises(BadExpertId, match=f"an expert of rank {dies}, which is gone"):
                    made.check()
            captured.rounds()  # eager calls, between replays
            torch.cuda.synchronize()
            captured.check(7, survivors.ranks)
            made.check()
        survivors.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_graph_is_right_among_the_living(ranks, tmp_path, kind):
    run_survivors(
        lambda: ranks(RANKS, "cuda")(graphs, str(tmp_path), kind), tmp_path, living=[1, 3]
    )


CASE = Case(CONFIGS["softmax"], tokens=(16, 16, 16, 16))
THRICE = balance([1.0] * EXPERTS, RANKS, replicas=2 * EXPERTS)  # any two ranks may go
WAYS: dict[str, dict[str, Any]] = {
    "throughput": {"mode": "throughput", "overlap": "none"},
    "gemm_push": {"mode": "throughput", "gemm": "grouped", "overlap": "gemm_push"},
    "low latency": {"mode": "low_latency"},
}


def layer_graphs(group: weft.Group, folder: str, way: str) -> None:
    with (
        surviving(group, folder) as survivors,
        open_layer(group, CASE, THRICE, **LIMITS, **WAYS[way]) as layer,
    ):
        graph, x, logits, outs = capture_layer(layer)

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()
            layer.check()

        def right(seed: int) -> None:
            rows, scores = CASE.next(seed=seed).of(group.rank, group.device)
            x.copy_(rows)
            logits.copy_(scores)
            for out in outs:
                out.fill_(float("nan"))
            replay()
            for out in outs:
                hold(layer, CASE, out, seed)

        right(1)
        for dies in ORDER:
            killed = die_replaying(survivors, dies, replay, folder)
            for seed in range(4):
                right(seed)
                if seed == 0:
                    took = time.monotonic() - killed
                    print(f"MoE, {way}: rank {group.rank} right {took * 1e3:.0f} ms after the kill")
        layer.check()  # no id named an expert of a rank that is gone
        survivors.barrier()


def capture_layer(
    layer: MoE,
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Two calls in a graph, of which the first one's routing is made within."""
    group = layer.exchange.group
    x, logits = CASE.next(seed=0).of(group.rank, group.device)
    outs = [torch.empty_like(x) for _ in range(2)]

    def calls() -> None:
        layer(x, logits, out=outs[0])
        routed = route(CASE.config.routing, logits)
        layer(x, topk_ids=routed.ids, topk_weights=routed.weights, out=outs[1])

    calls()
    settle(group)
    graph = capture(calls)
    settle(group)
    return graph, x, logits, outs


@pytest.mark.parametrize("way", WAYS)
def test_replicas_take_over_in_the_same_graph(ranks, tmp_path, way):
    run_survivors(
        lambda: ranks(RANKS, "cuda")(layer_graphs, str(tmp_path), way), tmp_path, living=[1, 3]
    )


def refused_graph(group: weft.Group, folder: str) -> None:
    with (
        surviving(group, folder) as survivors,
        weft.AllReduce(
            group, max_tokens=TOKENS, hidden=HIDDEN, backends=("twoshot",), **LIMITS
        ) as ar,
    ):
        captured = Captured("oneshot", ar)
        captured.check(1, survivors.ranks)
        die_replaying(survivors, 2, captured.replay, folder)
        start = time.monotonic()
        with pytest.raises(GroupError, match="rank 2 is gone, and this all-reduce sums over all"):
            captured.replay()
        assert time.monotonic() - start < 10.0, "a graph that cannot be right waited for a rank"
        survivors.barrier()


def test_a_graph_that_sums_over_all_returns_at_once(ranks, tmp_path):
    run_survivors(
        lambda: ranks(RANKS, "cuda")(refused_graph, str(tmp_path)), tmp_path, living=[0, 1, 3]
    )
