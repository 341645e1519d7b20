# SPDX-License-Identifier: Apache-2.0
"""One shot of more tokens than fit on a GPU at once, in each form; ranks share a GPU."""

from typing import Any

import pytest
import torch

import weft
from tests.allreduce.test_allreduce import expert_rows
from tests.rounds import synchronize
from tests.sums import Sum, assert_same_outputs, play, quant_specs

pytestmark = pytest.mark.gpu

SIZES = (1, 66, 67, 128, 512)  # waves of 132 SMs hold 66 rows of 7168 in bf16 at once


def exact(group: weft.Group, hidden: int) -> list[str]:
    """Check every size with every quant, rows of experts, all sizes in a graph, and the kernels."""
    with weft.AllReduce(group, max_tokens=512, hidden=hidden, timeout=60.0) as ar:
        cases = [Sum(n, hidden, seed=n, special=True, bias=1.0) for n in (*SIZES, *SIZES[::-1])]
        for case in cases:
            for quant in quant_specs(group.device, hidden):
                play(ar, case, "oneshot", quant)
            made = [expert_rows(case, rank, group.device) for rank in range(group.size)]
            xs = [weft.reference.finalize_moe(m) for m in made]
            got = ar.fused(prologue=made[group.rank], backend="oneshot")
            synchronize(group.device)
            ar.check()
            assert_same_outputs(got, weft.reference.allreduce_fused(xs))
        rows = [[case.rows(rank, group.device) for rank in range(group.size)] for case in cases]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = [ar.fused(xs[group.rank], backend="oneshot") for xs in rows]
        for _ in range(20):
            graph.replay()
        synchronize(group.device)
        ar.check()
        for got, xs in zip(result, rows, strict=True):
            assert_same_outputs(got, weft.reference.allreduce_fused(xs))
        kernels: Any = ar._kernels
        return [kernels._launches["oneshot", n].launcher.function.name for n in SIZES]


@pytest.mark.parametrize("hidden", [4096, 7168])
def test_rows_that_do_not_fit_at_once_match_the_reference(ranks, hidden):
    for kernels in ranks(2, "cuda")(exact, hidden):
        assert kernels[0] == "weft_allreduce_oneshot"
        for kernel in kernels[3:]:  # more rows than a GPU of up to 200 SMs holds at once
            assert kernel == "weft_allreduce_oneshot" + "_resident" * (hidden == 7168)
