# SPDX-License-Identifier: Apache-2.0
"""Every operator behind one interface: small rounds by value, on the device, and bit by bit.

`KINDS` open small operators. A `Step` of one draws rows and counts wrong words on the device, so
that graphs can capture it. `SUBJECTS` open every mode, and compare rounds with the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

import weft
from tests import lowlatency_rounds, rounds, sums
from tests.emulator.emulate import EmulatedEntries, compile_emulated
from tests.emulator.operators import EmulatedAllToAll, EmulatedLow, compile_alltoall, compile_low
from tests.faults import FAULTS
from tests.lowlatency_rounds import Mode
from tests.rounds import Round, bits, combine_options, drop_dead_ids, synchronize
from tests.sending import make, results
from tests.sums import Sum, quant_specs
from weft.allreduce.kernels import ReducePlan
from weft.bench import harness
from weft.bench.harness import synchronize_ranks
from weft.grouping.operator import ExpertGroups

# Fault points of device/fault.cuh, and those of them that are passed once for each peer.
POINTS = {"alltoall": range(1, 8), "lowlatency": range(1, 8), "allreduce": range(8, 12)}
FOR_EACH_PEER = {"alltoall": (3, 6), "lowlatency": (3,), "allreduce": (10, 11)}
HIDDEN, TOKENS, TOP_K, EXPERTS = 128, 4, 2, 12
LONG = 600.0  # seconds: a deadline that no test waits for


@dataclass(frozen=True)
class Kind:
    name: str
    options: dict[str, Any]

    def open(self, group: weft.Group, *, faults: bool = False, **more: Any) -> Operator:
        sizes: dict[str, Any] = {"hidden": HIDDEN, "timeout": LONG, "first_timeout": LONG}
        if self.name != "allreduce":
            sizes |= {"top_k": TOP_K, "num_experts": EXPERTS}
        if self.name == "lowlatency":
            sizes["quantize"] = None
        if faults:
            sizes["_defines"] = FAULTS
        sizes |= {"max_tokens": TOKENS} | self.options | more
        classes = {"alltoall": weft.AllToAll, "lowlatency": weft.LowLatencyAllToAll}
        return Operator(classes.get(self.name, weft.AllReduce)(group, **sizes), self)


KINDS = {
    "pull": Kind("alltoall", {}),
    "push": Kind("alltoall", {"combine": "push"}),
    "fp8": Kind("alltoall", {"combine_dtype": "fp8"}),
    "receiver": Kind("lowlatency", {"reduce": "receiver"}),
    "sender": Kind("lowlatency", {}),
    "oneshot": Kind("allreduce", {"backends": ("oneshot",)}),
    "twoshot": Kind("allreduce", {"backends": ("twoshot",)}),
}
SEND = "send"  # results that ExpertGroups send
STEPPED = {**KINDS, SEND: Kind("alltoall", {"combine": "push", "split_phase": True})}


@dataclass
class Opened:
    """An open operator. Context manager."""

    operator: Any

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self.operator.__exit__(*error)


@dataclass
class Operator(Opened):
    """An operator of KINDS, with rounds whose rows have one value."""

    kind: Kind

    def __post_init__(self) -> None:
        device, t = self.operator.group.device, torch.arange(TOKENS)
        self.ids = torch.stack([t * 3 % EXPERTS, (t * 3 + 5) % EXPERTS], dim=1).to(device)
        self.weights = torch.ones((TOKENS, TOP_K), device=device)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()

    def round(self, value: float = 1.0) -> Any:
        """Run one round, or one sum, with rows of `value` from this rank; return the result."""
        result = self.enqueue(value)
        synchronize(self.operator.group.device)
        self.operator.check()
        return result

    def enqueue(self, value: float) -> Any:
        return self.end(self.begin(value))

    def begin(self, value: float) -> Any:
        device = self.operator.group.device
        x = torch.full((TOKENS, HIDDEN), value, dtype=torch.bfloat16, device=device)
        if self.kind.name == "allreduce":
            weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
            return self.operator.fused(x, weight=weight, out=True).out
        return self.operator.dispatch(x, self.ids, self.weights)

    def end(self, got: Any) -> Any:
        if self.kind.name == "allreduce":
            return got
        return self.combine(got, self.ids, self.weights)

    def combine(
        self, got: Any, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None
    ) -> Any:
        if self.kind.name == "lowlatency":
            return self.operator.combine(got.x.clone(), ids, weights, got.handle, out=out)
        return self.operator.combine(weft.reference.identity_experts(got, torch.bfloat16), out=out)


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
        operator, group = op.operator, op.operator.group
        device, shape = group.device, operator.config.shape if op.kind.name != "allreduce" else None
        hidden = operator.config.hidden if shape is None else shape.hidden
        source = torch.Generator(device="cpu").manual_seed(100 * tokens)
        self.op, self.calls, self.backend, self.device = op, calls, backend, device
        self.base = torch.randint(0, 99, (tokens, hidden), generator=source).to(device)
        self.turn = torch.zeros((), dtype=torch.int64, device=device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.alive = torch.ones(group.size, dtype=torch.bool, device=device)
        self.out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=device)
        self.weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
        self.groups = ExpertGroups(operator) if op.kind is STEPPED[SEND] else None
        if shape is not None:
            self.owners = torch.tensor(operator.placement.ranks, device=device)
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
        operator = self.op.operator
        residual = self._rows(99).bfloat16()
        got = operator.fused(
            self._rows(operator.group.rank).bfloat16(),
            residual=residual,
            weight=self.weight,
            out=self.out,
            backend=self.backend,
        )
        total = torch.zeros_like(self.base)
        for rank in range(operator.group.size):
            total += self._rows(rank) * self.alive[rank]
        rows = (total + residual).float()
        norm = rows / rows.square().mean(dim=1, keepdim=True).sqrt()
        off = (got.norm.float() - norm).abs() > 0.02 * (1 + norm.abs())
        self.wrong += (self.out != total).sum() + (got.residual != rows).sum() + off.sum()

    def _round(self) -> None:
        operator, kind = self.op.operator, self.op.kind
        x = self._rows(operator.group.rank).bfloat16()
        ids = (self.experts + self.turn) % len(self.owners)
        weights = (1 + ids % 2).float()
        got = operator.dispatch(x, ids, weights)
        if self.groups is not None:
            self.groups.send(self.groups.gather(got).x.clone())
            operator.combine_recv(out=self.out)
        else:
            self.op.combine(got, ids, weights, self.out)
        owners, total = self.owners[ids], torch.zeros(x.shape, device=self.device)
        for rank in range(operator.group.size):
            chosen = (owners == rank) & self.alive[rank]
            row = x.float() * (weights * chosen).sum(dim=1, keepdim=True)
            if kind.options.get("combine_dtype") == "fp8":
                row = weft.reference.dequantize(*weft.reference.quantize(row.bfloat16(), "fp8"))
            total += torch.where(chosen.any(dim=1, keepdim=True), row.float(), 0.0)
        self.wrong += (self.out != total.bfloat16()).sum()

    def check(self) -> None:
        synchronize(self.device)
        self.op.operator.check()
        assert int(self.wrong) == 0, f"{int(self.wrong)} wrong words"


MAX_TOKENS = 8
CASE = Round(tokens=(8, 3, 5, 4), hidden=256, experts=13, add=True)
SENT = Round(tokens=(16, 5, 9, 12), hidden=384, experts=14, add=True)
SUM = Sum(tokens=5)
MOST_SUMMED = 70  # more tokens than one shot of an all-reduce that recovers not serves


@dataclass
class Subject(Opened):
    """An operator of SUBJECTS.

    play: one round of a seed, by the living, compared with the reference.
    beside: further operators that take part in a round.
    form: the kernel that runs in the emulator in place of an all-reduce's "oneshot".
    """

    play: Callable[[int, Sequence[int]], None]
    beside: list[Any] = field(default_factory=list)
    form: str = "oneshot"

    def __exit__(self, *error: Any) -> None:
        for operator in (self.operator, *self.beside):
            operator.__exit__(*error)

    def rounds(self, count: int, living: Sequence[int], *, checks: bool = True) -> None:
        for seed in range(count):
            self.play(seed, living)
            if checks:
                self.operator.check()

    def emulate(self, defines: Sequence[str] = ()) -> None:
        """Run the CUDA kernels in the emulator from now on."""
        operator, config = self.operator, self.operator.config
        if isinstance(operator, weft.AllReduce):
            operator._kernels = entries = EmulatedEntries(compile_emulated(config, defines=defines))
            entries.forms["oneshot"] = self.form
            for tokens in (1, 3, 5, MOST_SUMMED):
                ctas = min(tokens, 4) if self.form == "oneshot_resident" else tokens
                # A thread for each rank, as plans have.
                entries.plans["oneshot", tokens] = ReducePlan(ctas, -(-config.ranks // 32) * 32, 1)
        elif isinstance(operator, weft.AllToAll):
            library = compile_alltoall(config.shape, defines=defines)
            operator._local.kernels = EmulatedAllToAll(library, config.shape, operator.rank)
        else:
            library = compile_low(config.shape, defines=defines)
            operator._local.kernels = EmulatedLow(library, config.shape)


def by_rank(group: weft.Group, way: str, case: Round = CASE, **more: Any) -> Subject:
    """Open an AllToAll, with whole and split calls, and varying numbers of slots."""
    a2a = case.open(group, MAX_TOKENS, **combine_options(way) | {"split_phase": True} | more)

    def play(seed: int, living: Sequence[int]) -> None:
        rows = (None, None, MAX_TOKENS, 6, 6, MAX_TOKENS, 7)[seed % 7]
        tokens = tuple(min(n, rows or MAX_TOKENS) for n in case.tokens)
        now, halves = case.next(seed=seed, tokens=tokens), seed % 3 == 1
        rounds.play(a2a, now, poison=False, rows=rows, halves=halves, living=living)

    return Subject(a2a, play)


def by_expert(group: weft.Group, mode: Mode, case: Round = CASE, **more: Any) -> Subject:
    """Open a LowLatencyAllToAll, with whole and, if supported, split calls."""
    halves = mode.combine == "push"
    options = {**mode.more, "split_phase": halves, **more}
    a2a = replace(mode, more=options).make(group, case, MAX_TOKENS)

    def play(seed: int, living: Sequence[int]) -> None:
        now, split_phase = case.next(seed=seed), halves and seed % 2 == 1
        lowlatency_rounds.play(a2a, mode, now, split_phase=split_phase, living=living, checks=False)

    return Subject(a2a, play)


def by_sum(group: weft.Group, form: str = "oneshot", **more: Any) -> Subject:
    """Open an AllReduce with missing="drop", for several sizes and all outputs."""
    options: dict[str, Any] = {"missing": "drop", **more}
    ar = weft.AllReduce(group, max_tokens=MOST_SUMMED, hidden=SUM.hidden, **options)

    def play(seed: int, living: Sequence[int]) -> None:
        tokens = (5, 1, MOST_SUMMED, 0, 3)[seed % 5]
        case = SUM.next(seed=seed, tokens=tokens, special=seed % 2 == 1)
        every = list(quant_specs(group.device, SUM.hidden))
        for quant in (every[seed % len(every)], every[(seed + seed // 5 + 2) % len(every)]):
            sums.play(ar, case, "auto", quant, living)

    return Subject(ar, play, form=form)


def by_sending(group: weft.Group, way: str, **more: Any) -> Subject:
    """Open an AllToAll whose results are sent, and one whose results are scattered."""
    a2a = make(group, SENT, **combine_options(way), **more)
    plain = make(group, SENT, **combine_options("fp8" if way == "fp8" else "pull"))
    groups, others = ExpertGroups(a2a), ExpertGroups(plain)

    def returned(ids: torch.Tensor, groups: ExpertGroups, case: Round) -> torch.Tensor:
        exchange = groups._a2a
        x, _, weights, add = case.inputs_of(group.rank, group.device)
        grouped = groups.gather(exchange.dispatch(x, ids, weights))
        y = results(groups, grouped, case.seed + 31 * group.rank, case.dtype)
        if groups is not others:
            groups.send(y)
        else:
            groups.scatter(y)
            exchange.combine_send()
        return exchange.combine_recv(out=torch.full_like(x, float("nan")), add=add)

    def play(seed: int, living: Sequence[int]) -> None:
        case = SENT.next(seed=seed).living(living)
        ids = case.inputs_of(group.rank, group.device)[1]
        kept = drop_dead_ids(ids, plain.placement.ranks, living)
        got, expected = returned(ids, groups, case), returned(kept, others, case)
        assert torch.equal(bits(got), bits(expected))
        plain.check()

    return Subject(a2a, play, [plain])


PLACED = Mode(quantize=None, more={"expert_map": [3, 1, 0, 2, 1, 1, 2, 0, 3, 1, 2, 0, 1]})
SENDER = Mode(reduce="sender", combine_dtype="fp8", scale="ue8m0")
SUBJECTS: dict[str, Callable[..., Subject]] = {
    **{way: partial(by_rank, way=way) for way in ("pull", "push", "fp8")},
    "low latency": partial(by_expert, mode=Mode()),
    "low latency, sender": partial(by_expert, mode=SENDER),
    "low latency, plain, placed": partial(by_expert, mode=PLACED),
    "low latency, gemm_push": partial(by_expert, mode=Mode(combine="gemm_push")),
    "all-reduce": by_sum,
    "all-reduce, resident": partial(by_sum, form="oneshot_resident"),
    "sends, push": partial(by_sending, way="push"),
    "sends, fp8": partial(by_sending, way="fp8"),
    "sends, gemm_push": partial(by_sending, way="choices"),
}
EMULATED = [name for name in SUBJECTS if not name.startswith("sends")]
