# SPDX-License-Identifier: Apache-2.0
"""The cost of a late rank, which its peers pay once, and of profiling."""

import statistics
import time

import pytest
import torch

import weft

pytestmark = pytest.mark.gpu(2)

CALLS = 20
LATE_US = (600, 1200)  # about as long as a GPU's threads took to read their host's memory at once


def milliseconds(group, tokens):
    x = torch.randn(tokens, 7168, device=group.device).bfloat16()
    result = []
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
            result.append(statistics.median(times))
    return result


@pytest.mark.parametrize("tokens", [32, 384])
def test_a_late_rank_delays_its_peers_once(tokens):
    """If it delayed every call, each would take 0.5 to 1 ms in a graph."""
    for rank in weft.launch(milliseconds, tokens, ranks=2, device="cuda"):
        assert all(took < 4.0 for took in rank), rank
