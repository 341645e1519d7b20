# SPDX-License-Identifier: Apache-2.0
"""Calls that other projects allow and weft refuses, beside those of tests/compat/test_arguments.py.

A refusal names the argument and leaves the round alone.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.compat import reduces
from tests.compat.buffers import layer_of
from tests.compat.calls import HIDDEN, INVALID, RANKS, Mapping, held, make, refused, routing
from weft.compat.deep_ep import Buffer
from weft.compat.flashinfer import AllReduceFusionWorkspace, MoeAlltoAll, allreduce_fusion
from weft.errors import (
    BadExpertId,
    GeometryMismatch,
    InvalidArgument,
    OutOfOrder,
    TokenOverflow,
)

BF16 = torch.bfloat16


def no_construction(group: weft.Group) -> None:
    def no(*words: str, mapping: Any = None, experts: int = 7, **changes: Any) -> None:
        given = {"hidden_size": HIDDEN, **({} if mapping else {"group": group}), **changes}
        mapping = mapping or Mapping(group.rank, group.size)
        refused(InvalidArgument, lambda: MoeAlltoAll(mapping, 8, 2, experts, **given), *words)

    no("backend is 'cake'", "'trtllm'", backend="cake")
    no("hidden_size and workspace_size_per_rank are None", hidden_size=None)
    no("multiples of 16", hidden_size=63)
    no("moe_ep_rank is missing", mapping=object())
    no("moe_ep_rank is missing", mapping=SimpleNamespace(rank=0, world_size=1))
    many, words = Mapping(0, 65), ("moe_ep_size with enable_rank_mask is 65", "1..64")
    no(*words, mapping=many, experts=70, enable_rank_mask=True)


class Layout(enum.Enum):
    layout_linear = 0
    layout_128x4 = 1


def no_calls(group: weft.Group) -> None:
    ids, weights = routing(0, group.rank, 3)
    x = torch.ones((3, HIDDEN), dtype=BF16)
    sent, y = [x, ids, weights], torch.zeros((group.size, 4, HIDDEN), dtype=BF16)
    a2a = make(group)
    send, combine = a2a.dispatch, a2a.combine
    workspace = a2a.get_combine_payload_tensor_in_workspace

    def no(call: Any, *words: str, error: type[Exception] = InvalidArgument) -> None:
        refused(error, call, *words)

    no(
        lambda: send(ids, sent, 4, eplb_local_stats=ids[0]),
        *("eplb_local_stats is a tensor [2]", "None", "pass eplb_stats_num_experts"),
    )
    mask = "active_rank_mask is a tensor [3, 2]", "enable_rank_mask=True"
    no(lambda: send(ids, sent, 4, active_rank_mask=ids), *mask)
    no(lambda: send(ids, sent, 4, -1), "expert_id_payload_index is None", "0..2")
    no(lambda: send(ids, sent, 4, -1, 0), "[64] torch.bfloat16", "int32")
    no(lambda: send(ids, [x[:2], ids, weights], 4), "input_payloads[0]", "[2, 64]")
    strided = ids.mT.contiguous().mT
    no(lambda: send(ids, [x, strided], 4), "input_payloads[1]", "strides")
    no(lambda: send(ids, [x[:, :0]], 4), "input_payloads[0]", "1 byte or more")
    words = "3 tokens", "runtime_max_tokens_per_rank=2"
    no(lambda: send(ids, sent, 2), *words, error=TokenOverflow)
    no(lambda: send(ids, sent, 9), "=9", "max_num_tokens=8", error=TokenOverflow)
    no(lambda: combine(y, 4), "combine without a dispatch", error=OutOfOrder)
    no(lambda: workspace(4, HIDDEN, BF16), "without a dispatch", error=OutOfOrder)
    assert a2a.eplb_gathered_stats is None
    send(ids, sent, 4, enable_pdl=True)
    no(lambda: send(ids, sent, 4), "combine of 3 tokens", error=OutOfOrder)
    no(lambda: workspace(4, 12, BF16), "hidden", "multiples of 16")
    no(lambda: combine(y, 3), "is 3", "with 4")
    no(lambda: combine(y[:, :3], 4), "[3, 3, 64]", "[3, 4, hidden]")
    no(lambda: combine(y, 4, True), "payload_in_workspace=True", "returns")
    workspace(4, HIDDEN, BF16)
    no(lambda: combine(y, 4, True), "payload_in_workspace=True", "returned")
    moved = workspace(4, HIDDEN, BF16).view(RANKS, HIDDEN, 4).mT
    no(lambda: combine(moved, 4), "strides")
    no(lambda: combine(y, 4, sf_layout=Layout.layout_128x4), "layout_128x4")
    no(lambda: combine(y, 4, use_low_precision=True), "64", "128")
    no(lambda: combine(y, 4, active_rank_mask=ids), "active_rank_mask")
    no(lambda: combine(y, 4, output=x.float()), "out", "float32")
    out = combine(y, 4, output_dtype=BF16, sf_layout=Layout.layout_linear)
    assert out.shape == (3, HIDDEN)
    assert not out.any()
    a2a.close()


def uneven_rows(group: weft.Group) -> None:
    """Ranks that lay out different numbers of rows report both numbers."""
    with make(group, timeout=30.0) as a2a:
        tokens = 2 + group.rank // 2
        ids, weights = routing(0, group.rank, tokens)
        x = torch.ones((tokens, HIDDEN), dtype=BF16)
        a2a.dispatch(ids, [x, ids, weights], 3)
        a2a.combine(torch.zeros((RANKS, 3, HIDDEN)).bfloat16(), 3)

        def other() -> None:
            a2a.dispatch(ids, [x, ids, weights], tokens)
            a2a.check()

        refused(GeometryMismatch, other, "2", "3")


def masked(group: weft.Group) -> None:
    """A mask of all ranks changes nothing; one that leaves a rank out is refused by its number."""
    ids, weights = routing(0, group.rank, 3)
    x, y = torch.ones((3, HIDDEN), dtype=BF16), torch.ones((RANKS, 3, HIDDEN)).bfloat16()
    everyone, some = (torch.tensor([mask], dtype=torch.uint64) for mask in (0b111, 0b101))
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


def bad_ids(group: weft.Group) -> None:
    """Ids of no expert reach nobody and are reported."""
    with make(group) as a2a:
        ids = torch.tensor([[0, 99]], dtype=torch.int32)
        x, weights = torch.ones((1, HIDDEN), dtype=BF16), torch.ones((1, 2))
        received = a2a.dispatch(ids, [x, ids, weights], 1, INVALID, 1)
        row = [0, 99] if group.rank == 0 else [INVALID, INVALID]
        assert received[1].tolist() == [[row]] * RANKS
        refused(BadExpertId, a2a.check, "99")
        out = a2a.combine(torch.ones((RANKS, 1, HIDDEN), dtype=BF16), 1)
        assert torch.equal(out, x)


@pytest.mark.parametrize("body", [no_construction, no_calls, uneven_rows, masked, bad_ids])
def test_moe_alltoall(ranks, body):
    ranks(RANKS, "threads")(body)
    assert not held()


def fusion(group: weft.Group) -> None:
    rows = reduces.rows_for(group.device, 2)
    x = rows.xs[group.rank]
    normed: dict[str, Any] = {"residual_in": rows.residual, "rms_gamma": rows.weight}
    with reduces.make(group) as workspace:

        def no(pattern: int, *words: str, **given: Any) -> None:
            call = lambda: allreduce_fusion(x, workspace, pattern, **normed, **given)  # noqa: E731
            refused(InvalidArgument, call, *words)

        for pattern in (3, 5):
            no(pattern, "NVFP4", reduces.Pattern(pattern).name)
        index = {"expanded_idx_to_permuted_idx": torch.zeros((2, 1), dtype=torch.int32)}
        no(7, "quant_out is a tensor", quant_out=x, **index)
        no(7, "scale_out is a tensor", scale_out=x, **index)
        no(2, "scale_factor is None")
        no(8, "block_quant_group_size is None")
        no(7, "expanded_idx_to_permuted_idx is None")
        no(
            6,
            *("scale_input is a tensor [2, 2]", "need 6"),
            moe_reduction_device_num_experts=3,
            moe_reduction_scale_input=torch.ones((2, 2)),
            moe_reduction_active_experts_token_input=torch.ones((6, reduces.HIDDEN), dtype=BF16),
            moe_reduction_token_input=x,
        )
    for name in ("world_size", "rank", "max_token_num", "hidden_dim", "dtype"):
        changes = {name: None}
        call = lambda changes=changes: reduces.make(group, **changes)  # noqa: E731
        refused(InvalidArgument, call, f"{name} is None")
    refused(InvalidArgument, lambda: reduces.make(group, backend="mnnvl"), "multicast")
    refused(InvalidArgument, lambda: reduces.make(group, world_size=3), f"rank {group.rank} of 3")
    refused(InvalidArgument, lambda: AllReduceFusionWorkspace(1, 3, 8, 64), "tp_rank is 3", "0..0")


def low_latency(group: weft.Group) -> None:
    buffer, x = Buffer(group, low_latency_mode=True), torch.zeros((1, 512), dtype=BF16)
    ids = torch.zeros((1, 1), dtype=torch.int64)
    words = "enable_shrink is False; it must be True"
    refused(InvalidArgument, buffer.low_latency_clean_mask_buffer, words)
    send = lambda: buffer.low_latency_dispatch(x, ids, 8, 8, use_ue8m0=True)  # noqa: E731
    refused(InvalidArgument, send, "use_ue8m0 with use_fp8=True, round_scale=False")
    buffer.clean_low_latency_buffer(8, 512, 8)
    group.barrier()
    buffer.destroy()


def triton_dist(group: weft.Group) -> None:
    for changes, words in (
        ({"local_world_size": 8}, ("local_world_size is 8 and world_size 2",)),
        ({"rank": 3}, ("rank is 3; it must be an integer in 0..1",)),
        ({"rank": 1 - group.rank}, (f"but group is rank {group.rank} of 2",)),
    ):
        refused(InvalidArgument, lambda changes=changes: layer_of(group, **changes), *words)  # type: ignore[misc]
    layer, x = layer_of(group), torch.zeros((1, 256), dtype=BF16)
    refused(InvalidArgument, lambda: layer.dispatch(x), "topk_indices is None")
    layer.finalize()


@pytest.mark.parametrize("body", [fusion, low_latency, triton_dist])
def test_two_ranks(ranks, body):
    ranks(2, "threads")(body)
