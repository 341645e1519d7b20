# SPDX-License-Identifier: Apache-2.0
"""Where 0.5.23 decides about graphs."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import resolved_view


def disable_breakable_cudagraph_if_incompatible(server_args: Any) -> None:
    """As 0.5.17's method."""
    rules = [
        lambda: server_args.enable_two_batch_overlap,
        lambda: resolved_view(server_args).attn_cp_size > 1,
        lambda: resolved_view(server_args).moe_a2a_backend not in ("none", "deepep", "flashinfer"),
    ]
    if any(rule() for rule in rules):
        server_args.cuda_graph_config.prefill.backend = "disabled"
