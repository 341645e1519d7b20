"""Flags, parsed and resolved as far as the plug-in has a say."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

from sglang.srt.arg_groups import overrides

MOE_A2A_BACKEND_CHOICES = ["none", "deepep", "flashinfer"]


def parse(*argv: str, **more: object) -> SimpleNamespace:
    """Server arguments of a command line."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--moe-a2a-backend", choices=MOE_A2A_BACKEND_CHOICES, default="none")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--chunked-prefill-size", type=int, default=32)
    given = parser.parse_args(argv)
    args = SimpleNamespace(
        **vars(given),
        ep_size=1,
        attn_cp_size=1,
        disable_shared_experts_fusion=False,
        enable_dp_attention=given.dp_size > 1,
        enable_two_batch_overlap=False,
        enable_single_batch_overlap=False,
        enable_torch_compile=False,
        enable_lora=False,
        elastic_ep_backend=None,
        speculative_num_draft_tokens=None,
        max_prefill_tokens=64,
        cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(bs=[1, 4], max_bs=4)),
    )
    for resolve in (overrides._a2a_ep_size, overrides._a2a_fusion_adjustments):
        vars(args).update(resolve(args))
    vars(args).update(more)
    return args
