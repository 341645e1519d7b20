# SPDX-License-Identifier: Apache-2.0
"""Invalid input is refused, and changes no rank's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from tests.kinds import CPU, CUDA, on_ranks
from tests.rounds import Round, bits, play, synchronize
from weft.alltoall.config import AllToAllConfig, AllToAllSpec
from weft.errors import (
    BadExpertId,
    GeometryMismatch,
    InvalidArgument,
    OutOfOrder,
    TokenOverflow,
)

SIZES: dict[str, Any] = {"max_tokens": 8, "top_k": 2, "num_experts": 4, "hidden": 16}


def refused(error: type[Exception], call: Callable[[], object], *words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


@on_ranks(2, [CPU, CUDA])
def test_invalid_input_is_refused_on_the_host(group):
    d = group.device
    x = torch.zeros((3, 16), dtype=torch.bfloat16, device=d)
    ids = torch.tensor([[0, 1], [2, 3], [1, -1]], dtype=torch.int32, device=d)
    w = torch.ones((3, 2), device=d)
    with weft.AllToAll(group, **SIZES) as a2a:
        send = a2a.dispatch
        refused(InvalidArgument, lambda: send(x, ids[:, :1].contiguous()), "[3, 1]", "2")
        refused(InvalidArgument, lambda: send(x[:2], ids), "[2, 16]", "[3, 16]")
        refused(InvalidArgument, lambda: send([x, x], ids), "2 payload", "1")
        flat = torch.zeros(16 * 4 + 1, dtype=torch.bfloat16, device=d)
        refused(InvalidArgument, lambda: send(flat[1:49].view(3, 16), ids), "16 bytes", "clone")
        many = torch.zeros((9, 16), dtype=torch.bfloat16, device=d)
        nine = torch.zeros((9, 2), dtype=torch.int32, device=d)
        refused(TokenOverflow, lambda: send(many, nine), "9 tokens", "max_tokens=8")
        refused(OutOfOrder, a2a.combine, "combine out of order", "expects dispatch")
        send(x, ids, w)
        refused(OutOfOrder, lambda: send(x, ids), "3 tokens are dispatched")
        inside = a2a.output()[1, :3]
        refused(InvalidArgument, lambda: a2a.combine(out=inside), "out is in the symmetric memory")
        refused(InvalidArgument, lambda: a2a.combine(add=x[:2]), "add", "[2, 16]")
        refused(InvalidArgument, lambda: a2a.combine(x), "y", "[3, 16]")
        a2a.combine()
        a2a.check()
    refused(OutOfOrder, a2a.output, "closed")
    refused(OutOfOrder, lambda: a2a.dispatch(x, ids), "closed")
    a2a.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 33}, ("top_k", "33", "1..32")),
        ({"top_k": 5}, ("top_k", "5", "4 experts")),
        ({"hidden": 12}, ("24 bytes", "pad hidden to 16")),
        ({"expert_map": [0, 1]}, ("2 entries", "4")),
        ({"expert_map": [0, 1, 2, 0]}, ("expert_map[2]", "rank 2", "0..1")),
        ({"payloads": [weft.Payload((1,), torch.uint8)] * 9}, ("9 payload", "1..8")),
    ],
)
def test_invalid_sizes_are_refused(change, words):
    spec = AllToAllSpec(ranks=2, **(SIZES | change))
    with pytest.raises(InvalidArgument) as caught:
        AllToAllConfig.from_spec(spec)
    assert all(word in str(caught.value) for word in words), caught.value


def different_sizes(group: weft.Group) -> str:
    with pytest.raises(GeometryMismatch) as caught:
        weft.AllToAll(group, **{**SIZES, "hidden": 16 + 16 * (group.rank == 1)})
    return str(caught.value)


def test_ranks_that_disagree_raise_at_creation(ranks):
    texts = ranks(3, "threads")(different_sizes)
    assert len(set(texts)) == 1
    assert "hidden" in texts[0]
    assert "16" in texts[0]
    assert "32" in texts[0]


@on_ranks(2, [CPU, CUDA])
def test_invalid_input_is_reported_by_the_device(group):
    d = group.device
    case = Round(tokens=(8, 8), top_k=2, experts=4, hidden=16)
    with weft.AllToAll(group, **SIZES) as a2a:
        for wide, bad in ((False, 4), (False, -2), (True, 2**32), (True, -(2**63)), (True, 2**31)):
            x, ids, weights, _ = case.inputs_of(group.rank, d)
            ids = ids.long() if wide else ids
            ids[3, 1] = bad
            received = a2a.dispatch(x, ids, weights)
            a2a.output().copy_(weft.reference.identity_experts(received, case.dtype))
            out = a2a.combine()
            expected = weft.reference.identity_round_trip(
                x, ids, weights, a2a.placement, ranks=group.size
            )
            assert torch.equal(bits(out), bits(expected))
            synchronize(d)
            where = f"topk_ids[3, 1] is {bad}"
            refused(BadExpertId, a2a.check, f"rank {group.rank}", where, "0..3")
            a2a.check()
        x, ids, weights, _ = case.inputs_of(group.rank, d)
        ids[5] = 2
        a2a.dispatch(x, ids, weights)
        a2a.combine()
        synchronize(d)
        refused(BadExpertId, a2a.check, "topk_ids[5, 1]", "repeats expert 2")
        for count in (9, -1):
            n = torch.tensor([count], dtype=torch.int32, device=d)
            received = a2a.dispatch(*case.inputs_of(group.rank, d)[:3], num_tokens=n)
            synchronize(d)
            group.barrier()
            assert received.counts.tolist() == [8 if count == 9 else 0] * 2
            a2a.combine()
            synchronize(d)
            refused(TokenOverflow, a2a.check, f"is {count}", "0..8")
        play(a2a, case.next(seed=5))
        a2a.check()
