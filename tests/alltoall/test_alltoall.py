# SPDX-License-Identifier: Apache-2.0
"""Rounds of every byte known, in every way of combining, on every kind of ranks."""

from typing import Any

import pytest
import torch

import weft
from tests.gpu.test_sanitizer import PROGRAMS
from tests.ranks import ANY, CPU, EMULATED, on_ranks
from tests.rounds import Round, play

PUSH, FP8 = {"combine": "push"}, {"combine_dtype": "fp8"}
UNEVEN = Round(tokens=(5, 0, 16, 3))
SMALL = Round(tokens=(5, 8, 2, 1))
ONE_HOT = SMALL.next(router="one-hot", dtype=torch.float32, add=True)
CASES = {
    "uneven tokens": UNEVEN,
    "all full": UNEVEN.next(tokens=(16,) * 4, router="perfect", add=True),
    "no rank has tokens": UNEVEN.next(tokens=(0,) * 4),
    "everything to the last rank": UNEVEN.next(tokens=(16, 7, 16, 1), router="one-hot"),
    "holes": UNEVEN.next(tokens=(9, 16, 2, 11), router="holes", add=True),
    "no weights": UNEVEN.next(weighted=False),
    "top 1": SMALL.next(top_k=1),
    "top 9 of 18, uneven experts": SMALL.next(top_k=9, experts=18),
    "top 32 of 61": SMALL.next(top_k=32, experts=61),
    "fewer experts than ranks": SMALL.next(top_k=2, experts=3),
    "fp16": SMALL.next(dtype=torch.float16),
    "fp32, wide ids": SMALL.next(dtype=torch.float32, ids_dtype=torch.int64),
    "one vector a row": SMALL.next(hidden=8),
    "a long row": SMALL.next(hidden=7168, top_k=8, experts=256),
    "pushed": UNEVEN.next(hidden=256, add=True, options=PUSH),
    "pushed, no rank has tokens": UNEVEN.next(tokens=(0,) * 4, hidden=256, options=PUSH),
    "pushed, perfect": UNEVEN.next(hidden=1152, experts=18, top_k=6, options=PUSH),
    "pushed, fp32": ONE_HOT.next(hidden=384, options=PUSH),
    "pushed, a long row": SMALL.next(hidden=7168, top_k=8, experts=256, options=PUSH),
    "fp8 back": UNEVEN.next(hidden=256, add=True, options=FP8),
    "fp8 back, no rank has tokens": UNEVEN.next(tokens=(0,) * 4, hidden=256, options=FP8),
    # 1152 columns are two strips and a quarter, 4608 are nine.
    "fp8 back, strips": UNEVEN.next(hidden=1152, experts=18, top_k=6, add=True, options=FP8),
    "fp8 back, fp16": SMALL.next(hidden=4608, dtype=torch.float16, router="holes", options=FP8),
    "fp8 back, fp32": ONE_HOT.next(hidden=640, options=FP8),
    "fp8 back, a long row": SMALL.next(hidden=7168, top_k=8, experts=256, options=FP8),
    # Eight planes of every width of a store, 24 bytes and less beside a row of 65 vectors.
    "planes": Round(
        *((5, 8, 0, 2), 3, 9, 520),
        add=True,
        extra=(20, 7, 6, 24, 1, 2, 12),
        lost=True,
        options={"stats": 70, "expert_map": [2, 0, 1, 1, 0, 2, 3, 1, 0]},
    ),  # fmt: skip
    "pushed, fp16, holes, statistics": Round(
        *((8, 1, 4, 0), 5, 10, 136, torch.float16, "holes"), extra=(3,), options=PUSH | {"stats": 3}
    ),
    "fp8 both ways": Round(
        *((3, 0, 8, 5), 4, 9, 640), add=True, extra=(12, 5), options=FP8 | {"quantize": "fp8"}
    ),
    "one number, no rank has tokens": UNEVEN.next(tokens=(0,) * 4, options={"stats": 1}),
    "4099 numbers, fp8 back": SMALL.next(hidden=128, options=FP8 | {"stats": 4099}),
    "mxfp8 of fp32": Round(
        *((2, 6, 3, 1), 4, 6, 384, torch.float32),
        ids_dtype=torch.int64,
        extra=(1,),
        lost=True,
        options={"quantize": "mxfp8"},
    ),  # fmt: skip
}
# What the emulator plays.
SLOW_SHAPES = (
    *("fp8 back, fp16", "planes", "pushed, fp16, holes, statistics", "fp8 both ways"),
    *("mxfp8 of fp32",),
)


def rounds(a2a: weft.AllToAll, case: Round) -> None:
    """Play whole and split rounds, of few tokens, and in as few slots as needed."""
    for seed in range(4):
        turn = case.turned(seed)
        counts = [n // 2 for n in turn.tokens] if seed == 2 else None
        rows = max(1, *turn.tokens) if seed == 3 else None
        play(a2a, turn, halves=seed % 2 == 1, counts=counts, rows=rows)
    if case.lost:
        with pytest.raises(weft.errors.BadExpertId):
            a2a.check()
    a2a.check()


def every_case(group: weft.Group, names: list[str]) -> None:
    for name in names:
        with CASES[name].open(group, split_phase=True) as a2a:
            rounds(a2a, CASES[name])


@pytest.mark.parametrize("kind", [CPU, *ANY, EMULATED])
def test_every_byte_of_every_case(ranks, kind):
    names = SLOW_SHAPES if kind == "emulated" else CASES
    ranks(4, kind)(every_case, list(names))


def other_sizes(group: weft.Group) -> None:
    case = Round(tokens=(5, 16, 3)[: group.size], experts=7)
    with case.open(group, split_phase=True) as a2a:
        rounds(a2a, case)


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_other_group_sizes(ranks, kind, count):
    ranks(count, kind)(other_sizes)


@pytest.mark.parametrize(
    "options", [{}, PUSH, FP8 | {"quantize": "fp8"}], ids=["pull", "push", "fp8"]
)
@on_ranks(3, "threads", "cuda", "emulated")
def test_rows_of_a_larger_round_do_not_leak_into_a_smaller_one(group, options):
    """A different `rows` moves every slot."""
    case = Round(tokens=(12, 3, 7), hidden=128, options=options)
    with case.open(group, 12) as a2a:
        for seed, rows in enumerate((None, 12, 5, 1, 2, 5, 12, 1, 7, None, 3)):
            most = rows or 12
            tokens = tuple((most, 0, most // 2)[(r + seed) % 3] for r in range(group.size))
            play(a2a, case.next(tokens=tokens, seed=seed, add=seed % 2 == 0), rows=rows)
        a2a.check()


NANS = {torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF, torch.float32: 0x7FFFFFFF}


@pytest.mark.parametrize("dtype", NANS)
@on_ranks(1)
def test_every_value_is_rounded_to_nearest_even(group, dtype):
    """Test all bit patterns of the half types, and as many of fp32, plus each other."""
    words = torch.int32 if dtype == torch.float32 else torch.int16
    generator = torch.Generator().manual_seed(3)
    span = 2**31 if words == torch.int32 else 2**15
    some = torch.randint(-span, span, (8, 8192), generator=generator).to(words)
    if words == torch.int16:
        some = torch.arange(-span, span, dtype=words).view(8, 8192)
    y = some.to(group.device).view(dtype)
    add = some.flatten()[torch.randperm(some.numel(), generator=generator)].view(8, 8192)
    add = add.to(group.device).view(dtype)
    ids = torch.zeros((8, 1), dtype=torch.int32, device=group.device)
    case = Round((8,), top_k=1, experts=1, hidden=8192, dtype=dtype)
    with case.open(group, 8) as a2a:
        a2a.dispatch(torch.zeros_like(y), ids)
        out = a2a.combine(y[None], add=add)
    total = (0.0 + y.float()) + add.float()  # sums start from +0
    nan = torch.tensor(NANS[dtype], dtype=words, device=group.device)
    expected = torch.where(total.isnan(), nan, total.to(dtype).view(words))
    assert torch.equal(out.view(words), expected)


@on_ranks(3)
def test_epochs_wrap(group):
    case = Round(tokens=(3, 5, 2))
    with case.open(group, _first_epoch=(1 << 40) - 4) as a2a:
        for seed in range(9):
            play(a2a, case.next(seed=seed), poison=False)
        assert len(a2a.history()) == 18


@pytest.mark.parametrize("program", PROGRAMS)
def test_rounds_that_compute_sanitizer_runs_are_right(ranks, program):
    for part in PROGRAMS[program]:
        ranks(2, "threads")(part)


@on_ranks(2, "threads")
def test_memory_bytes_is_exact(group):
    for stats in (0, 7):
        sizes: dict[str, Any] = {**Round((9,), 2, 4, 24).sizes(9), "stats": stats}
        with weft.AllToAll(group, **sizes) as a2a:
            assert weft.AllToAll.memory_bytes(ranks=group.size, **sizes) == a2a.heap.size
