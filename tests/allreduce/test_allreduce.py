# SPDX-License-Identifier: Apache-2.0
"""The fused all-reduce equals the reference bit by bit for every backend, size and epilogue."""

import contextlib
import itertools
import random
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import refused
from tests.ranks import ANY, on_ranks
from tests.rounds import synchronize
from tests.sums import BACKENDS, Sum, assert_same_outputs, fits, play, quant_specs
from weft.allreduce.call import FP8Token, Quant
from weft.errors import InvalidArgument


def make(group: weft.Group, tokens: int, case: Sum, **changes: object) -> weft.AllReduce:
    sizes = {"max_tokens": tokens, "hidden": case.hidden, "dtype": case.dtype}
    patient = {"timeout": 600.0, "first_timeout": 600.0}
    kwargs: dict[str, Any] = sizes | {"epilogue_at": case.epilogue_at} | patient | changes
    return weft.AllReduce(group, **kwargs)


def epilogues(group: weft.Group, case: Sum, sizes: tuple[int, ...]) -> None:
    with make(group, max(sizes), case) as ar:
        for seed, tokens in enumerate(sizes):
            for quant in quant_specs(group.device, case.hidden, group.rank if case.differ else 0):
                for backend in (*BACKENDS, "auto"):
                    if fits(ar, backend, tokens):
                        play(ar, case.next(tokens=tokens, seed=seed), backend, quant)


SHAPES = [
    Sum(0, 256, special=True),
    Sum(0, 2880),
    Sum(0, 264, torch.float16, special=True, weight_dtype=torch.float32),
    Sum(0, 1152, torch.float32, special=True, bias=1.0),
    Sum(0, 7168, special=True, weight_dtype=torch.float32, bias=1.0),
]
SHAPES += [case.next(differ=True) for case in SHAPES[:4]]


# Every dtype and place of the epilogue, with every number of ranks.
CASES: list[tuple[Sum, int, tuple[int, ...]]]
CASES = [(case, 1 + (i + n) % 4, ()) for i, case in enumerate(SHAPES) for n in (0, 2)]
CASES += [(Sum(0, 512, special=True, differ=d), 8, (1, 7, 8, 9)) for d in (False, True)]
CASES += [(Sum(0, 128), 3, (31, 32, 33, 63, 64, 65, 127, 128, 200))]  # around the limits


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize(
    ("case", "count", "sizes"),
    CASES,
    ids=lambda of: f"{of.hidden} {of.dtype}{' own' * of.differ}" if isinstance(of, Sum) else None,
)
def test_every_backend_and_epilogue_has_the_bits_of_the_reference(ranks, kind, case, count, sizes):
    few = (0, 1, count - 1, count + 1, 9, 33) if case.hidden < 1000 else (1, count + 1)
    ranks(count, kind)(epilogues, case, sizes or few)


@on_ranks(3, "cpu", "threads", "cuda")
def test_backends_and_sizes_in_any_order(group):
    """On the same slots, with other objects in between."""
    order = random.Random(7)
    cases = [Sum(0, 128), Sum(0, 128), Sum(0, 128, differ=True)]
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(make(group, 24, case)) for case in cases]
        for call in range(250):
            number = order.choice((0, 0, 1, 2, 2))
            ar, case = made[number], cases[number]
            tokens = order.choice((0, 1, 2, 3, 5, 8, 13, 24))
            backend = order.choice((*BACKENDS, "auto"))
            drawn = case.next(tokens=tokens, seed=call, special=order.random() < 0.2)
            play(ar, drawn, backend)


@pytest.mark.parametrize("first_epoch", [(1 << 40) - 20, (1 << 32) - 20, (1 << 24) - 20])
@on_ranks(2, "threads")
def test_epochs_wrap(group, first_epoch):
    case = Sum(3, 128)
    with make(group, 8, case, _first_epoch=first_epoch) as ar:
        for call in range(40):
            play(ar, case.next(seed=call), BACKENDS[call % 3])


@pytest.mark.parametrize("differ", [False, True])
@on_ranks(3)
def test_any_subset_of_outputs_also_in_place(group, differ):
    """Only requested outputs are written; inputs may be overwritten in place."""
    case = Sum(5, 256, differ=differ)
    xs = [case.rows(rank, group.device) for rank in range(group.size)]
    residual, weight = case.shared(group.device, group.rank)
    both = {"residual": residual, "weight": weight}
    nothing = {"residual_out": False, "quant_out": False, "scale_out": False}
    # Arguments, "x" and "residual" for the inputs themselves, and the outputs that they request.
    calls: list[tuple[dict[str, Any], set[str]]] = [
        ({}, {"out"}),
        ({"out": "x"}, {"out"}),
        ({"residual": residual}, {"residual"}),
        ({"residual": residual, "out": True}, {"out", "residual"}),
        ({"weight": weight, "out": True}, {"out", "norm"}),
        ({**both, "quant": FP8Token(), "norm_out": True, **nothing}, {"norm"}),
        ({**both, "residual_out": "residual", "norm_out": "x"}, {"residual", "norm"}),
        ({**both, "residual_out": False, "out": "x", "norm_out": "residual"}, {"out", "norm"}),
    ]
    with make(group, 8, case) as ar:
        for backend, (kwargs, outputs) in itertools.product(BACKENDS, calls):
            own = {"x": xs[group.rank].clone(), "residual": residual.clone()}
            over = {name: own[v] for name, v in kwargs.items() if isinstance(v, str)}
            if "residual" in kwargs:
                over["residual"] = own["residual"]
            got = ar.fused(own["x"], **{**kwargs, **over}, backend=backend)
            synchronize(group.device)
            assert {f.name for f in fields(got) if getattr(got, f.name) is not None} == outputs
            for name in outputs:
                argument = "out" if name == "out" else f"{name}_out"
                assert argument not in over or getattr(got, name) is over[argument]
            want = weft.reference.allreduce_fused(xs, kwargs.get("residual"), kwargs.get("weight"))
            assert_same_outputs(got, want)


@pytest.mark.parametrize(
    ("dtype", "differ"),
    [*((t, False) for t in (torch.bfloat16, torch.float16, torch.float32)), (torch.bfloat16, True)],
)
@on_ranks(3)
def test_every_kind_of_call_also_of_experts_rows(group, dtype, differ):
    case = Sum(9, 256, dtype, differ=differ)
    with make(group, 16, case) as ar:
        for backend in BACKENDS:
            every_call(ar, case, backend, [None])


def expert_rows(case: Sum, rank: int, device: torch.device) -> weft.MoEFinalize:
    generator = torch.Generator(device=device).manual_seed(rank)
    count, size = max(20, case.tokens), (case.tokens, 4)
    rows = torch.randn((count, case.hidden), generator=generator, device=device).to(case.dtype)
    index = torch.randint(-1, 20, size, generator=generator, device=device).int()
    scales = torch.rand(size, generator=generator, device=device)
    shared = rows[: case.tokens].clone() if rank != 1 else None
    weights = scales.to(case.dtype) if rank == 2 else scales
    return weft.MoEFinalize(rows, index, weights, shared, 1.0 if rank == 1 else 2.5)


def every_call(
    ar: weft.AllReduce,
    case: Sum,
    backend: str,
    specs: Iterable[Quant | None],
    *,
    in_place: bool = True,
) -> None:
    """Yield every kind of call: all outputs, none, in-place outputs, rows of experts."""
    device, rank, ranks = ar.group.device, ar.group.rank, range(ar.group.size)
    for quant in specs:
        play(ar, case, backend, quant)
    xs = [case.rows(r, device) for r in ranks]
    residual, weight = case.shared(device, rank)
    assert_same_outputs(ar.fused(xs[rank], backend=backend), weft.reference.allreduce_fused(xs))
    expected = weft.reference.allreduce_fused(xs, residual, weight)
    x, kept = xs[rank].clone(), residual.clone()
    over: dict[str, Any] = {"residual_out": kept, "norm_out": x} if in_place else {}
    assert_same_outputs(
        ar.fused(x, residual=kept, weight=weight, **over, backend=backend), expected
    )
    made = [expert_rows(case, r, device) for r in ranks]
    xs = [weft.reference.finalize_moe(m) for m in made]
    shared = made[rank].shared
    norm = shared if in_place and shared is not None else True
    got = ar.fused(prologue=made[rank], weight=weight, norm_out=norm, backend=backend)
    assert_same_outputs(got, weft.reference.allreduce_fused(xs, None, weight))
    ar.check()


@on_ranks(2)
def test_an_index_out_of_range_is_dropped_and_reported(group):
    case = Sum(2, 128)
    with make(group, 2, case) as ar:
        rows = torch.ones((3, 128), dtype=case.dtype, device=group.device)
        bad = 7 if group.rank == 0 else 2
        index = torch.tensor([[0, bad], [1, -1]], dtype=torch.int32, device=group.device)
        got = ar.fused(prologue=weft.MoEFinalize(rows, index))
        synchronize(group.device)
        assert got.out is not None
        assert got.out[0, 0].item() == 2 * group.size - 1
        if group.rank == 0:
            words = "index[0, 1] of a MoEFinalize is 7; its rows are 0..2"
            refused(InvalidArgument, ar.check, words)
        ar.check()  # raised once


@on_ranks(2, "threads")
def test_memory_bytes_is_exact(group):
    with weft.AllReduce(group, max_tokens=40, hidden=256) as ar:
        reported = weft.AllReduce.memory_bytes(ranks=2, hidden=256, max_tokens=40)
        assert ar.heap.size == reported
    assert weft.AllReduce.memory_bytes(ranks=8, hidden=7168, max_tokens=2048) < 90e6
