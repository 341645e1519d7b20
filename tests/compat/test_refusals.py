# SPDX-License-Identifier: Apache-2.0
"""Calls that other projects allow and weft refuses, in addition to test_arguments.py.

A refusal names the argument and leaves the round alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.compat import reduces
from tests.compat.buffers import layer_of
from tests.compat.calls import HIDDEN, INVALID, RANKS, Mapping, held, make, refused, routing
from weft.compat.deep_ep import Buffer
from weft.compat.flashinfer import MoeAlltoAll, allreduce_fusion
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
        kwargs = {"hidden_size": HIDDEN, **({} if mapping else {"group": group}), **changes}
        mapping = mapping or Mapping(group.rank, group.size)
        refused(InvalidArgument, lambda: MoeAlltoAll(mapping, 8, 2, experts, **kwargs), *words)

    no("hidden_size and workspace_size_per_rank are None", hidden_size=None)
    no("moe_ep_rank is missing", mapping=SimpleNamespace(rank=0, world_size=1))
    many, words = Mapping(0, 65), ("moe_ep_size with enable_rank_mask is 65", "1..64")
    no(*words, mapping=many, experts=70, enable_rank_mask=True)


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
    no(lambda: send(ids, sent, 4, -1), "expert_id_payload_index is None", "0..2")
    no(lambda: send(ids, [x[:2], ids, weights], 4), "input_payloads[0]", "[2, 64]")
    words = "3 tokens", "runtime_max_tokens_per_rank=2"
    no(lambda: send(ids, sent, 2), *words, error=TokenOverflow)
    no(lambda: send(ids, sent, 9), "=9", "max_num_tokens=8", error=TokenOverflow)
    no(lambda: combine(y, 4), "combine without a dispatch", error=OutOfOrder)
    no(lambda: workspace(4, HIDDEN, BF16), "without a dispatch", error=OutOfOrder)
    assert a2a.eplb_gathered_stats is None
    send(ids, sent, 4, enable_pdl=True)
    no(lambda: send(ids, sent, 4), "combine of 3 tokens", error=OutOfOrder)
    no(lambda: combine(y, 3), "is 3", "with 4")
    no(lambda: combine(y[:, :3], 4), "[3, 3, 64]", "[3, 4, hidden]")
    no(lambda: combine(y, 4, True), "payload_in_workspace=True", "returns")
    workspace(4, HIDDEN, BF16)
    no(lambda: combine(y, 4, True), "payload_in_workspace=True", "returned")
    moved = workspace(4, HIDDEN, BF16).view(RANKS, HIDDEN, 4).mT
    no(lambda: combine(moved, 4), "strides")
    no(lambda: combine(y, 4, use_low_precision=True), "64", "128")
    out = combine(y, 4, output_dtype=BF16)
    assert out.shape == (3, HIDDEN)
    assert not out.any()
    a2a.close()


def uneven_rows(group: weft.Group) -> None:
    """Ranks with different numbers of rows report both numbers."""
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


def bad_ids(group: weft.Group) -> None:
    """Invalid expert ids are dropped and reported."""
    with make(group) as a2a:
        ids = torch.tensor([[0, 99]], dtype=torch.int32)
        x, weights = torch.ones((1, HIDDEN), dtype=BF16), torch.ones((1, 2))
        received = a2a.dispatch(ids, [x, ids, weights], 1, INVALID, 1)
        row = [0, 99] if group.rank == 0 else [INVALID, INVALID]
        assert received[1].tolist() == [[row]] * RANKS
        refused(BadExpertId, a2a.check, "99")
        out = a2a.combine(torch.ones((RANKS, 1, HIDDEN), dtype=BF16), 1)
        assert torch.equal(out, x)


@pytest.mark.parametrize("body", [no_construction, no_calls, uneven_rows, bad_ids])
def test_moe_alltoall(ranks, body):
    ranks(RANKS, "threads")(body)
    assert not held()


def fusion(group: weft.Group) -> None:
    rows = reduces.rows_for(group.device, 2)
    x = rows.xs[group.rank]
    normed: dict[str, Any] = {"residual_in": rows.residual, "rms_gamma": rows.weight}
    with reduces.make(group) as workspace:

        def no(pattern: int, *words: str, **kwargs: Any) -> None:
            call = lambda: allreduce_fusion(x, workspace, pattern, **normed, **kwargs)  # noqa: E731
            refused(InvalidArgument, call, *words)

        for pattern in (3, 5):
            no(pattern, "NVFP4", reduces.Pattern(pattern).name)
        index = {"expanded_idx_to_permuted_idx": torch.zeros((2, 1), dtype=torch.int32)}
        no(7, "quant_out is a tensor", quant_out=x, **index)
        no(7, "scale_out is a tensor", scale_out=x, **index)
        for pattern, name in (
            (2, "scale_factor"),
            (8, "block_quant_group_size"),
            (7, "expanded_idx_to_permuted_idx"),
        ):
            no(pattern, f"{name} is None")
    refused(InvalidArgument, lambda: reduces.make(group, backend="mnnvl"), "multicast")
    refused(InvalidArgument, lambda: reduces.make(group, world_size=3), f"rank {group.rank} of 3")


def low_latency(group: weft.Group) -> None:
    buffer, x = Buffer(group, low_latency_mode=True), torch.zeros((1, 512), dtype=BF16)
    ids = torch.zeros((1, 1), dtype=torch.int64)
    words = "enable_shrink is False; it must be True"
    refused(InvalidArgument, buffer.low_latency_clean_mask_buffer, words)
    send = lambda: buffer.low_latency_dispatch(x, ids, 8, 8, use_ue8m0=True)  # noqa: E731
    refused(InvalidArgument, send, "use_ue8m0 with use_fp8=True, round_scale=False")
    buffer.clean_low_latency_buffer(8, 512, 8)
    for changes, words in (
        ({"local_world_size": 8}, "local_world_size is 8 and world_size 2"),
        ({"rank": 1 - group.rank}, f"but group is rank {group.rank} of 2"),
    ):
        refused(InvalidArgument, lambda changes=changes: layer_of(group, **changes), words)  # type: ignore[misc]
    group.barrier()
    buffer.destroy()


@pytest.mark.parametrize("body", [fusion, low_latency])
def test_two_ranks(ranks, body):
    ranks(2, "threads")(body)
