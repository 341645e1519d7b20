# SPDX-License-Identifier: Apache-2.0
"""Every operator in every mode behind one interface, with rounds checked bit by bit.

After `emulate` the kernels run in the emulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import weft
from tests import lowlatency_rounds, rounds, sums
from tests.emulator.emulate import EmulatedEntries, compile_emulated
from tests.emulator.operators import EmulatedAllToAll, EmulatedLow, compile_alltoall, compile_low
from tests.lowlatency_rounds import Mode
from tests.rounds import Round, bits, combine_options, drop_dead_ids
from tests.sending import make, results
from tests.sums import Sum, quant_specs
from weft.allreduce.config import ReduceConfig
from weft.allreduce.kernels import ReducePlan
from weft.alltoall.config import AllToAllConfig, AllToAllSpec
from weft.grouping.operator import ExpertGroups

TOKENS = 8
CASE = Round(tokens=(8, 3, 5, 4), hidden=256, experts=13, add=True)
SENT = Round(tokens=(16, 5, 9, 12), hidden=384, experts=14, add=True)
SUM = Sum(tokens=5)
MOST_SUMMED = 70  # more tokens than one shot of an all-reduce that recovers not serves


@dataclass
class Subject:
    """An open operator. Context manager.

    play: one round of a seed, by the living, compared with the reference.
    beside: further operators that take part in a round.
    """

    made: Any
    play: Callable[[int, Sequence[int]], None]
    beside: list[Any] = field(default_factory=list)

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *error: Any) -> None:
        for operator in (self.made, *self.beside):
            operator.__exit__(*error)

    def rounds(self, count: int, living: Sequence[int], *, checks: bool = True) -> None:
        for seed in range(count):
            self.play(seed, living)
            if checks:
                self.made.check()


@dataclass(frozen=True)
class ByRank:
    """An AllToAll, with whole and split calls, and varying numbers of slots."""

    way: str
    case: Round = CASE

    def open(self, group: weft.Group, **more: Any) -> Subject:
        options = combine_options(self.way) | {"split_phase": True} | more
        a2a = self.case.open(group, TOKENS, **options)

        def play(seed: int, living: Sequence[int]) -> None:
            rows = (None, None, TOKENS, 6, 6, TOKENS, 7)[seed % 7]
            tokens = tuple(min(n, rows or TOKENS) for n in self.case.tokens)
            case, halves = self.case.next(seed=seed, tokens=tokens), seed % 3 == 1
            rounds.play(a2a, case, poison=False, rows=rows, halves=halves, living=living)

        return Subject(a2a, play)

    def compile(self, **more: Any) -> Path:
        sizes = self.case.sizes(TOKENS) | combine_options(self.way)
        spec = AllToAllSpec(ranks=len(self.case.tokens), **sizes)
        return compile_alltoall(AllToAllConfig.from_spec(spec).shape, **more)

    def emulate(self, subject: Subject, library: Path) -> None:
        a2a = subject.made
        a2a._local.kernels = EmulatedAllToAll(library, a2a.config.shape, a2a.rank)


@dataclass(frozen=True)
class ByExpert:
    """A LowLatencyAllToAll, with whole and, if supported, split calls."""

    mode: Mode
    case: Round = CASE

    def open(self, group: weft.Group, **more: Any) -> Subject:
        halves = self.mode.combine == "push"
        more = {**self.mode.more, "split_phase": halves, **more}
        options = self.mode.options | more
        sizes = self.case.sizes(TOKENS)
        a2a = weft.LowLatencyAllToAll(group, **sizes, dtype=self.case.dtype, **options)

        def play(seed: int, living: Sequence[int]) -> None:
            lowlatency_rounds.play(
                a2a,
                self.mode,
                self.case.next(seed=seed),
                split_phase=halves and seed % 2 == 1,
                living=living,
                checks=False,
            )

        return Subject(a2a, play)

    def compile(self, **more: Any) -> Path:
        shape = self.mode.shape(self.case, TOKENS, **self.mode.more)
        return compile_low(shape, **more)

    def emulate(self, subject: Subject, library: Path) -> None:
        a2a = subject.made
        a2a._local.kernels = EmulatedLow(library, a2a.config.shape)


@dataclass(frozen=True)
class Sums:
    """An AllReduce with missing="drop", several sizes and all outputs.

    form: the kernel that runs in the emulator.
    """

    form: str = "oneshot"
    ranks: int = len(CASE.tokens)

    def open(self, group: weft.Group, **more: Any) -> Subject:
        options: dict[str, Any] = {"missing": "drop", **more}
        ar = weft.AllReduce(group, max_tokens=MOST_SUMMED, hidden=SUM.hidden, **options)

        def play(seed: int, living: Sequence[int]) -> None:
            tokens = (5, 1, MOST_SUMMED, 0, 3)[seed % 5]
            case = SUM.next(seed=seed, tokens=tokens, special=seed % 2 == 1)
            every = list(quant_specs(group.device, SUM.hidden))
            for quant in (every[seed % len(every)], every[(seed + seed // 5 + 2) % len(every)]):
                sums.play(ar, case, "auto", quant, living)

        return Subject(ar, play)

    def compile(self, **more: Any) -> Path:
        config = ReduceConfig.from_args(
            ranks=self.ranks,
            max_tokens=MOST_SUMMED,
            hidden=SUM.hidden,
            dtype=SUM.dtype,
            missing="drop",
        )
        return compile_emulated(config, **more)

    def emulate(self, subject: Subject, library: Path) -> None:
        subject.made._kernels = entries = EmulatedEntries(library)
        entries.forms["oneshot"] = self.form
        for tokens in (1, 3, 5, MOST_SUMMED):
            ctas = min(tokens, 4) if self.form == "oneshot_resident" else tokens
            # A thread for each rank, as plans have.
            entries.plans["oneshot", tokens] = ReducePlan(ctas, -(-self.ranks // 32) * 32, 1)


@dataclass(frozen=True)
class Sends:
    way: str

    def open(self, group: weft.Group, **more: Any) -> Subject:
        a2a = make(group, SENT, **combine_options(self.way), **more)
        plain = make(group, SENT, **combine_options("fp8" if self.way == "fp8" else "pull"))
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


PLACED = [3, 1, 0, 2, 1, 1, 2, 0, 3, 1, 2, 0, 1]
SUBJECTS: dict[str, Any] = {
    "pull": ByRank("pull"),
    "push": ByRank("push"),
    "fp8": ByRank("fp8"),
    "low latency": ByExpert(Mode()),
    "low latency, sender": ByExpert(Mode(reduce="sender", combine_dtype="fp8", scale="ue8m0")),
    "low latency, plain, placed": ByExpert(Mode(quantize=None, more={"expert_map": PLACED})),
    "low latency, gemm_push": ByExpert(Mode(combine="gemm_push")),
    "all-reduce": Sums(),
    "all-reduce, resident": Sums("oneshot_resident"),
    "sends, push": Sends("push"),
    "sends, fp8": Sends("fp8"),
    "sends, gemm_push": Sends("choices"),
}
EMULATED = [name for name in SUBJECTS if not name.startswith("sends")]
