"""Each rank's own residual, weight and scale, by every backend: epilogue_at="receiver"."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import weft
from tests.allreduce.test_allreduce import KINDS, expert_rows, make
from tests.sums import BACKENDS, Sum, fits, play, quants, same, settle
from weft.allreduce.call import FP8Token
from weft.errors import GeometryMismatch, InvalidArgument

CASES = [
    Sum(0, 256, special=True, differ=True),
    Sum(0, 2880, differ=True),
    Sum(0, 264, torch.float16, special=True, weight_dtype=torch.float32, differ=True),
    Sum(0, 1152, torch.float32, special=True, bias=1.0, differ=True),
]


def epilogues(group: weft.Group, case: Sum, sizes: tuple[int, ...]) -> None:
    with make(group, max(sizes), case, epilogue_at="receiver") as ar:
        for seed, tokens in enumerate(sizes):
            for quant in quants(group.device, case.hidden, group.rank):
                for backend in (*BACKENDS, "auto"):
                    if fits(ar, backend, tokens):
                        play(ar, case.next(tokens=tokens, seed=seed), backend, quant)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.hidden} {case.dtype}")
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_rank_gets_the_bits_of_its_own_epilogue(ranks, kind, case, count):
    sizes = (0, 1, count - 1, count, count + 1, 9, 33) if case.hidden < 1000 else (1, count + 1)
    ranks(count, kind)(epilogues, case, sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_eight_ranks(ranks, kind):
    ranks(8, kind)(epilogues, Sum(0, 512, special=True, differ=True), (1, 7, 8, 9))


def equal_inputs(group: weft.Group) -> None:
    """Where all ranks bring the same, both places of the epilogue give the same bits."""
    case = Sum(7, 384, special=True)
    with make(group, 7, case) as owner, make(group, 7, case, epilogue_at="receiver") as receiver:
        for quant in quants(group.device, case.hidden):
            for backend in BACKENDS:
                want = play(owner, case, backend, quant)
                same(play(receiver, case, backend, quant), want)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_inputs_have_the_same_bits_at_the_owner(ranks, kind):
    ranks(3, kind)(equal_inputs)


def sequence(group: weft.Group, calls: int) -> None:
    order, case = random.Random(11), Sum(0, 128, differ=True)
    with make(group, 24, case, epilogue_at="receiver") as ar:
        for call in range(calls):
            tokens = order.choice((0, 1, 2, 3, 5, 8, 13, 24))
            drawn = case.next(tokens=tokens, seed=call, special=order.random() < 0.2)
            play(ar, drawn, order.choice((*BACKENDS, "auto")))


@pytest.mark.parametrize("kind", [*KINDS, "threads"])
def test_backends_and_sizes_in_any_order(ranks, kind):
    ranks(3, kind)(sequence, 100)


def subsets(group: weft.Group) -> None:
    """Outputs that nobody wants, and those that lie on an input; a residual without a weight."""
    case = Sum(5, 256, differ=True)
    xs = [case.rows(rank, group.device) for rank in range(group.size)]
    residual, weight = case.shared(group.device, group.rank)
    with make(group, 8, case, epilogue_at="receiver") as ar:
        for backend in BACKENDS:
            x = xs[group.rank].clone()
            same(ar.fused(x, backend=backend), weft.reference.allreduce_fused(xs))
            got = ar.fused(x, residual=residual, backend=backend)
            assert got.out is None
            same(got, weft.reference.allreduce_fused(xs, residual))
            got = ar.fused(x, residual=residual, out=True, backend=backend)
            same(got, weft.reference.allreduce_fused(xs, residual))
            got = ar.fused(x, weight=weight, backend=backend)
            same(got, weft.reference.allreduce_fused(xs, None, weight))
            got = ar.fused(
                x, residual=residual, weight=weight, residual_out=False, norm_out=True,
                quant=FP8Token(), quant_out=False, scale_out=False, backend=backend,
            )  # fmt: skip
            same(got, weft.reference.allreduce_fused(xs, residual, weight))
            kept = residual.clone()
            got = ar.fused(
                x, residual=kept, weight=weight, residual_out=kept, norm_out=x, backend=backend
            )
            settle(group)
            assert got.norm is x
            assert got.residual is kept
            same(got, weft.reference.allreduce_fused(xs, residual, weight))
            x, kept = xs[group.rank].clone(), residual.clone()
            got = ar.fused(
                x, residual=kept, weight=weight, out=x, residual_out=False, norm_out=kept,
                backend=backend,
            )  # fmt: skip
            settle(group)
            same(got, weft.reference.allreduce_fused(xs, residual, weight))


@pytest.mark.parametrize("kind", KINDS)
def test_any_subset_of_outputs_also_in_place(ranks, kind):
    ranks(3, kind)(subsets)


def finalized(group: weft.Group) -> None:
    case = Sum(9, 256, differ=True)
    residual, weight = case.shared(group.device, group.rank)
    with make(group, 16, case, epilogue_at="receiver") as ar:
        prologues = [expert_rows(case, rank, group.device) for rank in range(group.size)]
        xs = [weft.reference.finalize_moe(p) for p in prologues]
        want = weft.reference.allreduce_fused(xs, residual, weight)
        for backend in BACKENDS:
            got = ar.fused(
                prologue=prologues[group.rank], residual=residual, weight=weight, backend=backend
            )
            settle(group)
            ar.check()
            same(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_made_of_experts_rows(ranks, kind):
    ranks(3, kind)(finalized)


def collective(group: weft.Group) -> None:
    case = Sum(0, 256, special=True, differ=True)
    with make(group, 20, case, backends=("collective",), epilogue_at="receiver") as ar:
        for seed, tokens in enumerate((1, 4, 17)):
            for quant in quants(group.device, case.hidden, group.rank):
                play(ar, case.next(tokens=tokens, seed=seed), "collective", quant)


@pytest.mark.parametrize("kind", KINDS)
def test_the_collective(ranks, kind):
    count = min(3, torch.cuda.device_count()) if kind == "cuda" else 3
    if count < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    ranks(count, kind)(collective)


def captured(group: weft.Group) -> None:
    """Replays with other numbers at the same addresses, of sizes that a cluster does not divide."""
    case = Sum(11, 7168, differ=True)
    with make(group, 11, case, epilogue_at="receiver") as ar:
        for backend in ("twoshot", "twoshot_bulk"):
            x = case.rows(group.rank, group.device)
            residual, weight = case.shared(group.device, group.rank)
            given: dict[str, Any] = {
                "residual": residual,
                "weight": weight,
                "quant": FP8Token(),
                "norm_out": True,
            }
            ar.fused(x, backend=backend, **given)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = ar.fused(x, backend=backend, **given)
            for seed in range(4):
                drawn = case.next(seed=seed)
                xs = [drawn.rows(rank, group.device) for rank in range(group.size)]
                x.copy_(xs[group.rank])
                brought = drawn.shared(group.device, group.rank)
                residual.copy_(brought[0])
                weight.copy_(brought[1])
                graph.replay()
                torch.cuda.synchronize()
                ar.check()
                want = weft.reference.allreduce_fused(xs, residual, weight, quant=FP8Token())
                same(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 4])
def test_in_a_cuda_graph(ranks, count):
    ranks(count, "cuda")(captured)


def disagreeing(group: weft.Group) -> str:
    at = ("owner", "receiver")[group.rank]
    with pytest.raises(GeometryMismatch) as caught:
        weft.AllReduce(group, max_tokens=8, hidden=256, epilogue_at=at)
    return str(caught.value)


def test_ranks_that_differ_are_told(ranks):
    for text in ranks(2, "cpu")(disagreeing):
        assert "epilogue_at" in text
        assert "owner" in text
        assert "receiver" in text


def unknown(group: weft.Group) -> None:
    with pytest.raises(InvalidArgument, match="epilogue_at is 'sender'"):
        weft.AllReduce(group, max_tokens=8, hidden=256, epilogue_at="sender")


def test_another_place_is_refused(ranks):
    ranks(2, "threads")(unknown)
