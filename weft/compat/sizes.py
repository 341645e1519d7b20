# SPDX-License-Identifier: Apache-2.0
"""Functions of flashinfer.comm that return the memory size of an all-to-all."""

from __future__ import annotations

import torch

from weft.alltoall.config import Payload
from weft.alltoall.operator import AllToAll
from weft.arguments import check_int
from weft.compat.checks import BACKEND_REASON, check_allowed
from weft.fields import max_value
from weft.shape import MAX_PLANES, MAX_RANKS, MAX_ROW_BYTES, MAX_TOP_K, Shape

MAX_BYTES = 1 << 48  # upper bound of a workspace size


def get_moe_workspace_size(
    ep_size: int,
    top_k: int,
    max_num_tokens: int,
    hidden_size: int,
    extra_payload_bytes_per_token: int = 0,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> int:
    """Return the bytes of symmetric memory per rank for the default payloads in bfloat16.

    `extra_payload_bytes_per_token` is the row size of one more payload. Raises InvalidArgument for
    invalid sizes.
    """
    check_allowed("backend", backend, "trtllm", BACKEND_REASON)
    ep_size = check_int("ep_size", ep_size, 1, MAX_RANKS)
    top_k = check_int("top_k", top_k, 1, MAX_TOP_K)
    max_num_tokens = check_int("max_num_tokens", max_num_tokens, 1, max_value(Shape, "tokens"))
    hidden_size = check_int("hidden_size", hidden_size, 1, max_value(Shape, "hidden"))
    extra_bytes = check_int(
        "extra_payload_bytes_per_token", extra_payload_bytes_per_token, 0, MAX_ROW_BYTES
    )
    stats = check_int(
        "eplb_stats_num_experts", eplb_stats_num_experts, 0, max_value(Shape, "stats")
    )
    # What engines send without quantization: hidden states, expert ids, routing weights.
    payloads = [Payload((hidden_size,), torch.bfloat16), Payload((top_k,), torch.int32)]
    payloads.append(Payload((top_k,), torch.float32))
    if extra_bytes:
        payloads.append(Payload((extra_bytes,), torch.uint8))
    return AllToAll.memory_bytes(
        ranks=ep_size,
        max_tokens=max_num_tokens,
        top_k=top_k,
        num_experts=max(ep_size, top_k),  # does not affect symmetric memory
        hidden=hidden_size,
        payloads=payloads,
        stats=stats,
    )


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> int:
    """Return an upper bound of the bytes of symmetric memory per rank.

    The bound is loose, because the call gets neither top_k nor the number of payloads. Engines plan
    memory with it; `MoeAlltoAll` does not use it.

    Raises:
        InvalidArgument: If a size is invalid.
    """
    check_allowed("backend", backend, "trtllm", BACKEND_REASON)
    ep_size = check_int("ep_size", ep_size, 1, MAX_RANKS)
    max_num_tokens = check_int("max_num_tokens", max_num_tokens, 1, max_value(Shape, "tokens"))
    padding = 15 * MAX_PLANES  # padding of each payload to 16 bytes
    dispatch_bytes = total_dispatch_payload_size_per_token
    dispatch_bytes = check_int(
        "total_dispatch_payload_size_per_token", dispatch_bytes, 0, MAX_ROW_BYTES - padding
    )
    combine_bytes = combine_payload_size_per_token
    max_row_bytes = max_value(Shape, "hidden") * 2  # bytes, in bfloat16
    combine_bytes = check_int("combine_payload_size_per_token", combine_bytes, 0, max_row_bytes)
    stats = check_int(
        "eplb_stats_num_experts", eplb_stats_num_experts, 0, max_value(Shape, "stats")
    )
    return AllToAll.memory_bytes(
        ranks=ep_size,
        max_tokens=max_num_tokens,
        top_k=MAX_TOP_K,
        num_experts=MAX_TOP_K,
        hidden=max(8, -(-combine_bytes // 16) * 8),
        payloads=[Payload((dispatch_bytes + padding,), torch.uint8)],
        stats=stats,
    )
