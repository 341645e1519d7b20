# SPDX-License-Identifier: Apache-2.0
"""What flashinfer.comm's calls may not ask of weft, and how it is said."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import (
    HIDDEN,
    INVALID,
    RANKS,
    held,
    make,
    refused,
    routing,
)
from weft.compat.flashinfer import MoeAlltoAll
from weft.errors import BadExpertId, GeometryMismatch, InvalidArgument, OutOfOrder, TokenOverflow


def no_construction(group: weft.Group) -> None:
    def no(*words: str, **changes: Any) -> None:
        refused(InvalidArgument, lambda: make(group, **changes), *words)

    no("enable_rank_mask is 1", enable_rank_mask=1)
    no("backend is 'cake'", "'trtllm'", backend="cake")
    no("hidden_size and workspace_size_per_rank are None", hidden_size=None)
    no("workspace_size_per_rank is 0", workspace_size_per_rank=0)
    refused(InvalidArgument, lambda: MoeAlltoAll(object(), 8, 2, 7), "moe_ep_rank is missing")  # type: ignore[arg-type]
    bare = SimpleNamespace(rank=0, world_size=1)
    refused(
        InvalidArgument,
        lambda: MoeAlltoAll(bare, 8, 2, 7, hidden_size=HIDDEN),
        "moe_ep_rank is missing",
    )
    many = SimpleNamespace(moe_ep_rank=0, moe_ep_size=65)
    refused(
        InvalidArgument,
        lambda: MoeAlltoAll(many, 8, 2, 70, hidden_size=HIDDEN, enable_rank_mask=True),
        "moe_ep_size with enable_rank_mask is 65",
        "1..64",
    )
    refused(InvalidArgument, lambda: make(group, hidden_size=63), "multiples of 16")
    refused(InvalidArgument, lambda: make(group, eplb_stats_num_experts=-1), "eplb_stats", "is -1")


class Layout(enum.Enum):
    layout_linear = 0
    layout_128x4 = 1


def no_calls(group: weft.Group) -> None:
    ids, weights = routing(0, group.rank, 3)
    x = torch.ones((3, HIDDEN), dtype=torch.bfloat16)
    sent, y = [x, ids, weights], torch.zeros((group.size, 4, HIDDEN), dtype=torch.bfloat16)
    a2a = make(group)
    no, send, combine = refused, a2a.dispatch, a2a.combine
    workspace = a2a.get_combine_payload_tensor_in_workspace
    words: tuple[str, ...] = (
        "eplb_local_stats is a tensor [2]",
        "None",
        "pass eplb_stats_num_experts",
    )
    no(InvalidArgument, lambda: send(ids, sent, 4, eplb_local_stats=ids[0]), *words)
    words = "active_rank_mask is a tensor [3, 2]", "enable_rank_mask=True"
    no(InvalidArgument, lambda: send(ids, sent, 4, active_rank_mask=ids), *words)
    no(InvalidArgument, lambda: send(ids, sent, 4, -1), "expert_id_payload_index is None", "0..2")
    no(InvalidArgument, lambda: send(ids, sent, 4, -1, 3), "is 3")
    no(InvalidArgument, lambda: send(ids, sent, 4, -1, 0), "[64] torch.bfloat16", "int32")
    no(InvalidArgument, lambda: send(ids.short(), sent, 4), "token_selected_experts", "int16")
    no(InvalidArgument, lambda: send(ids, sent, 0), "runtime_max_tokens_per_rank is 0")
    words = "input_payloads[0]", "[2, 64]"
    no(InvalidArgument, lambda: send(ids, [x[:2], ids, weights], 4), *words)
    no(
        InvalidArgument,
        lambda: send(ids, [x, ids.mT.contiguous().mT], 4),
        "input_payloads[1]",
        "strides",
    )
    no(InvalidArgument, lambda: send(ids, [x[:, :0]], 4), "input_payloads[0]", "1 byte or more")
    no(TokenOverflow, lambda: send(ids, sent, 2), "3 tokens", "runtime_max_tokens_per_rank=2")
    no(TokenOverflow, lambda: send(ids, sent, 9), "=9", "max_num_tokens=8")
    no(OutOfOrder, lambda: combine(y, 4), "combine without a dispatch")
    no(OutOfOrder, lambda: workspace(4, HIDDEN, x.dtype), "without a dispatch")
    assert a2a.eplb_gathered_stats is None
    send(ids, sent, 4, enable_pdl=True)
    no(OutOfOrder, lambda: send(ids, sent, 4), "3 tokens are away")
    no(InvalidArgument, lambda: workspace(3, HIDDEN, x.dtype), "is 3", "with 4")
    no(InvalidArgument, lambda: workspace(4, 12, x.dtype), "hidden", "multiples of 16")
    no(InvalidArgument, lambda: workspace(4, HIDDEN, torch.int32), "dtype is torch.int32")
    no(InvalidArgument, lambda: combine(y, 3), "is 3", "with 4")
    no(InvalidArgument, lambda: combine(y[:, :3], 4), "[3, 3, 64]", "[3, 4, hidden]")
    no(InvalidArgument, lambda: combine(y.int(), 4), "payload.dtype is torch.int32", "bfloat16")
    no(InvalidArgument, lambda: combine(y, 4, True), "payload_in_workspace=True", "returns")
    workspace(4, HIDDEN, x.dtype)
    no(InvalidArgument, lambda: combine(y, 4, True), "payload_in_workspace=True", "returned")
    moved = workspace(4, HIDDEN, x.dtype).view(RANKS, HIDDEN, 4).mT
    no(InvalidArgument, lambda: combine(moved, 4), "strides")
    no(InvalidArgument, lambda: combine(y, 4, output_dtype=torch.uint8), "output_dtype", "uint8")
    no(InvalidArgument, lambda: combine(y, 4, output_scales=x), "output_scales is a tensor [3, 64]")
    no(InvalidArgument, lambda: combine(y, 4, output_scalar_scale=0.5), "0.5", "1.0")
    no(InvalidArgument, lambda: combine(y, 4, sf_layout=Layout.layout_128x4), "layout_128x4")
    no(InvalidArgument, lambda: combine(y, 4, use_low_precision=True), "64", "128")
    no(InvalidArgument, lambda: combine(y, 4, active_rank_mask=ids), "active_rank_mask")
    no(InvalidArgument, lambda: combine(y, 4, output=x.float()), "out", "float32")
    out = combine(y, 4, output_dtype=torch.bfloat16, sf_layout=Layout.layout_linear)
    assert out.shape == (3, HIDDEN)
    assert not out.any()
    a2a.close()


@pytest.mark.parametrize("body", [no_construction, no_calls])
def test_refusals_name_the_argument_and_leave_the_round_alone(ranks, body):
    ranks(RANKS, "threads")(body)
    assert not held()


def cut_off(group: weft.Group) -> None:
    """Ranks that lay out other numbers of rows hear both numbers."""
    with make(group, timeout=30.0) as a2a:
        tokens = 2 + group.rank // 2
        ids, weights = routing(0, group.rank, tokens)
        x = torch.ones((tokens, HIDDEN), dtype=torch.bfloat16)
        a2a.dispatch(ids, [x, ids, weights], 3)
        a2a.combine(torch.zeros((RANKS, 3, HIDDEN)).bfloat16(), 3)

        def other() -> None:
            a2a.dispatch(ids, [x, ids, weights], tokens)
            a2a.check()

        refused(GeometryMismatch, other, "2", "3")


def test_ranks_agree_on_the_rows_of_a_round(ranks):
    ranks(RANKS, "threads")(cut_off)


def masked(group: weft.Group) -> None:
    """A mask of all ranks changes nothing; one that leaves a rank out is refused by its number."""
    ids, weights = routing(0, group.rank, 3)
    x = torch.ones((3, HIDDEN), dtype=torch.bfloat16)
    everyone, some = (torch.tensor([mask], dtype=torch.uint64) for mask in (0b111, 0b101))
    y = torch.ones((RANKS, 3, HIDDEN)).bfloat16()
    with make(group, enable_rank_mask=True) as a2a:

        def send(mask: Any) -> Any:
            return a2a.dispatch(ids, [x, ids, weights], 3, active_rank_mask=mask)

        refused(InvalidArgument, lambda: send(None), "active_rank_mask")
        refused(InvalidArgument, lambda: send(everyone.long()), "int64", "uint64")
        words = "0x5", "its own rank 1" if group.rank == 1 else "ranks [1]", "every living rank"
        refused(InvalidArgument, lambda: send(some), *words)
        send(everyone)
        refused(InvalidArgument, lambda: a2a.combine(y, 3, active_rank_mask=some), *words)
        a2a.combine(y, 3, active_rank_mask=everyone)


def test_rank_masks(ranks):
    ranks(RANKS, "threads")(masked)


def bad_ids(group: weft.Group) -> None:
    with make(group) as a2a:
        ids = torch.tensor([[0, 99]], dtype=torch.int32)
        x, weights = torch.ones((1, HIDDEN), dtype=torch.bfloat16), torch.ones((1, 2))
        received = a2a.dispatch(ids, [x, ids, weights], 1, INVALID, 1)
        row = [0, 99] if group.rank == 0 else [INVALID, INVALID]
        assert received[1].tolist() == [[row]] * RANKS
        refused(BadExpertId, a2a.check, "99")
        out = a2a.combine(torch.ones((RANKS, 1, HIDDEN), dtype=torch.bfloat16), 1)
        assert torch.equal(out, x)


def test_ids_of_no_expert_reach_nobody_and_are_reported(ranks):
    ranks(RANKS, "threads")(bad_ids)
