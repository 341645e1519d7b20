# SPDX-License-Identifier: Apache-2.0
"""The calls of engines, in their order and with their arguments: SGLang 0.5.17 and 0.5.23, vLLM."""

from __future__ import annotations

import gc
import inspect
from types import SimpleNamespace

import pytest
import torch

import weft
from tests.compat.calls import (
    EXPERTS,
    HIDDEN,
    MAX,
    RANKS,
    TOP_K,
    Backend,
    experts_of,
    held,
    identity,
    routing,
)
from weft import reference
from weft.compat.flashinfer import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
BF16 = torch.bfloat16
Layers = list[tuple[str, tuple[int, ...]]]
# Layers of one model: what each dispatches, and the tokens of each rank.
LAYERS: Layers = [
    ("mxfp8", (2, 0, 3)),
    ("none", (2, 0, 3)),
    ("nvfp4", (5, 8, 1)),
    ("mxfp8", (0, 0, 1)),
]


class Mapping:
    """What engines make: the ranks of one host that share the experts."""

    def __init__(self, group: weft.Group) -> None:
        self.moe_ep_rank, self.moe_ep_size = group.rank, group.size
        self.moe_ep_group = list(range(group.size))


def workspace_size() -> int:
    return moe_a2a_get_workspace_size_per_rank(
        ep_size=RANKS,
        max_num_tokens=MAX,
        total_dispatch_payload_size_per_token=HIDDEN * 2 + TOP_K * 4 + TOP_K * 4,
        combine_payload_size_per_token=HIDDEN * 2,
    )


def make(group: weft.Group, padding: int = 0) -> MoeAlltoAll:
    """As both engines construct it."""
    return MoeAlltoAll(
        mapping=Mapping(group),
        max_num_tokens=MAX,
        top_k=TOP_K,
        num_experts=EXPERTS,
        workspace_size_per_rank=workspace_size() + padding,
        mnnvl_config=SimpleNamespace(comm_backend=Backend(group)),
    )


def numbers(
    kind: str, seed: int, rank: int, tokens: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(values, payloads): what the layer's experts see, and how it travels."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    if kind == "none":
        x = torch.randn((tokens, HIDDEN), generator=generator).to(BF16)
        return x, [x]
    if kind == "mxfp8":
        x = torch.randint(-8, 9, (tokens, HIDDEN), generator=generator).to(torch.float8_e4m3fn)
        scales = torch.randint(120, 130, (tokens, HIDDEN // 32), generator=generator).byte()
    else:
        x = torch.randint(0, 256, (tokens, HIDDEN // 2), generator=generator).byte()
        scales = torch.randint(0, 8, (tokens, HIDDEN // 16), generator=generator).byte()
    return values_of(kind, x, scales), [x, scales]


def values_of(kind: str, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What experts make of received payloads, `[rows, hidden]`."""
    if scales is None:
        return x
    if kind == "mxfp8":
        factors = torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1)
        return (x.view(torch.float8_e4m3fn).float() * factors).to(BF16)
    values = torch.stack([x & 15, x >> 4], dim=2).flatten(1).float()
    return (values * scales.float().repeat_interleave(16, dim=1)).to(BF16)


def run_experts(
    rank: int, values: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Identity experts of flat rows."""
    received = [each[None] for each in (values, ids, weights)]
    out.copy_(identity(received, experts_of(rank).to(ids.device))[0])


def right(values: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    placement = weft.Placement.blocks(EXPERTS, RANKS)
    return reference.identity_round_trip(values, ids, weights, placement, ranks=RANKS)


def sglang_layer(
    a2a: MoeAlltoAll, kind: str, tokens: tuple[int, ...], seed: int, *, in_workspace: bool
) -> None:
    """dispatch and combine of a layer; runner "cutlass" writes into the workspace."""
    rank, device, limit = a2a.ep_rank, a2a.group.device, max(tokens)
    values, given = numbers(kind, seed, rank, tokens[rank])
    ids, weights = routing(seed, rank, tokens[rank])
    invalid = EXPERTS if in_workspace else -1
    payloads = [t.to(device) for t in (*given, ids, weights)]
    received = a2a.dispatch(
        payloads[-2],
        payloads,
        limit,
        invalid_token_expert_id=invalid,
        expert_id_payload_index=len(payloads) - 2,
    )
    x, *rest = received
    scales = rest[0].view(-1, rest[0].shape[-1]) if len(rest) == 3 else None
    x = x.view(-1, x.shape[-1])
    ids_received = rest[-2].view(-1, rest[-2].shape[-1])
    weights_received = rest[-1].view(-1, rest[-1].shape[-1])
    assert x.is_contiguous()
    assert ids_received.is_contiguous()
    assert weights_received.is_contiguous()
    none_here = ~torch.isin(ids_received.cpu(), experts_of(rank)).any(dim=1)
    assert (ids_received.cpu()[none_here] == invalid).all()
    if in_workspace:
        y = a2a.get_combine_payload_tensor_in_workspace(limit, HIDDEN, BF16).view(-1, HIDDEN)
    else:
        y = torch.empty((RANKS * limit, HIDDEN), dtype=BF16, device=device)
    run_experts(rank, values_of(kind, x, scales), ids_received, weights_received, y)
    out = a2a.combine(y.view(RANKS, limit, HIDDEN), limit, payload_in_workspace=in_workspace)
    assert torch.equal(out.cpu(), right(values, ids, weights))


def sglang(group: weft.Group) -> None:
    """0.5.17 makes one object a layer; 0.5.23 beside it one for prefill, which asks for more."""
    a2as = [make(group) for _ in LAYERS]
    prefill = make(group, padding=2 * 128)
    for step in range(3):
        for layer, (a2a, (kind, tokens)) in enumerate(zip(a2as, LAYERS, strict=True)):
            sglang_layer(a2a, kind, tokens, 10 * step + layer, in_workspace=layer % 2 == 0)
    # A round of decode may be open while prefill has its own.
    ids, weights = (t.to(group.device) for t in routing(0, group.rank, 2))
    x = torch.ones((2, HIDDEN), dtype=BF16, device=group.device)
    a2as[0].dispatch(ids, [x, ids, weights], 2)
    sglang_layer(prefill, "none", (8, 8, 8), 99, in_workspace=False)
    a2as[0].combine(torch.zeros((RANKS, 2, HIDDEN), dtype=BF16, device=group.device), 2)
    for a2a in (*a2as, prefill):
        a2a.check()
        a2a.close()


@pytest.mark.parametrize("kind", ["cpu", "threads", CUDA])
def test_sglang(ranks, kind):
    ranks(RANKS, kind)(sglang)


def vllm_layer(a2a: MoeAlltoAll, kind: str, tokens: tuple[int, ...], seed: int) -> None:
    rank, device, limit = a2a.ep_rank, a2a.group.device, max(tokens)
    values, given = numbers(kind, seed, rank, tokens[rank])
    ids, weights = routing(seed, rank, tokens[rank])
    payloads = [t.to(device) for t in (*given, ids, weights)]
    received = a2a.dispatch(
        token_selected_experts=payloads[-2],
        input_payloads=payloads,
        runtime_max_tokens_per_rank=limit,
        invalid_token_expert_id=-1,
        expert_id_payload_index=len(given),
    )
    flat = [t.view(-1, t.shape[-1]) for t in received]
    y = torch.empty((RANKS * limit, HIDDEN), dtype=BF16, device=device)
    seen = values_of(kind, flat[0], flat[1] if len(given) == 2 else None)
    run_experts(rank, seen, flat[-2], flat[-1], y)
    output = torch.full((tokens[rank], HIDDEN), float("nan"), dtype=BF16, device=device)
    a2a.combine(
        payload=y.view(RANKS, limit, HIDDEN), runtime_max_tokens_per_rank=limit, output=output
    )
    assert torch.equal(output.cpu(), right(values, ids, weights))


def vllm(group: weft.Group) -> None:
    """One object for all layers, dropped and made anew where a later layer needs more."""
    assert "output" in inspect.signature(MoeAlltoAll.combine).parameters
    a2a = make(group)
    for seed, (kind, tokens) in enumerate(LAYERS):
        vllm_layer(a2a, kind, tokens, seed)
    del a2a
    a2a = make(group, padding=4096)
    group.barrier()
    for seed, (kind, tokens) in enumerate(LAYERS):
        vllm_layer(a2a, kind, tokens, seed)
    a2a.close()


@pytest.mark.parametrize("kind", ["threads", CUDA])
def test_vllm(ranks, kind):
    ranks(RANKS, kind)(vllm)
    gc.collect()
    assert not held()
