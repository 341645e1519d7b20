# SPDX-License-Identifier: Apache-2.0
"""Unraised refusals are raised by close and a clean exit, with WEFT_DEBUG=1 by every round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from tests.ranks import on_ranks
from weft.errors import BadExpertId, GeometryMismatch, InvalidArgument
from weft.moe import Expert, ExpertWeights, MoEConfig, Routing

HIDDEN = 64
SIZES: dict[str, Any] = {"max_tokens": 4, "top_k": 2, "num_experts": 4, "hidden": HIDDEN}
CONFIG = MoEConfig(hidden=HIDDEN, intermediate=32, routing=Routing(4, 2))
BAD, GOOD = torch.tensor([[0, 9], [1, 3]]), torch.tensor([[0, 2], [1, 3]])
Round = Callable[[Any, torch.Tensor], torch.Tensor]


def exchange_round(op: weft.AllToAll, ids: torch.Tensor) -> torch.Tensor:
    x = torch.ones(2, HIDDEN).bfloat16()
    received = op.dispatch(x, ids)
    op.output().copy_(weft.reference.identity_experts(received, x.dtype))
    return op.combine()


def expert_round(op: weft.LowLatencyAllToAll, ids: torch.Tensor) -> torch.Tensor:
    weights = torch.ones(2, 2)
    received = op.dispatch(torch.ones(2, HIDDEN).bfloat16(), ids, weights)
    return op.combine(received.x.bfloat16(), ids, weights, received.handle)


def layer_round(layer: weft.MoE, ids: torch.Tensor) -> torch.Tensor:
    return layer(torch.ones(2, HIDDEN).bfloat16(), topk_ids=ids, topk_weights=torch.ones(2, 2))


def make(group: weft.Group, kind: str) -> tuple[Any, Round]:
    if kind == "AllToAll":
        return weft.AllToAll(group, **SIZES), exchange_round
    if kind == "LowLatencyAllToAll":
        return weft.LowLatencyAllToAll(group, **SIZES, quantize=None), expert_round

    def weights(local: tuple[int, ...]) -> ExpertWeights:
        return ExpertWeights.stack(CONFIG, [Expert.seeded(CONFIG, e) for e in local])

    if kind == "lease":
        lease = weft.lease(group, weft.MoE, CONFIG, weights, max_tokens=4)
        return lease, lambda lease, ids: layer_round(lease.operator, ids)
    return weft.MoE(group, CONFIG, weights, max_tokens=4), layer_round


KINDS = ["AllToAll", "LowLatencyAllToAll", "MoE", "lease"]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, "threads")
def test_close_raises_pending_refusals(group: weft.Group, kind: str) -> None:
    for how in ("close", "exit", "checked", "error"):
        op, play = make(group, kind)
        play(op, BAD)
        if how == "close":
            with pytest.raises(BadExpertId):
                op.close()
        elif how == "exit":
            with pytest.raises(BadExpertId), op:
                pass
        elif how == "checked":
            with pytest.raises(BadExpertId):
                getattr(op, "operator", op).check()
        else:
            with pytest.raises(KeyError), op:
                raise KeyError("the caller's own")
        op.close()
    op, play = make(group, kind)
    assert torch.isfinite(play(op, GOOD)).all()
    op.close()


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DEBUG", "1")


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, "threads")
def test_debug_mode_checks_every_call(group: weft.Group, kind: str) -> None:
    op, play = make(group, kind)
    with pytest.raises(BadExpertId):
        play(op, BAD)
    group.barrier()
    assert torch.isfinite(play(op, GOOD)).all()
    if kind == "AllToAll":
        received = op.dispatch(torch.ones(2, HIDDEN).bfloat16(), GOOD)
        assert op.output().isnan().all()
        kept = received.x
        op.output().copy_(weft.reference.identity_experts(received, torch.bfloat16))
        op.combine()
        assert kept.isnan().all()
    op.close()


@pytest.mark.usefixtures("debug")
@on_ranks(2, "threads")
def test_debug_mode_compares_residuals(group: weft.Group) -> None:
    with weft.AllReduce(group, max_tokens=4, hidden=HIDDEN) as op:
        x, residual = torch.ones(2, HIDDEN).bfloat16(), torch.zeros(2, HIDDEN).bfloat16()
        op.fused(x, residual=residual)
        residual[1, 3] = group.rank
        text = f"residual of rank {1 - group.rank} .digest "
        with pytest.raises(GeometryMismatch, match=text):
            op.fused(x, residual=residual)


@on_ranks(1, "threads")
def test_an_invalid_weft_debug_is_refused(group: weft.Group, monkeypatch: Any) -> None:
    monkeypatch.setenv("WEFT_DEBUG", "yes")
    with pytest.raises(InvalidArgument, match="WEFT_DEBUG is 'yes'"):
        weft.AllToAll(group, **SIZES)
