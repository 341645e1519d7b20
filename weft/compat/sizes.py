# SPDX-License-Identifier: Apache-2.0
"""How much memory an all-to-all takes, asked in flashinfer.comm's words."""

from __future__ import annotations

import torch

from weft.alltoall.config import Payload
from weft.alltoall.operator import AllToAll
from weft.arguments import integer
from weft.compat.refusals import BACKEND, refuse
from weft.fields import largest
from weft.shape import MAX_PLANES, MAX_RANKS, MAX_ROW_BYTES, MAX_TOP_K, Shape

MAX_BYTES = 1 << 48  # of a workspace: more than any host has


def moe_workspace_size(
    ep_size: int,
    top_k: int,
    max_num_tokens: int,
    hidden_size: int,
    extra_payload_bytes_per_token: int = 0,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> int:
    """Bytes of symmetric memory that a rank allocates for the default payloads in bfloat16.

    extra_payload_bytes_per_token: one payload more, with rows of that size.
    Raises InvalidArgument for sizes that cannot be.
    """
    refuse("backend", backend, "trtllm", BACKEND)
    ep_size = integer("ep_size", ep_size, 1, MAX_RANKS)
    top_k = integer("top_k", top_k, 1, MAX_TOP_K)
    max_num_tokens = integer("max_num_tokens", max_num_tokens, 1, largest(Shape, "tokens"))
    hidden_size = integer("hidden_size", hidden_size, 1, largest(Shape, "hidden"))
    extra = integer(
        "extra_payload_bytes_per_token", extra_payload_bytes_per_token, 0, MAX_ROW_BYTES
    )
    stats = integer("eplb_stats_num_experts", eplb_stats_num_experts, 0, largest(Shape, "stats"))
    # What engines send without quantisation: hidden states, expert ids, routing weights.
    rows = [Payload((hidden_size,), torch.bfloat16), Payload((top_k,), torch.int32)]
    rows.append(Payload((top_k,), torch.float32))
    if extra:
        rows.append(Payload((extra,), torch.uint8))
    return AllToAll.memory_bytes(
        ranks=ep_size,
        max_tokens=max_num_tokens,
        top_k=top_k,
        num_experts=max(ep_size, top_k),  # their number takes no symmetric memory
        hidden=hidden_size,
        payloads=rows,
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
    """About the bytes of symmetric memory that a rank allocates for rows of these bytes.

    An upper estimate, as top_k and the number of payloads are not given: engines plan with it, and
    `MoeAlltoAll` does not depend on it.

    Raises:
        InvalidArgument: a size is invalid.
    """
    refuse("backend", backend, "trtllm", BACKEND)
    ep_size = integer("ep_size", ep_size, 1, MAX_RANKS)
    max_num_tokens = integer("max_num_tokens", max_num_tokens, 1, largest(Shape, "tokens"))
    room = 15 * MAX_PLANES  # to 16 bytes, each payload
    total, combined = total_dispatch_payload_size_per_token, combine_payload_size_per_token
    total = integer("total_dispatch_payload_size_per_token", total, 0, MAX_ROW_BYTES - room)
    most = largest(Shape, "hidden") * 2  # of bfloat16
    combined = integer("combine_payload_size_per_token", combined, 0, most)
    stats = integer("eplb_stats_num_experts", eplb_stats_num_experts, 0, largest(Shape, "stats"))
    return AllToAll.memory_bytes(
        ranks=ep_size,
        max_tokens=max_num_tokens,
        top_k=MAX_TOP_K,
        num_experts=MAX_TOP_K,
        hidden=max(8, -(-combined // 16) * 8),
        payloads=[Payload((total + room,), torch.uint8)],
        stats=stats,
    )
