# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine on a CPU give the reference's bits, in every way and launch shape, and order
every access that another rank, CTA or thread depends on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.alltoall.alltoall_rounds import (
    CASES,
    CHOICES,
    MOVING,
    RANKS,
    TOKENS,
    Case,
    one_round,
    sent_by,
    tokens_of,
)
from tests.alltoall.emulate_alltoall import EmulatedAllToAll, compile_alltoall, places
from tests.emulator.watch import Event, watching, ways
from tests.patience import hurry
from tests.rounds import bits, drop_refusals, play
from tests.sending import round_trip, scattered, stored_at_owners
from weft.alltoall.kernels import Plan
from weft.errors import BadExpertId, PeerTimeout
from weft.grouping.operator import ExpertGroups
from weft.runtime.timeline import DEFINE, read_timeline

pytestmark = pytest.mark.slow

PROFILED = ("pull", "push", "fp8")
# Workers, parts of a row, threads.
DISPATCH = (Plan(3, 1, 32), Plan(1, 2, 64), Plan(2, 2, 32), Plan(1, 1, 96))
COMBINE = (Plan(2, 2, 32), Plan(3, 1, 64), Plan(1, 1, 32), Plan(2, 1, 96))
# The coordinator, those that push and those that sum; strips at once.
COMBINE_FP8 = (
    Plan(3, 1, 64, 1, 1),
    Plan(6, 1, 32, 3, 2),
    Plan(4, 1, 96, 2, 2),
    Plan(4, 1, 64, 1, 1),
)


def emulate(a2a: weft.AllToAll, library: str, number: int) -> EmulatedAllToAll:
    entries = EmulatedAllToAll(Path(library), number, a2a)
    a2a._kernels = entries
    return entries


def launch_as(entries: EmulatedAllToAll, seed: int) -> None:
    plans = COMBINE_FP8 if entries._shape.combine == "push_fp8" else COMBINE
    turn = (seed + entries._rank) % len(DISPATCH)
    entries.dispatch, entries.combine = DISPATCH[turn], plans[turn]


def four_rounds(a2a: weft.AllToAll, case: Case, entries: EmulatedAllToAll | None) -> int:
    """Rounds of every launch shape; what was lost is reported. Returns how many rows came here."""
    rows = 0
    for seed in range(4):
        if entries:
            launch_as(entries, seed)
        rows += one_round(a2a, case, seed)
    with pytest.raises(BadExpertId) if case.lost else nullcontext():
        a2a.check()
    return rows


def watched(group: weft.Group, case: Case, library: str, number: int) -> tuple[int, list[Event]]:
    """Rounds of kernels on all ranks; returns how many rows came, and what memory saw."""
    with case.open(group) as a2a:
        entries = emulate(a2a, library, number)
        with watching(group, entries.library, a2a._site.stride) as watch:
            rows = four_rounds(a2a, case, entries)
        return rows, watch.events()


def mixed(group: weft.Group, case: Case, library: str, number: int) -> None:
    """One rank runs the CPU's own protocol: it is the same."""
    with case.open(group) as a2a:
        four_rounds(a2a, case, None if group.rank == 1 else emulate(a2a, library, number))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The kernels of all cases."""
    shapes = [case.shape for case in (*CASES.values(), CHOICES, MOVING)]
    return str(compile_alltoall(shapes, tmp_path_factory.mktemp("alltoall")))


Ranks = Callable[..., Callable[..., list[Any]]]


@pytest.mark.parametrize("name", CASES)
def test_every_launch_shape_has_the_bits_of_the_reference(
    ranks: Ranks, library: str, name: str
) -> None:
    case, number = CASES[name], list(CASES).index(name)
    found = ranks(RANKS, "threads")(watched, case, library, number)
    rows, (_, events) = sum(count for count, _ in found), found[0]
    seen = ways(events, places(case.shape))
    seen.pop("failed", None)  # which only waits that last look at
    assert seen == expected(case)
    # No vector is stored twice, and none but those of rows that somebody wants.
    writes = Counter(
        part
        for event in events
        if event.how == "writes weak"
        for part in ways([event], places(case.shape))
    )
    assert writes["plane 0"] == rows * case.shape.row_bytes[0] // 16
    if case.shape.combine == "push":
        assert writes["returned"] == rows * case.shape.out_bytes // 16
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
    if shape.combine == "push":
        ways["returned"] = {"writes weak", "reads weak"}
    if shape.combine == "push_fp8":
        ways["returned"] = {"writes relaxed sys", "reads relaxed sys"}
        ways["arrived"] = {"updates acq_rel gpu", "reads acquire gpu"}
        ways["route"] = {"writes weak", "reads weak"}
    return ways


def by_choices(group: weft.Group, library: str, number: int) -> None:
    """Rows that each choice's expert stores at its owner, beside rows that are summed there."""
    plain = {"combine": "pull"}
    with CHOICES.open(group) as a2a, replace(CHOICES, options=plain).open(group) as other:
        groups, others = ExpertGroups(a2a), ExpertGroups(other)
        entries = emulate(a2a, library, number)
        for seed in range(4):
            launch_as(entries, seed)
            turn = tokens_of(CHOICES, seed)
            wanted = round_trip(other, others, turn, scattered)
            got = round_trip(a2a, groups, turn, stored_at_owners)
            assert torch.equal(bits(got), bits(wanted))
        a2a.check()


def test_choices_have_the_bits_of_sums(ranks: Ranks, library: str) -> None:
    ranks(RANKS, "threads")(by_choices, library, len(CASES))


def moving(group: weft.Group, library: str, number: int) -> None:
    """Other `rows` move every slot: ids that an earlier round left there must not be seen."""
    with MOVING.open(group) as a2a:
        entries = emulate(a2a, library, number)
        for seed, rows in enumerate((None, 8, 5, 1, 2, 8, 1, 7, None, 3)):
            launch_as(entries, seed)
            most = rows or TOKENS
            tokens = tuple((most, 0, most // 2)[(r + seed) % 3] for r in range(group.size))
            play(a2a, MOVING.round.next(tokens=tokens, seed=seed), rows=rows)
        a2a.check()


def test_rows_of_every_number_after_another(ranks: Ranks, library: str) -> None:
    ranks(RANKS, "threads")(moving, library, len(CASES) + 1)


def alone(group: weft.Group, library: str, number: int) -> str:
    """Rank 1 stays away from the second dispatch."""
    case = CASES["push"]
    with case.open(group) as a2a:
        launch_as(emulate(a2a, library, number), 0)
        one_round(a2a, case, 0)
        hurry(a2a, 4.0)
        group.barrier()
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
        seen = f"rank {rank}, dispatch: rank 1 did not publish epoch 2"
        told = f"rank {rank}, dispatch: rank {2 - rank} waited in vain for rank 1"
        assert seen in said[rank] or told in said[rank], said[rank]


def profiled(group: weft.Group, case: Case, library: str, number: int) -> list[Any]:
    with case.open(group, profile=True) as a2a:
        entries = emulate(a2a, library, number)
        for seed in range(4):
            launch_as(entries, seed)
            one_round(a2a, case, seed)
        group.barrier()
        drop_refusals(a2a)
        return read_timeline(a2a.heap)


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
            plans = COMBINE_FP8 if name == "fp8" else COMBINE
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
