# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine in the emulator: memory order, timelines and faults.

That the kernels give the reference's bits in every launch shape is in test_alltoall.py.
"""

import time
from collections import Counter
from typing import Any

import pytest
import torch

import weft
from tests.alltoall.test_alltoall import CASES, SLOW_SHAPES, rounds
from tests.alltoall.test_ways import strange_rows
from tests.emulator import operators
from tests.emulator.operators import EmulatedAllToAll, compile_alltoall
from tests.emulator.watch import watching, ways
from tests.mutations import COMBINE_FP8 as FAULTS
from tests.patience import hurry
from tests.ranks import on_ranks
from tests.rounds import Round, bits, drop_refusals, play
from tests.sending import return_by_scatter, return_by_send, return_by_store, round_trip
from weft.errors import PeerTimeout
from weft.grouping.operator import ExpertGroups
from weft.runtime.timeline import read_timeline
from weft.shape import Shape

pytestmark = pytest.mark.slow
RANKS, WATCHED = 3, SLOW_SHAPES[1:]
PROFILED = ("planes", "pushed, fp16, holes, statistics", "fp8 both ways")


def case_of(name: str) -> Round:
    case = CASES[name]
    options = dict(case.options)
    if "expert_map" in options:
        options["expert_map"] = [owner % RANKS for owner in options["expert_map"]]
    return case.next(tokens=case.tokens[:RANKS], options=options)


@pytest.mark.parametrize("name", WATCHED)
@on_ranks(RANKS, "emulated")
def test_memory_accesses_have_the_required_order(group, name):
    case, rows = case_of(name), 0
    with case.open(group, 8, split_phase=True) as a2a:
        watch, entries = operators.watched(a2a), a2a._local.kernels
        assert isinstance(entries, EmulatedAllToAll)
        with watching(group, entries.library, a2a.site.stride):
            for seed in range(4):
                counts = [n // 2 for n in case.turned(seed).tokens] if seed % 2 else None
                rows += play(a2a, case.turned(seed), halves=seed % 2 == 0, counts=counts)
        drop_refusals(a2a)
        rows, events, shape = sum(group.all_gather(rows)), watch.events(), a2a.config.shape
    places = operators.places(shape)
    seen = ways(events, places)
    seen.pop("failed", None)  # which only waits that last look at
    assert seen == expected_ways(shape, case_of(name).lost)
    # No vector is stored twice, and none but those of rows that some rank waits for.
    stores = [event for event in events if event.how == "writes weak"]
    writes = Counter(part for event in stores for part in ways([event], places))
    assert writes["plane 0"] == rows * shape.row_bytes[0] // 16
    if shape.combine == "push":
        assert writes["returned"] == rows * shape.out_bytes // 16
    for phase in ("dispatched", "arrived"):
        assert len([e for e in events if e.offset in places[phase]]) > RANKS
    reported = {e.how for e in events if e.share < 0 and e.how.startswith("writes r")}
    assert reported == ({"writes release sys"} if case_of(name).lost else set())  # the mailbox


def expected_ways(shape: Shape, lost: bool) -> dict[str, set[str]]:
    """Return the expected accesses of each part of a share. Narrow stores are not recorded."""
    flag = {"writes release sys", "reads acquire sys"}
    ways = {"dispatched": flag, "ready": flag, "route": {"writes weak"}, "outbox": {"reads weak"}}
    ways["arrived"] = {"updates acq_rel gpu"}
    planes = [i for i, size in enumerate(shape.row_bytes) if size % 16 == 0]
    ways |= {f"plane {i}": {"writes weak"} for i in planes}
    if lost:
        ways["refusing"] = {"updates acq_rel gpu"}
    if shape.combine == "push":
        ways["returned"] = {"writes weak", "reads weak"}
    if shape.combine == "push_fp8":
        ways["returned"] = {"writes relaxed sys", "reads relaxed sys"}
        ways["arrived"] = {"updates acq_rel gpu", "reads acquire gpu"}
        ways["route"] = {"writes weak", "reads weak"}
    return ways


@pytest.mark.parametrize("name", WATCHED)
@on_ranks(RANKS, "threads")
def test_kernels_and_cpu_ranks_interoperate(group, name):
    """Rank 1 runs the CPU kernels, which speak the same protocol."""
    case = case_of(name)
    with case.open(group, 8, split_phase=True) as a2a:
        if group.rank != 1:
            shape = a2a.config.shape
            a2a._local.kernels = EmulatedAllToAll(compile_alltoall(shape), shape, group.rank)
        rounds(a2a, case)


CHOICES = (
    Round((8, 3, 5), 5, 9, 264, torch.float16, "holes", add=True),
    Round((8, 3, 5), 5, 12, 264, torch.float32),
    Round((3, 8, 5), 16, 24, 640, add=True),
)


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: f"top {case.top_k} of {case.experts}")
@on_ranks(RANKS, "emulated")
def test_gemm_push_has_the_bits_of_push(group, case):
    with (
        case.open(group, 8, combine="gemm_push", split_phase=True) as a2a,
        case.open(group, 8, split_phase=True) as other,
    ):
        groups, others = ExpertGroups(a2a), ExpertGroups(other)
        for seed in range(4):
            turn = case.turned(seed)
            expected = round_trip(other, others, turn, return_by_scatter)
            assert torch.equal(bits(round_trip(a2a, groups, turn, return_by_store)), bits(expected))
        a2a.check()


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: f"top {case.top_k} of {case.experts}")
@on_ranks(RANKS, "threads", "emulated", "cuda")
def test_a_receiver_adds_all_rows_in_top_k_order(group, case):
    with case.open(group, 8, combine="gemm_push", reduce="receiver", split_phase=True) as a2a:
        groups = ExpertGroups(a2a)
        for seed in range(4):
            turn = case.turned(seed)
            out = round_trip(a2a, groups, turn, return_by_send)
            x, ids, weights, add = turn.inputs_of(group.rank, group.device)
            rows = a2a.heap.tensor(
                (8, case.top_k, case.hidden), case.dtype, offset=a2a.config.offsets.returned
            )
            total = torch.zeros_like(x, dtype=torch.float32)
            for k in range(case.top_k):
                row = weights[:, k, None] * rows[: len(x), k].float()
                valid = (ids[:, k, None] >= 0) & (ids[:, k, None] < case.experts)
                total = torch.where(valid, total + row, total)
            expected = total + add.float() if case.add else total
            assert torch.equal(bits(out), bits(expected.to(case.dtype)))
            assert bool(out.any()) == bool(len(x))
        a2a.check()


@pytest.mark.parametrize("name", PROFILED)
@on_ranks(RANKS, "emulated")
def test_profiled_kernels_keep_every_round_in_order(group, name):
    case = case_of(name)
    with case.open(group, 8, profile=True, split_phase=True) as a2a:
        for seed in range(4):
            play(a2a, case.turned(seed), halves=seed % 2 == 0)
        group.barrier()
        drop_refusals(a2a)
        spans = read_timeline(a2a.heap)
    entries: Any = a2a._local.kernels
    both = [(epoch, phase) for epoch in range(1, 5) for phase in ("dispatch", "combine")]
    assert [(span.epoch, span.phase) for span in spans] == both
    for span in spans:
        turn = span.epoch - 1 + group.rank
        plans = operators.DISPATCH if span.phase == "dispatch" else entries.combines
        whole = span.epoch % 2 == 0 or span.phase == "dispatch"
        if name != "planes" or whole:  # the first half of a pull is flags only
            plan = plans[turn % len(plans)]
            assert span.ctas == plan.workers * plan.chunks
        assert span.rank == group.rank
        assert span.finished
        assert all(span.arrived_ns)
        stamps = [span.start_ns, span.sent_ns, span.published_ns, span.received_ns, span.end_ns]
        assert stamps == sorted(stamps), span


def strange_round(a2a: weft.AllToAll, x: torch.Tensor, ids: torch.Tensor) -> bool:
    """Play rows of special values, the ninth a NaN of all ones; return whether all is right."""
    received = a2a.dispatch(x, ids)
    a2a.output().copy_(weft.reference.identity_experts(received, a2a.dtype))
    a2a.output()[:, 8].view(torch.int16)[:] = -1
    if a2a.rank == 1:
        time.sleep(0.2)  # so that rank 0 looks for rows before they come
    out = a2a.combine()
    expected = weft.reference.identity_round_trip(
        x, ids, None, a2a.placement, ranks=2, combine_dtype="fp8"
    )
    values = [rows.nan_to_num(7.0) for rows in (out, expected)]
    return torch.equal(out.isnan(), expected.isnan()) and torch.equal(*values)


def is_blank(a2a: weft.AllToAll) -> bool:
    """Whether all words hold the sentinel, as the next round expects."""
    size = (a2a.config.shape.returned_rows * a2a.config.shape.returned_bytes,)
    words = a2a.heap.tensor(size, torch.uint8, offset=a2a.config.offsets.returned)
    return bool((words == 0xFF).all())


@pytest.mark.parametrize("name", [None, *FAULTS])
@on_ranks(2, "threads")
def test_a_fault_is_detected(group, name):
    """Play rounds until one is wrong on some rank."""
    mutation, right = None if name is None else FAULTS[name], True
    case = Round(tokens=(9, 9), hidden=1152, top_k=2, experts=4)
    with case.open(group, combine_dtype="fp8") as a2a:
        shape = a2a.config.shape
        library = compile_alltoall(shape, mutation=mutation)
        a2a._local.kernels = entries = EmulatedAllToAll(library, shape, group.rank)
        entries.combines = operators.COMBINE_FP8[1:2]
        x = strange_rows(1152)[:9].bfloat16()
        x[8].view(torch.int16)[:] = -1
        ids = torch.tensor([[0, 2], [1, -1], [3, -1]], dtype=torch.int32).repeat(3, 1)
        ids[8] = torch.tensor([0, 2])
        if mutation is not None:
            hurry(a2a, 8.0)
        for _ in range(2):
            try:
                right = strange_round(a2a, x, ids)
            except PeerTimeout:
                right = False
            group.barrier()
            right = all(group.all_gather(right and is_blank(a2a)))
            if not right:
                break
        assert right == (name is None)
