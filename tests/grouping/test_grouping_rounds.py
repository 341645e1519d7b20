# SPDX-License-Identifier: Apache-2.0
"""Grouping as part of whole rounds: exact sums, a grouped GEMM, graphs, refusals, memory."""

from collections.abc import Callable

import pytest
import torch

import weft
from tests.groups import VARIANTS, empty_round, fill, host, make, random_ids
from tests.ranks import on_ranks
from tests.rounds import Round, bits, synchronize
from weft.errors import InvalidArgument, OutOfOrder
from weft.grouping.operator import ExpertGroups


@on_ranks(3, "cpu", "threads", "cuda")
def test_whole_rounds(group):
    case = Round(tokens=(16, 5, 0)[: group.size], top_k=4, experts=10, router="holes", add=True)
    options = {"max_tokens": 16, "top_k": 4, "num_experts": 10, "hidden": case.hidden}
    with weft.AllToAll(group, **options) as a2a:  # type: ignore[arg-type]
        groups = ExpertGroups(a2a, align=8)
        for seed in range(6):
            now = case.next(seed=seed, tokens=case.tokens[seed % 3 :] + case.tokens[: seed % 3])
            x, ids, _, add = now.inputs_of(group.rank, group.device)
            received = a2a.dispatch(x, ids)
            a2a.output().fill_(float("nan"))
            groups.scatter(groups.gather(received).x)
            out = a2a.combine(add=add)
            expected = weft.reference.identity_round_trip(
                x, ids, None, a2a.placement, ranks=group.size, add=add
            )
            assert torch.equal(bits(out), bits(expected))
            synchronize(group.device)
            a2a.check()


def refuses(error: type[Exception], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=words):
        call()


@on_ranks(2)
def test_invalid_input_is_refused_on_the_host(group):
    with make(group) as a2a, make(group) as other:
        for options, words in (
            ({"align": 0}, "align is 0"),
            ({"align": 16, "max_rows": 40}, "max_rows is 40"),
            ({"max_rows": 0}, "max_rows is 0"),
            ({"layout": "sparse"}, "'sparse'"),
            ({"layout": "masked", "max_rows": 2**30}, "exceeds the limit"),
        ):
            refuses(InvalidArgument, words, lambda: ExpertGroups(a2a, **options))  # noqa: B023
        groups = ExpertGroups(a2a)
        y = torch.zeros(groups.y_shape, dtype=a2a.dtype, device=group.device)
        foreign = other.latest_received
        refuses(OutOfOrder, "gather outside of a round", lambda: groups.gather(foreign))
        received = empty_round(a2a)
        refuses(InvalidArgument, "result of its own dispatch", lambda: groups.gather(foreign))
        refuses(OutOfOrder, "scatter without a gather", lambda: groups.scatter(y))
        groups.gather(received)
        refuses(InvalidArgument, "y has shape", lambda: groups.scatter(y[1:]))
        refuses(InvalidArgument, "y has dtype", lambda: groups.scatter(y.float()))
        groups.scatter(y)
        refuses(OutOfOrder, "scatter without a gather", lambda: groups.scatter(y))
        groups.gather(received)
        a2a.combine()
        empty_round(a2a)  # the rows are those of the round before
        refuses(OutOfOrder, "scatter without a gather", lambda: groups.scatter(y))
        groups.close()
        groups.close()
        refuses(OutOfOrder, "after close", lambda: groups.gather(received))


@on_ranks(2)
def test_memory_bytes_is_exact(group):
    with make(group) as a2a:
        for options in VARIANTS.values():
            groups = ExpertGroups(a2a, **options)  # type: ignore[arg-type]
            reported = ExpertGroups.memory_bytes(a2a, **options)  # type: ignore[arg-type]
            assert reported == groups.buffers.bytes()
            assert reported > sum(rows.nbytes for rows in groups.buffers.rows)
        assert ExpertGroups(a2a).max_rows == group.size * 150 * 3
        assert ExpertGroups(a2a, align=16).max_rows == (group.size * 450 + 5 * 15) // 16 * 16


@on_ranks(2, "cuda")
def test_a_captured_round_replays_with_any_routing(group):
    with make(group) as a2a:
        received, groups = empty_round(a2a), ExpertGroups(a2a, align=16)
        y = torch.zeros(groups.y_shape, dtype=a2a.dtype, device=group.device)
        grouped = groups.gather(received)
        groups.scatter(y)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            groups.gather(received)
            y.copy_(grouped.x * 2)
            groups.scatter(y)
        for seed, counts in enumerate(([150, 3], [0, 0], [77, 150])):
            ids = random_ids(received.ids.shape, a2a.num_local_experts, seed, 0.3, 0.0)
            fill(received, ids, counts, seed)
            received.payloads[0].copy_(torch.rand(received.payloads[0].shape))
            graph.replay()
            torch.cuda.synchronize()
            inputs = host(received)
            out = a2a.output().cpu()
            for s, count in enumerate(counts):
                for t in range(count):
                    total = torch.zeros(24)
                    for k in range(3):
                        if inputs.ids[s, t, k] >= 0:
                            total = total + inputs.weights[s, t, k] * (inputs.x[s, t] * 2).float()
                    if bool((inputs.ids[s, t] >= 0).any()):
                        assert torch.equal(out[s, t], total.bfloat16())
        a2a.check()
