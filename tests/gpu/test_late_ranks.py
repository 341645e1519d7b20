# SPDX-License-Identifier: Apache-2.0
"""What may cost time and what may not: a late rank costs its peers that once, profiling little."""

import statistics
import time

import pytest
import torch

import weft
from tests.lowlatency_rounds import Mode
from tests.rounds import Round
from weft.bench.harness import CALLS as PAIRS
from weft.bench.harness import capture, rounds_of

pytestmark = pytest.mark.gpu(2)

CALLS = 20
LATE_US = (600, 1200)  # about as long as a GPU's threads took to read their host's memory at once


def milliseconds(group, tokens):
    """Medians of CALLS all-reduces, of which rank 0 begins the first one late by LATE_US."""
    x = torch.randn(tokens, 7168, device=group.device).bfloat16()
    found = []
    with weft.AllReduce(group, max_tokens=tokens, hidden=7168, timeout=20.0) as allreduce:
        allreduce.fused(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                allreduce.fused(x)
        for late in LATE_US:
            times = []
            for _ in range(11):
                group.barrier()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if group.rank == 0:
                    time.sleep(late / 1e6)
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
            found.append(statistics.median(times))
    return found


@pytest.mark.parametrize("tokens", [32, 384])
def test_a_late_rank_is_waited_for_once(tokens):
    """Each call took 0.5 to 1 ms for the rest of a graph, 10 to 20 ms for 20 calls."""
    for rank in weft.launch(milliseconds, tokens, ranks=2, device="cuda"):
        assert all(took < 4.0 for took in rank), rank


def pair_us(group, *, profile):
    case = Round((128,) * group.size, hidden=7168, top_k=8, experts=256, router="perfect")
    with Mode(more={"profile": profile}).make(group, case, 128) as a2a:
        x, ids, weights, _ = case.of(group.rank, group.device)
        y, out = torch.zeros_like(a2a.slots[0].x, dtype=x.dtype), torch.empty_like(x)

        def pairs():
            for _ in range(PAIRS):
                got = a2a.dispatch(x, ids, weights)
                a2a.combine(y, ids, weights, got.handle, out)

        pairs()
        torch.cuda.synchronize()
        times = rounds_of(group, capture(pairs).replay, 15)
        return max(group.all_gather(statistics.median(times)))


def profiled_beside_plain(group):
    times = [[pair_us(group, profile=profile) for profile in (True, False)] for _ in range(3)]
    return [min(each) for each in zip(*times, strict=True)]


@pytest.mark.slow
def test_profiling_costs_less_than_three_percent():
    """Or less than a microsecond: of few ranks' pairs, that is more."""
    count = min(torch.cuda.device_count(), 8)
    for profiled, plain in weft.launch(profiled_beside_plain, ranks=count, device="cuda"):
        assert profiled < max(1.03 * plain, plain + 1.0)
