# SPDX-License-Identifier: Apache-2.0
"""Rounds that draw rows and count wrong words on the device, so that graphs can capture them."""

from collections.abc import Callable, Iterable

import torch

import weft
from tests import rounds
from tests.operators import KINDS, Kind, Operator
from weft.bench import harness
from weft.bench.harness import synchronize_ranks
from weft.grouping.operator import ExpertGroups

SEND = "send"  # results that ExpertGroups send, beside the kinds of tests/operators.py
STEPPED = {**KINDS, SEND: Kind("alltoall", {"combine": "push", "split_phase": True})}
LARGEST = 8  # of a row's integers: sums of 16 of them are exact


def capture_body(
    group: weft.Group, body: Callable[[], None], *, warm_up: bool = True
) -> Callable[[], None]:
    """Return a function that repeats `body`: a graph replay on a GPU, else body. Collective."""
    if warm_up:
        body()
        synchronize_ranks(group)
    replay = body if group.device.type == "cpu" else harness.capture(body).replay
    synchronize_ranks(group)
    return replay


class Step:
    """Rounds of one size on one operator; one call enqueues `calls` rounds.

    Rows, experts and weights are small integers that change from round to round and that every
    rank can compute of every other, so results are exact but for rows that return in FP8.
    """

    def __init__(self, op: Operator, tokens: int, *, calls: int = 1, backend: str = "auto") -> None:
        made, group = op.made, op.made.group
        device, shape = group.device, made.config.shape if op.kind.name != "allreduce" else None
        hidden = made.config.hidden if shape is None else shape.hidden
        source = torch.Generator(device="cpu").manual_seed(100 * tokens)
        self.op, self.calls, self.backend, self.device = op, calls, backend, device
        self.base = torch.randint(0, 99, (tokens, hidden), generator=source).to(device)
        self.turn = torch.zeros((), dtype=torch.int64, device=device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.alive = torch.ones(group.size, dtype=torch.bool, device=device)
        self.out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=device)
        self.weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
        self.groups = ExpertGroups(made) if op.kind is STEPPED[SEND] else None
        if shape is not None:
            self.owners = torch.tensor(made.placement.ranks, device=device)
            source.manual_seed(group.rank)
            scores = torch.rand((tokens, shape.experts), generator=source)
            self.experts = scores.topk(shape.top_k, dim=1).indices.to(device)

    def reset(self, turn: int, living: Iterable[int]) -> None:
        """Restart at a turn that all living ranks know; later rounds expect only their rows."""
        alive = [rank in set(living) for rank in range(len(self.alive))]
        self.alive.copy_(torch.tensor(alive))
        self.turn.fill_(1000 * turn)
        self.wrong.zero_()

    def __call__(self) -> None:
        for _ in range(self.calls):
            self.turn += 37
            self.out.fill_(float("nan"))
            if self.op.kind.name == "allreduce":
                self._sum()
            else:
                self._round()

    def _rows(self, rank: int) -> torch.Tensor:
        return (self.base + self.turn + 5 * rank) % (2 * LARGEST + 1) - LARGEST

    def _sum(self) -> None:
        made = self.op.made
        residual = self._rows(99).bfloat16()
        got = made.fused(
            self._rows(made.group.rank).bfloat16(),
            residual=residual,
            weight=self.weight,
            out=self.out,
            backend=self.backend,
        )
        total = torch.zeros_like(self.base)
        for rank in range(made.group.size):
            total += self._rows(rank) * self.alive[rank]
        rows = (total + residual).float()
        norm = rows / rows.square().mean(dim=1, keepdim=True).sqrt()
        off = (got.norm.float() - norm).abs() > 0.02 * (1 + norm.abs())
        self.wrong += (self.out != total).sum() + (got.residual != rows).sum() + off.sum()

    def _round(self) -> None:
        made, kind = self.op.made, self.op.kind
        x = self._rows(made.group.rank).bfloat16()
        ids = (self.experts + self.turn) % len(self.owners)
        weights = (1 + ids % 2).float()
        got = made.dispatch(x, ids, weights)
        if self.groups is not None:
            self.groups.send(self.groups.gather(got).x.clone())
            made.combine_recv(out=self.out)
        elif kind.name == "lowlatency":
            made.combine(got.x.clone(), ids, weights, got.handle, out=self.out)
        else:
            made.combine(weft.reference.identity_experts(got, x.dtype), out=self.out)
        owners, total = self.owners[ids], torch.zeros(x.shape, device=self.device)
        for rank in range(made.group.size):
            chosen = (owners == rank) & self.alive[rank]
            row = x.float() * (weights * chosen).sum(dim=1, keepdim=True)
            if kind.options.get("combine_dtype") == "fp8":
                row = weft.reference.dequantize(*weft.reference.quantize(row.bfloat16(), "fp8"))
            total += torch.where(chosen.any(dim=1, keepdim=True), row.float(), 0.0)
        self.wrong += (self.out != total.bfloat16()).sum()

    def check(self) -> None:
        rounds.synchronize(self.device)
        self.op.made.check()
        assert int(self.wrong) == 0, f"{int(self.wrong)} wrong words"
