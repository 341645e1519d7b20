# SPDX-License-Identifier: Apache-2.0
"""Unraised refusals are raised by close and a clean exit, with WEFT_DEBUG=1 by every round."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.ranks import on_ranks
from tests.runtime.calls import HIDDEN, SIZES, call, open_kind
from weft.errors import BadExpertId, GeometryMismatch, InvalidArgument

X = torch.ones(2, HIDDEN, dtype=torch.bfloat16)
BAD, GOOD = torch.tensor([[0, 9], [1, 3]]), torch.tensor([[0, 2], [1, 3]])
KINDS = pytest.mark.parametrize(
    ("kind", "lease"),
    [("AllToAll", False), ("LowLatencyAllToAll", False), ("MoE", False), ("MoE", True)],
)


@KINDS
@on_ranks(2, "threads")
def test_close_raises_pending_refusals(group: weft.Group, kind: str, lease: bool) -> None:
    for how in ("close", "exit", "checked", "error"):
        op = open_kind(group, kind, lease=lease)
        call(op, X, BAD)
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
    op = open_kind(group, kind, lease=lease)
    assert torch.isfinite(call(op, X, GOOD)).all()
    op.close()


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DEBUG", "1")


@pytest.mark.usefixtures("debug")
@KINDS
@on_ranks(2, "threads")
def test_debug_mode_checks_every_call(group: weft.Group, kind: str, lease: bool) -> None:
    op = open_kind(group, kind, lease=lease)
    with pytest.raises(BadExpertId):
        call(op, X, BAD)
    group.barrier()
    assert torch.isfinite(call(op, X, GOOD)).all()
    if kind == "AllToAll":
        received = op.dispatch(X, GOOD)
        assert op.output().isnan().all()
        kept = received.x
        op.output().copy_(weft.reference.identity_experts(received, torch.bfloat16))
        op.combine()
        assert kept.isnan().all()
    op.close()


@pytest.mark.usefixtures("debug")
@on_ranks(2, "threads")
def test_debug_mode_compares_residuals(group: weft.Group) -> None:
    with open_kind(group, "AllReduce") as op:
        residual = torch.zeros_like(X)
        op.fused(X, residual=residual)
        residual[1, 3] = group.rank
        text = f"residual of rank {1 - group.rank} .digest "
        with pytest.raises(GeometryMismatch, match=text):
            op.fused(X, residual=residual)


@on_ranks(1, "threads")
def test_an_invalid_weft_debug_is_refused(group: weft.Group, monkeypatch: Any) -> None:
    monkeypatch.setenv("WEFT_DEBUG", "yes")
    with pytest.raises(InvalidArgument, match="WEFT_DEBUG is 'yes'"):
        weft.AllToAll(group, **SIZES)
