# SPDX-License-Identifier: Apache-2.0
"""Flags, parsed and resolved as far as the plug-in has a say."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

from sglang.srt.arg_groups import overrides
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.model_executor.cuda_graph_config import Backend, PhaseConfig

MOE_A2A_BACKEND_CHOICES = ["none", "deepep", "flashinfer"]


class ServerArgs:
    def _disable_breakable_cudagraph_if_incompatible(self) -> None:
        flags: Any = self
        rules = [
            lambda: flags.enable_two_batch_overlap,
            lambda: resolved_view(flags).attn_cp_size > 1,
            lambda: resolved_view(flags).moe_a2a_backend not in ("none", "deepep", "flashinfer"),
        ]
        if any(rule() for rule in rules):
            flags.cuda_graph_config.prefill.backend = "disabled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--moe-a2a-backend", choices=MOE_A2A_BACKEND_CHOICES, default="none")


def resolve_graphs(args: Any) -> None:
    ServerArgs._disable_breakable_cudagraph_if_incompatible(args)


def parse(*argv: str, **more: object) -> SimpleNamespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--chunked-prefill-size", type=int, default=32)
    parser.add_argument("--enable-single-batch-overlap", action="store_true")
    given = parser.parse_args(argv)
    args = SimpleNamespace(
        ep_size=1,
        attn_cp_size=1,
        disable_shared_experts_fusion=False,
        enable_dp_attention=given.dp_size > 1,
        enable_two_batch_overlap=False,
        enable_torch_compile=False,
        enable_lora=False,
        lora_target_modules=None,
        enable_pdmux=False,
        flashinfer_allreduce_fusion_backend=None,
        elastic_ep_backend=None,
        disable_overlap_schedule=False,
        enable_dp_lm_head=False,
        moe_dense_tp_size=None,
        moe_dp_size=1,
        enable_dp_attention_local_control_broadcast=False,
        tokenizer_worker_num=1,
        disaggregation_mode="null",
        speculative_algorithm=None,
        max_ep_size=None,
        ep_join_mode=None,
        enable_elastic_expert_backup=False,
        ep_dispatch_algorithm=None,
        speculative_num_draft_tokens=None,
        max_prefill_tokens=64,
        cuda_graph_config=SimpleNamespace(
            decode=PhaseConfig(Backend.FULL, 4, [1, 4]),
            prefill=PhaseConfig("breakable"),
        ),
    )
    vars(args).update(vars(given))
    for resolve in (overrides._a2a_ep_size, overrides._a2a_fusion_adjustments):
        vars(args).update(resolve(args))
    vars(args).update(more)
    resolve_graphs(args)
    return args
