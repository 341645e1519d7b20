# SPDX-License-Identifier: Apache-2.0
"""Calls of the compat classes in CUDA graphs, as engines capture them, on 2 and on 4 GPUs.

A layer runs once, is captured, and its graph is replayed with other tokens, ids and weights in the
same tensors. On CPU ranks, which have no graphs, the same calls are made again instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from tests.compat.buffers import returned
from tests.compat.calls import Mapping, identity
from tests.compat.reduces import TOKENS, make
from tests.compat.test_allreduce_fusion import WIDE, compare, expected, outputs, specs
from tests.sums import Sum
from weft import reference
from weft.allreduce.call import Quant, Reduced
from weft.compat.deep_ep import Buffer
from weft.compat.flashinfer import (
    AllReduceFusionWorkspace,
    MoeAlltoAll,
    allreduce_fusion,
    moe_a2a_get_workspace_size_per_rank,
)
from weft.compat.triton_dist import EPLowLatencyAllToAllLayer

MOST, HIDDEN, TOP_K, EXPERTS = 8, 512, 4, 16
BF16 = torch.bfloat16
REPLAYS = 4
Tensors = tuple[torch.Tensor, ...]

PLACES = [
    pytest.param(2, "threads"),
    pytest.param(2, "cuda", marks=pytest.mark.gpu),
    pytest.param(4, "cuda", marks=pytest.mark.gpu(4)),
]


def tokens_of(rank: int, seed: int, tokens: int) -> Tensors:
    """Return (x, ids, weights) on the CPU, with a few ids of no expert."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn((tokens, HIDDEN), generator=generator).to(BF16)
    scores = torch.rand((tokens, EXPERTS), generator=generator)
    ids = scores.topk(TOP_K, dim=1).indices
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    return x, ids, torch.rand((tokens, TOP_K), generator=generator)


def replayer(group: weft.Group, call: Callable[[], None]) -> Callable[[], None]:
    """Call once, and return a function that replays the call as a graph."""
    call()
    if group.device.type != "cuda":
        return call
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    group.barrier()
    with torch.cuda.graph(graph):
        call()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def refill(places: Tensors, values: Tensors) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


def widened(numbers: Any) -> torch.Tensor:
    """Return the result of identity experts, without a copy to the host."""
    if isinstance(numbers, torch.Tensor):
        return numbers
    x, scales = numbers
    blocks = x.float().view(*x.shape[:-1], -1, 128)
    rows: torch.Tensor = (scales[..., None] * blocks).reshape(x.shape).to(BF16)
    return rows


def deep_ep_layers(group: weft.Group, use_fp8: bool, hooks: bool, layers: int) -> None:
    """Capture some layers in one graph: SGLang waits for events or hooks, vLLM for hooks.

    An odd number of layers, so that a replay does not end on the slot that it began with.
    """
    buffer = Buffer(group, num_rdma_bytes=1 << 20, low_latency_mode=True)
    tokens = MOST - group.rank
    device = group.device
    inputs = [
        tuple(t.to(device) for t in tokens_of(group.rank, layer, tokens)) for layer in range(layers)
    ]
    outs = [torch.empty((tokens, HIDDEN), dtype=BF16, device=device) for _ in range(layers)]
    mode: dict[str, Any] = {"async_finish": not hooks, "return_recv_hook": hooks}

    def step() -> None:
        for (x, ids, weights), out in zip(inputs, outs, strict=True):
            numbers, _, handle, event, hook = buffer.low_latency_dispatch(
                x, ids, MOST, EXPERTS, use_fp8=use_fp8, **mode
            )
            hook() if hook is not None else event.current_stream_wait()
            combined, event, hook = buffer.low_latency_combine(
                widened(numbers), ids, weights, handle, **mode
            )
            hook() if hook is not None else event.current_stream_wait()
            out.copy_(combined)

    replay = replayer(group, step)
    for turn in range(1, REPLAYS):
        fresh = [tokens_of(group.rank, 10 * turn + layer, tokens) for layer in range(layers)]
        for places, values in zip(inputs, fresh, strict=True):
            refill(places, values)
        replay()
        for out, values in zip(outs, fresh, strict=True):
            want = returned(values, EXPERTS, group.size, "fp8" if use_fp8 else None)
            assert torch.equal(out.cpu(), want)
    buffer.check()
    group.barrier()
    buffer.destroy()


def triton_dist_layer(group: weft.Group) -> None:
    layer = EPLowLatencyAllToAllLayer(
        *(MOST, HIDDEN, TOP_K, True, group.rank, EXPERTS, group.size, group.size), group=group
    )
    inputs = tuple(t.to(group.device) for t in tokens_of(group.rank, 0, MOST))
    x, ids, weights = inputs
    out = torch.empty_like(x)

    def step() -> None:
        token, scale, _, meta = layer.dispatch(x, None, ids)
        out.copy_(layer.combine(widened((token, scale)), ids, weights, meta))

    replay = replayer(group, step)
    for turn in range(1, REPLAYS):
        fresh = tokens_of(group.rank, turn, MOST)
        refill(inputs, fresh)
        replay()
        want = returned(fresh, EXPERTS, group.size, "fp8", recipe="triton_dist")
        assert torch.equal(out.cpu(), want)
    layer.check()
    group.barrier()
    layer.finalize()


def flashinfer_sizes(group: weft.Group, in_workspace: bool) -> None:
    """Capture a graph for each batch size over one workspace, largest first, as engines do."""
    device, ranks = group.device, group.size
    row = HIDDEN * 2 + TOP_K * 8
    a2a = MoeAlltoAll(
        Mapping(group.rank, group.size), max_num_tokens=MOST, top_k=TOP_K, num_experts=EXPERTS,
        workspace_size_per_rank=moe_a2a_get_workspace_size_per_rank(ranks, MOST, row, HIDDEN * 2),
        group=group,
    )  # fmt: skip
    placement = weft.Placement.blocks(EXPERTS, ranks)
    own = torch.tensor(placement.experts_of(group.rank), device=device)
    made = []
    for tokens in (MOST, 3, 1):
        x, ids, weights = (t.to(device) for t in tokens_of(group.rank, tokens, tokens))
        given = x, ids.int(), weights
        out = torch.empty_like(x)

        def step(given: Tensors = given, out: torch.Tensor = out) -> None:
            x, ids, weights = given
            rows = a2a.dispatch(ids, [x, ids, weights], len(x), EXPERTS, 1)
            y = identity(rows, own)
            if in_workspace:
                place = a2a.get_combine_payload_tensor_in_workspace(len(x), HIDDEN, BF16)
                y = place.copy_(y)
            out.copy_(a2a.combine(y, len(x), payload_in_workspace=in_workspace))

        made.append((given, out, replayer(group, step)))
    for turn in range(1, REPLAYS):
        for given, out, replay in (*made, *made[::-1]):
            x, ids, weights = tokens_of(group.rank, 10 * turn + len(out), len(out))
            refill(given, (x, ids.int(), weights))
            replay()
            want = reference.identity_round_trip(x, ids.int(), weights, placement, ranks=ranks)
            assert torch.equal(out.cpu(), want)
    a2a.check()
    a2a.close()


class Reduces:
    """One pattern's call, its tensors and the expected results."""

    def __init__(
        self,
        workspace: AllReduceFusionWorkspace,
        pattern: int,
        quant: Quant | None,
        given: dict[str, Any],
    ) -> None:
        self.workspace, self.group, self.device = workspace, workspace.group, workspace.group.device
        self.pattern, self.quant, self.given = pattern, quant, given
        case = Sum(TOKENS, WIDE)
        self.places = case.rows(self.group.rank, self.device), *case.shared(self.device)
        self.out = outputs(self.device, pattern, TOKENS)

    def __call__(self, use_oneshot: bool | None) -> None:
        x, residual, weight = self.places
        kwargs = self.given | {"residual_in": residual, "rms_gamma": weight, "rms_eps": Sum.eps}
        kwargs |= {"use_oneshot": use_oneshot, "launch_with_pdl": True}
        allreduce_fusion(x, self.workspace, self.pattern, **kwargs, **self.out)

    def fill(self, seed: int) -> Reduced:
        """Write other rows, and return the expected results."""
        case = Sum(TOKENS, WIDE, seed=seed)
        xs = [case.rows(rank, self.device) for rank in range(self.group.size)]
        refill(self.places, (xs[self.group.rank], *case.shared(self.device)))
        return expected(case, 0, xs, self.pattern, self.quant)


def fused_patterns(group: weft.Group) -> None:
    """Capture every pattern with each backend and with "auto", in one graph."""
    index = torch.arange(TOKENS, dtype=torch.int32, device=group.device)[:, None]
    patterns = specs(group.device, group.rank)
    patterns.append((7, None, {"expanded_idx_to_permuted_idx": index}))
    with make(group, hidden_dim=WIDE) as workspace:
        for use_oneshot in (None, True, False):
            calls = [Reduces(workspace, *each) for each in patterns]

            def step(calls: list[Reduces] = calls, use_oneshot: bool | None = use_oneshot) -> None:
                for call in calls:
                    call(use_oneshot)

            replay = replayer(group, step)
            for turn in range(1, REPLAYS):
                wants = [call.fill(10 * turn + i) for i, call in enumerate(calls)]
                replay()
                for call, want in zip(calls, wants, strict=True):
                    compare(call.out, want)
        workspace.check()


BODIES: dict[str, tuple[Any, ...]] = {
    **{
        f"deep_ep{', FP8' * use_fp8}{', hooks' * hooks}": (deep_ep_layers, use_fp8, hooks, 3)
        for use_fp8, hooks in ((False, False), (False, True), (True, True))
    },
    "triton_dist": (triton_dist_layer,),
    "flashinfer": (flashinfer_sizes, False),
    "flashinfer, in the workspace": (flashinfer_sizes, True),
    "flashinfer's all-reduces": (fused_patterns,),
}


@pytest.mark.parametrize(("count", "kind"), PLACES)
@pytest.mark.parametrize("name", BODIES)
def test_replays_are_right(ranks, count, kind, name):
    ranks(count, kind)(*BODIES[name])
