"""Dispatch and combine on a CPU give the reference's bits, in every way and launch shape, and order
every access that another rank, CTA or thread depends on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.kernels.emulate_alltoall import EmulatedAllToAll, compile_alltoall, places
from tests.kernels.watch import Event, watching, ways
from tests.rounds import Round, bits
from tests.sending import round_trip, scattered, stored_at_homes
from weft.errors import BadExpertId, PeerTimeout
from weft.ops.geometry import Geometry
from weft.ops.grouping import ExpertGroups
from weft.ops.plan import Plan
from weft.ops.timeline import DEFINE, read_timeline
from weft.shape import Shape

RANKS, TOKENS = 3, 8
PROFILED = ("pull", "push", "fp8")


@dataclass(frozen=True)
class Case:
    """Rounds of an all-to-all.

    extra: bytes of a token's row in further payloads.   lost: some ids name no expert.
    cut: in every second round the device knows of half of the tokens only.
    """

    round: Round
    options: dict[str, Any] = field(default_factory=dict)
    extra: tuple[int, ...] = ()
    lost: bool = False
    cut: bool = False

    @property
    def sizes(self) -> dict[str, Any]:
        """What the kernels are made for."""
        r = self.round
        payloads = [weft.Payload((r.hidden,), r.dtype)]
        payloads += [weft.Payload((size,), torch.uint8) for size in self.extra]
        sizes = {"max_tokens": TOKENS, "top_k": r.top_k, "num_experts": r.experts}
        return sizes | {"hidden": r.hidden, "dtype": r.dtype, "payloads": payloads} | self.options

    @property
    def shape(self) -> Shape:
        """The same as kernels are told it."""
        return Geometry.of(ranks=RANKS, **self.sizes).shape

    def open(self, group: weft.Group, **more: Any) -> weft.AllToAll:
        """A new all-to-all, which may wait long."""
        options = {"timeout": 60.0, "first_timeout": 60.0, "halves": True, **more}
        return weft.AllToAll(group, **self.sizes, **options)


CASES = {
    # Planes of every width of a store, 24 bytes and less beside a row of 65 vectors.
    "pull": Case(
        Round((5, 8, 0), top_k=3, experts=9, hidden=520, add=True),
        {"stats": 70, "expert_map": [2, 0, 1, 1, 0, 2, 2, 1, 0]},
        (20, 7, 6, 24),
        lost=True,
        cut=True,
    ),
    "push": Case(
        Round((8, 1, 4), top_k=5, experts=10, hidden=136, dtype=torch.float16, router="holes"),
        {"combine_by": "push", "stats": 3},
        (3,),
        cut=True,
    ),
    "fp8": Case(
        Round((3, 0, 8), top_k=4, experts=9, hidden=640, add=True),
        {"combine_by": "fp8", "quantize": "fp8"},
        (12, 5),
    ),
    "mxfp8 of fp32": Case(
        Round((2, 6, 3), experts=6, hidden=384, dtype=torch.float32, ids_dtype=torch.int64),
        {"quantize": "mxfp8"},
        (1,),
        lost=True,
        cut=True,
    ),
}
CHOICES = Case(
    Round((8, 3, 5), top_k=5, experts=9, hidden=264, router="holes", dtype=torch.float16, add=True),
    {"combine_by": "choices"},
)
# Workers, parts of a row, threads.
DISPATCH = (Plan(3, 1, 32), Plan(1, 2, 64), Plan(2, 2, 32), Plan(1, 1, 96))
COMBINE = (Plan(2, 2, 32), Plan(3, 1, 64), Plan(1, 1, 32), Plan(2, 1, 96))
# One that heralds, those that push, those that sum; strips at once.
HOME = (Plan(3, 1, 64, 1, 1), Plan(6, 1, 32, 3, 2), Plan(4, 1, 96, 2, 2), Plan(4, 1, 64, 1, 1))


def tokens_of(case: Case, seed: int) -> Round:
    """Each rank brings what another brought before: fewer tokens, or more, or none."""
    r = case.round
    turn = seed % RANKS
    return r.next(seed=seed, tokens=r.tokens[turn:] + r.tokens[:turn])


@dataclass(frozen=True)
class Sent:
    """What one rank hands over."""

    payloads: list[torch.Tensor]
    ids: torch.Tensor
    weights: torch.Tensor
    add: torch.Tensor
    stats: torch.Tensor

    def first(self, count: int) -> Sent:
        """The tokens that count."""
        rest = (self.ids[:count], self.weights[:count], self.add[:count], self.stats)
        return Sent([p[:count] for p in self.payloads], *rest)


def sent_by(case: Case, seed: int, rank: int) -> Sent:
    x, ids, weights, add = tokens_of(case, seed).of(rank, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    rows = [
        torch.randint(0, 256, (len(x), size), generator=generator, dtype=torch.uint8)
        for size in case.extra
    ]
    if case.lost and len(x):
        ids[0, 0], ids[-1, -1] = case.round.experts, -7
    if ids.dtype == torch.int64 and len(x):
        ids[0, 1] = 1 << 40
    # Rows of very different sizes: a scale of another block is far off.
    x = x * torch.logspace(-3, 3, case.round.hidden).to(x.dtype)
    stats = torch.randint(-(2**31), 2**31, (case.options.get("stats", 0),), generator=generator)
    return Sent([x, *rows], ids, weights, add, stats.int())


def arriving(case: Case, sent: Sent) -> list[torch.Tensor]:
    """The payloads as they come: the first one quantised where the case asks for it."""
    kind = case.options.get("quantize")
    if kind is None:
        return sent.payloads
    numbers, scales = weft.reference.quantize(sent.payloads[0], kind)
    # Torch moves no rows of exponents.
    scales = scales.view(torch.uint8) if kind == "mxfp8" else scales
    return [numbers, scales, *sent.payloads[1:]]


def answer(case: Case, received: weft.Received) -> torch.Tensor:
    """Experts that return their token, weighted; NaN where there is none."""
    if "quantize" not in case.options:
        return weft.reference.identity_experts(received, case.round.dtype)
    scales = received.payloads[1]
    scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    x = weft.reference.dequantize(received.payloads[0], scales)
    plain = weft.Received((x,), received.ids, received.weights, received.counts)
    return weft.reference.identity_experts(plain, case.round.dtype)


def one_round(a2a: weft.AllToAll, case: Case, seed: int) -> None:
    """Run one round; compare every byte that is defined, and every one that must not change."""
    ranks, group = range(a2a.group.size), a2a.group
    sent = [sent_by(case, seed, rank) for rank in ranks]
    mine = sent[a2a.rank]
    cut = case.cut and seed % 2 == 1
    counted = [s.first(len(s.ids) // 2) if cut else s for s in sent]
    group.barrier()
    for plane in a2a._workspace.received.payloads:
        plane.view(torch.uint8).fill_(0xAA)
    group.barrier()
    options: dict[str, Any] = {"stats": mine.stats} if len(mine.stats) else {}
    if cut:
        options["num_tokens"] = torch.tensor([len(counted[a2a.rank].ids)], dtype=torch.int32)
    if seed % 2:
        received = a2a.dispatch(mine.payloads, mine.ids, mine.weights, **options)
    else:
        a2a.dispatch_send(mine.payloads, mine.ids, mine.weights, **options)
        received = a2a.dispatch_recv()
    wanted = [
        weft.reference.dispatch(
            [arriving(case, s) for s in counted],
            [s.ids for s in counted],
            [s.weights for s in counted],
            a2a.placement,
            rank=rank,
            max_tokens=TOKENS,
            stats=[s.stats for s in sent] if options.get("stats") is not None else None,
        )
        for rank in ranks
    ]
    compare(received, wanted[a2a.rank])
    a2a.output().copy_(answer(case, received))
    out = torch.full(mine.add.shape, float("nan"), dtype=mine.add.dtype)
    add = mine.add if case.round.add else None
    if seed % 2:
        a2a.combine(out=out, add=add)
    else:
        a2a.combine_send()
        a2a.combine_recv(out=out, add=add)
    count = len(mine.ids)
    rows = [answer(case, w)[a2a.rank, :count] for w in wanted]
    if case.options.get("combine_by") == "fp8":
        kept = [weft.reference.quantize(row.nan_to_num(0.0), "fp8") for row in rows]
        rows = [weft.reference.dequantize(*k) for k in kept]
    carries = [(w.ids[a2a.rank, :count] >= 0).any(dim=1) for w in wanted]
    total = weft.reference.combine(rows, carries, add=add, dtype=case.round.dtype)
    assert torch.equal(bits(out), bits(total))


def compare(received: weft.Received, wanted: weft.Received) -> None:
    """Of slots without a token nothing was written but the ids."""
    assert torch.equal(received.counts, wanted.counts)
    assert torch.equal(received.ids, wanted.ids)
    if wanted.stats is not None:
        assert received.stats is not None
        assert torch.equal(received.stats, wanted.stats)
    carries = (wanted.ids >= 0).any(dim=2)
    assert torch.equal(received.weights[carries], wanted.weights[carries])
    for got, meant in zip(received.payloads, wanted.payloads, strict=True):
        assert torch.equal(bits(got[carries]), bits(meant[carries]))
        assert bool((got[~carries].contiguous().view(torch.uint8) == 0xAA).all())


def emulate(a2a: weft.AllToAll, library: str, number: int) -> EmulatedAllToAll:
    entries = EmulatedAllToAll(Path(library), number, a2a)
    a2a._rounds._entries = entries
    return entries


def launch_as(entries: EmulatedAllToAll, seed: int) -> None:
    plans = HOME if entries._shape.way == "fp8" else COMBINE
    turn = (seed + entries._rank) % len(DISPATCH)
    entries.dispatch, entries.combine = DISPATCH[turn], plans[turn]


def four_rounds(a2a: weft.AllToAll, case: Case, entries: EmulatedAllToAll | None) -> None:
    """Rounds of every launch shape; what was lost is reported."""
    for seed in range(4):
        if entries:
            launch_as(entries, seed)
        one_round(a2a, case, seed)
    with pytest.raises(BadExpertId) if case.lost else nullcontext():
        a2a.check()


def watched(group: weft.Group, case: Case, library: str, number: int) -> list[Event]:
    """Rounds of kernels on all ranks; returns what they did to memory."""
    with case.open(group) as a2a:
        entries = emulate(a2a, library, number)
        with watching(group, entries.library, a2a._workspace.site.stride) as watch:
            four_rounds(a2a, case, entries)
        return watch.events()


def mixed(group: weft.Group, case: Case, library: str, number: int) -> None:
    """One rank runs the CPU's own protocol: it is the same."""
    with case.open(group) as a2a:
        four_rounds(a2a, case, None if group.rank == 1 else emulate(a2a, library, number))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The kernels of all cases."""
    shapes = [case.shape for case in (*CASES.values(), CHOICES)]
    return str(compile_alltoall(shapes, tmp_path_factory.mktemp("alltoall")))


Ranks = Callable[..., Callable[..., list[Any]]]


@pytest.mark.parametrize("name", CASES)
def test_every_launch_shape_has_the_bits_of_the_reference(
    ranks: Ranks, library: str, name: str
) -> None:
    case, number = CASES[name], list(CASES).index(name)
    (events, *_) = ranks(RANKS, "threads")(watched, case, library, number)
    seen = ways(events, places(case.shape))
    seen.pop("failed", None)  # which only waits that last look at
    assert seen == expected(case)
    for phase in ("dispatched", "arrived"):
        assert len([e for e in events if e.offset in places(case.shape)[phase]]) > RANKS
    told = {e.how for e in events if e.share < 0 and e.how.startswith("writes r")}
    assert told == ({"writes release sys"} if case.lost else set())  # the mailbox


@pytest.mark.parametrize("name", CASES)
def test_kernels_and_cpu_ranks_understand_each_other(ranks: Ranks, library: str, name: str) -> None:
    case, number = CASES[name], list(CASES).index(name)
    ranks(RANKS, "threads")(mixed, case, library, number)


def expected(case: Case) -> dict[str, set[str]]:
    """How each part of a share is to be touched."""
    shape = case.shape
    flag = {"writes release sys", "reads acquire sys"}
    ways = {"dispatched": flag, "ready": flag, "route": {"writes weak"}, "outbox": {"reads weak"}}
    ways["arrived"] = {"updates acq_rel gpu"}
    # Narrow stores are plain ones and are not written down.
    ways |= {
        f"plane {i}": {"writes weak"} for i, size in enumerate(shape.row_bytes) if size % 16 == 0
    }
    if case.lost:
        ways["refusing"] = {"updates acq_rel gpu"}
    if shape.way == "push":
        ways["returned"] = {"writes weak", "reads weak"}
    if shape.way == "fp8":
        ways["returned"] = {"writes relaxed sys", "reads relaxed sys"}
        ways["arrived"] = {"updates acq_rel gpu", "reads acquire gpu"}
        ways["route"] = {"writes weak", "reads weak"}
    return ways


def by_choices(group: weft.Group, library: str, number: int) -> None:
    """Rows that each choice's expert stores at home, beside rows that are summed there."""
    plain = {"combine_by": "pull"}
    with CHOICES.open(group) as a2a, replace(CHOICES, options=plain).open(group) as other:
        groups, others = ExpertGroups(a2a), ExpertGroups(other)
        entries = emulate(a2a, library, number)
        for seed in range(4):
            launch_as(entries, seed)
            turn = tokens_of(CHOICES, seed)
            wanted = round_trip(other, others, turn, scattered)
            got = round_trip(a2a, groups, turn, stored_at_homes)
            assert torch.equal(bits(got), bits(wanted))
        a2a.check()


def test_choices_have_the_bits_of_sums(ranks: Ranks, library: str) -> None:
    ranks(RANKS, "threads")(by_choices, library, len(CASES))


def alone(group: weft.Group, library: str, number: int) -> str:
    """Rank 1 stays away from the second dispatch."""
    case = CASES["push"]
    with case.open(group, timeout=0.6) as a2a:
        launch_as(emulate(a2a, library, number), 0)
        one_round(a2a, case, 0)
        said, mine = "", sent_by(case, 1, group.rank)
        if group.rank != 1:
            for _ in range(2):
                with pytest.raises(PeerTimeout) as caught:
                    a2a.dispatch(mine.payloads, mine.ids, mine.weights, stats=mine.stats)
            said = str(caught.value)
        group.barrier()
        return said


def test_a_dispatch_ends_when_a_peer_stays_away(ranks: Ranks, library: str) -> None:
    said = ranks(RANKS, "threads")(alone, library, list(CASES).index("push"))
    for rank in (0, 2):
        assert f"rank {rank}, dispatch: rank 1 did not publish epoch 2" in said[rank]


def profiled(group: weft.Group, case: Case, library: str, number: int) -> list[Any]:
    with case.open(group, profile=True) as a2a:
        entries = emulate(a2a, library, number)
        for seed in range(4):
            launch_as(entries, seed)
            one_round(a2a, case, seed)
        group.barrier()
        return read_timeline(a2a._workspace)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The kernels that keep times."""
    shapes = [CASES[name].shape for name in PROFILED]
    folder = tmp_path_factory.mktemp("timed")
    return str(compile_alltoall(shapes, folder, defines=(DEFINE,)))


@pytest.mark.parametrize("name", PROFILED)
def test_profiled_kernels_keep_every_round_in_order(ranks: Ranks, timed: str, name: str) -> None:
    case, number = CASES[name], PROFILED.index(name)
    for rank, spans in enumerate(ranks(RANKS, "threads")(profiled, case, timed, number)):
        both = [(epoch, phase) for epoch in range(1, 5) for phase in ("dispatch", "combine")]
        assert [(span.epoch, span.phase) for span in spans] == both
        for span in spans:
            turn = (span.epoch - 1 + rank) % len(DISPATCH)
            plans = HOME if name == "fp8" else COMBINE
            plans = DISPATCH if span.phase == "dispatch" else plans
            whole = span.epoch % 2 == 0 or span.phase == "dispatch"
            ctas = plans[turn].workers * plans[turn].chunks
            if name != "pull" or whole:
                assert span.ctas == ctas
            assert span.rank == rank
            assert span.finished
            assert all(span.arrived_ns)
            stamps = [span.start_ns, span.sent_ns, span.published_ns, span.received_ns, span.end_ns]
            assert stamps == sorted(stamps), span
