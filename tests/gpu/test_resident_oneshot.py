"""Both forms of one shot, with ranks that share a GPU: bits, and graphs whose sizes change."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import weft
from tests.allreduce.test_allreduce import expert_rows
from tests.gpu.test_allreduce_graphs import HIDDEN, Step
from tests.sums import Sum, play, quants, same, settle

pytestmark = pytest.mark.gpu

SIZES = (1, 66, 67, 128, 512)  # waves of 132 SMs hold 66 rows of 7168 in bf16 at once
FORMS = {"waves": (False, False), "resident": (True, True), "one of each": (True, False)}


def make(group: weft.Group, forms: tuple[bool, bool]) -> weft.AllReduce:
    return weft.AllReduce(
        group, max_tokens=512, hidden=HIDDEN, timeout=60.0, _resident_oneshot=forms[group.rank]
    )


def exact(group: weft.Group, forms: tuple[bool, bool]) -> list[str]:
    """Every size with every quant, and rows of experts; returns the kernels of the sizes."""
    with make(group, forms) as ar:
        for seed, tokens in enumerate((*SIZES, *reversed(SIZES))):
            case = Sum(tokens, HIDDEN, seed=seed, special=True, bias=1.0)
            for quant in quants(group.device, HIDDEN):
                play(ar, case, "oneshot", quant)
            made = [expert_rows(case, rank, group.device) for rank in range(group.size)]
            xs = [weft.reference.finalize_moe(m) for m in made]
            got = ar.fused(prologue=made[group.rank], backend="oneshot")
            settle(group)
            ar.check()
            same(got, weft.reference.allreduce_fused(xs))
        kernels: Any = ar._kernels
        return [kernels._launches["oneshot", t].launcher.function.name for t in SIZES]


@pytest.mark.parametrize("forms", FORMS)
def test_both_forms_have_the_bits_of_the_reference(ranks, forms):
    stays = FORMS[forms]
    for rank, kernels in enumerate(ranks(2, "cuda")(exact, stays)):
        assert kernels[0] == "weft_allreduce_oneshot"
        for kernel in kernels[3:]:  # more rows than a GPU of up to 200 SMs holds at once
            assert kernel == "weft_allreduce_oneshot" + "_resident" * stays[rank]


def replayed(group: weft.Group, forms: tuple[bool, bool]) -> int:
    """Sizes change from call to call: within a graph, from graph to graph, and to eager calls."""
    wrong = torch.zeros((), dtype=torch.int64, device=group.device)
    with make(group, forms) as ar:
        steps = [Step(ar, tokens, "oneshot", wrong) for tokens in SIZES]
        graphs = []
        for some in ([steps[-1], steps[0], *steps[1:], steps[0]], *([step] for step in steps)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for step in some:
                    step()
            graphs.append(graph)
        order = random.Random(11)
        for turn in range(150):
            order.choice(graphs).replay()
            if turn % 7 == 0:
                order.choice(steps)()
        torch.cuda.synchronize()
        ar.check()
    return int(wrong)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("forms", FORMS)
def test_graphs_whose_sizes_change(ranks, forms):
    assert ranks(2, "cuda")(replayed, FORMS[forms]) == [0, 0]
