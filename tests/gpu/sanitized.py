# SPDX-License-Identifier: Apache-2.0
"""Program for compute-sanitizer: `python -m tests.gpu.sanitized PROGRAM` is one rank of it.

The reference runs on the CPU, and only whole copies move between it and the GPU: the sanitizer
patches every module that a torch kernel brings, and there are hundreds of kernels in each.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import weft
from tests.rounds import Round, bits, combine_options
from weft.alltoall.config import Offsets
from weft.errors import BadExpertId
from weft.grouping.operator import ExpertGroups, Grouped

CPU, BEGAN = torch.device("cpu"), time.monotonic()
PATIENT: dict[str, Any] = {"timeout": 200.0, "first_timeout": 200.0}


def say(*words: object) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s", *words, flush=True)


def arrived(a2a: weft.AllToAll, received: weft.Received) -> weft.Received:
    shape, heap = a2a.config.shape, a2a.heap
    layout, slots = Offsets.from_shape(shape), shape.ranks * shape.tokens
    words = layout.route_bytes // 4
    route = heap.tensor((slots, words), torch.int32, offset=layout.route).cpu()
    route = route.view(shape.ranks, shape.tokens, words)
    weights = route[..., shape.padded_top_k :].view(torch.float32)
    return weft.Received(
        (received.x.cpu(),),
        route[..., : shape.top_k],
        weights[..., : shape.top_k],
        received.counts.cpu(),
    )


def rounds(group: weft.Group) -> None:
    few: dict[str, Any] = {"num_sms": 1} if group.device.type == "cuda" else {}
    cases: tuple[tuple[Round, dict[str, Any]], ...] = (
        (Round(tokens=(16, 9), hidden=7168, top_k=8, experts=256), {}),
        (Round(tokens=(3, 0), router="holes", top_k=9, experts=19, hidden=264), {}),
        (Round(tokens=(5, 7), hidden=256), {"combine_dtype": "fp8", "quantize": "fp8"}),
        (Round(tokens=(16, 9), hidden=7168), few),  # so the rings in shared memory go round
    )
    for case, options in cases:
        exact = "quantize" not in options
        with weft.AllToAll(group, **case.sizes(16), **PATIENT, **options) as a2a:
            say("built for", options)
            x, ids, weights, _ = case.inputs_of(group.rank, CPU)
            if ids.numel():
                ids[0, 0] = 2**31 - 1
            args = [t.to(group.device) for t in (x, ids, weights)]
            for _ in range(2):
                received = a2a.dispatch(*args)
                if exact:
                    y = weft.reference.identity_experts(arrived(a2a, received), case.dtype)
                    a2a.output().copy_(y)
                out = a2a.combine().cpu()
                if exact:
                    expected = weft.reference.identity_round_trip(
                        x, ids, weights, a2a.placement, ranks=group.size
                    )
                    assert torch.equal(bits(out), bits(expected))
            if ids.numel():
                with contextlib.suppress(BadExpertId):
                    a2a.check()
                    raise AssertionError("the wrong id was not refused")
            say("played with", options)


def sums(group: weft.Group) -> None:
    made = [torch.randn(17, 1032, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    *parts, residual = (t.bfloat16() for t in made)
    weight = torch.linspace(0.5, 2, 1032)
    expected = weft.reference.allreduce_fused(parts, residual, weight)
    assert expected.norm is not None
    assert expected.residual is not None
    x, added, scale = (t.to(group.device) for t in (parts[group.rank], residual, weight))
    sizes: dict[str, Any] = {"max_tokens": 17, "hidden": 1032, "timeout": 200.0}
    for at in ("owner", "receiver"):
        with weft.AllReduce(group, epilogue_at=at, **sizes) as reduce:
            for backend in reduce.backends * 2:
                result = reduce.fused(x, residual=added, weight=scale, backend=backend)
                assert result.norm is not None
                assert result.residual is not None
                assert torch.equal(bits(result.norm.cpu()), bits(expected.norm))
                assert torch.equal(bits(result.residual.cpu()), bits(expected.residual))
        say("summed by", reduce.backends, "with the epilogue at the", at)


def by_expert(group: weft.Group) -> None:
    case = Round(tokens=(16, 9), hidden=1024, top_k=4, experts=16)
    x, ids, weights, _ = (t.to(group.device) for t in case.inputs_of(group.rank, CPU))
    receiver = {"reduce": "receiver"}
    sender = {"reduce": "sender", "combine_dtype": "fp8", "split_phase": True}
    modes: tuple[dict[str, Any], ...] = (receiver, sender)
    for options in modes:
        sizes = case.sizes(16)
        with weft.LowLatencyAllToAll(group, **sizes, timeout=200.0, **options) as low:
            y = torch.randn(low.num_local_experts, 32, 1024).bfloat16().to(group.device)
            for _ in range(3):
                got = low.dispatch(x, ids, weights)
                out = low.combine(y, ids, weights, got.handle)
            assert torch.isfinite(out.cpu().float()).all()
            low.check()
        say("low latency with", options)


CASE = Round(tokens=(16, 9), top_k=5, experts=12, hidden=640, router="holes")
WAYS = (("push", "scatter"), ("push", "send"), ("choices", "send"), ("fp8", "send"))


def rows_return(group: weft.Group) -> None:
    """Play every way twice; rows that are not FP8 must have the bits of the first. Collective."""
    x, ids, weights, _ = CASE.inputs_of(group.rank, CPU)
    args = [t.to(group.device) for t in (x, ids, weights)]
    expected: torch.Tensor | None = None
    for way, sent in WAYS:
        options = combine_options(way) | {"split_phase": True}
        with weft.AllToAll(group, **CASE.sizes(16), **options, **PATIENT) as a2a:
            groups = ExpertGroups(a2a, align=8)
            for _ in range(2):
                grouped = groups.gather(a2a.dispatch(*args))
                send(a2a, groups, grouped, sent)
                out = a2a.combine_recv().cpu()
                expected = out if expected is None else expected
                assert torch.isfinite(out.float()).all()
                assert way == "fp8" or torch.equal(bits(out), bits(expected)), (way, sent)
            a2a.check()
            groups.close()


def send(a2a: weft.AllToAll, groups: ExpertGroups, grouped: Grouped, how: str) -> None:
    slots = 16 * a2a.group.size
    answers = torch.randn((slots, CASE.hidden), generator=torch.Generator().manual_seed(a2a.rank))
    y = answers.bfloat16()[grouped.slot.cpu().long().clamp_min(0)].to(a2a.group.device)
    if how == "scatter":
        groups.scatter(y)
        a2a.combine_send()
    else:
        groups.send(y)


PROGRAMS = {"exchanges": (rounds, sums, by_expert), "groups": (rows_return,)}


def main(program: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    say("imported")
    with weft.Group.from_torch(timeout=300.0) as group:
        say("met")
        for part in PROGRAMS[program]:
            part(group)
    print("sound")


if __name__ == "__main__":
    main(sys.argv[1])
