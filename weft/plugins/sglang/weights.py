# SPDX-License-Identifier: Apache-2.0
"""Conversion and checks of SGLang's FusedMoE layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.moe import Gating
from weft.plugins.weights import Layer, check_weights

TRITON = "--moe-runner-backend triton"


def layer_of(fused: Any) -> Layer:
    """Describe a FusedMoE layer. Its expert ids are physical (EPLB)."""
    scale = fused.moe_runner_config.routed_scaling_factor
    scaled = scale is None or fused.should_fuse_routed_scaling_factor_in_topk
    return Layer(
        fused,
        f"layer {fused.layer_id}",
        num_experts=fused.num_experts,
        local=fused.num_local_experts,
        rank=fused.moe_ep_rank,
        ranks=fused.moe_ep_size,
        top_k=fused.top_k,
        hidden=fused.hidden_size,
        intermediate=fused.intermediate_size_per_partition,
        dtype=fused.params_dtype,
        scale=1.0 if scaled else float(scale),
        flag=TRITON,
        gating=gating_of(fused.moe_runner_config),
        interleaved=_is_interleaved(fused.moe_runner_config),
        bias="weight_bias" if fused.with_bias else "",
    )


def gating_of(config: Any) -> Gating:
    """Return the activation; SwiGLU for activations that `_check_arithmetic` refuses."""
    if config.gemm1_alpha is None:
        return Gating(limit=config.swiglu_limit)
    return Gating(config.gemm1_alpha, 1.0, config.gemm1_clamp_limit)


def _is_interleaved(config: Any) -> bool:
    """Whether the rows of w13_weight alternate between gate and up, as for GPT-OSS."""
    return config.gemm1_alpha is not None and bool(config.gate_up_interleaved)


def check_experts(fused: Any, *, form: str) -> None:
    """Raise InvalidArgument listing each unsupported attribute of a layer, with its fix.

    `form` is "block" if weft runs the experts, or "dispatcher" if SGLang's runner does.
    """
    check_weights(layer_of(fused), form, _problems(fused, form))


def _problems(fused: Any, form: str) -> Iterator[str]:
    if fused.num_fused_shared_experts:
        yield (
            f"num_fused_shared_experts is {fused.num_fused_shared_experts}; weft serves 0: pass "
            "--disable-shared-experts-fusion"
        )
    if fused.moe_tp_size != 1:
        yield (
            f"moe_tp_size is {fused.moe_tp_size}; weft serves 1, whole experts on each rank: pass "
            "--ep-size equal to --tp-size"
        )
    if form == "block":
        yield from _check_arithmetic(fused)


def _check_arithmetic(fused: Any) -> Iterator[str]:
    config, method = fused.moe_runner_config, fused.quant_method
    served = {"activation": "silu", "is_gated": True, "apply_router_weight_on_input": False}
    if config.gemm1_alpha is None:
        served["gemm1_clamp_limit"] = None  # SGLang would apply it after the activation
    else:
        served["swiglu_limit"] = None
    for name, value in served.items():
        if getattr(config, name) != value:
            have = getattr(config, name)
            yield f"moe_runner_config.{name} is {have!r}; weft serves {value!r}"
    if getattr(config, "gemm1_beta", None) not in (None, 1.0):
        yield f"moe_runner_config.gemm1_beta is {config.gemm1_beta!r}; weft serves 1.0"
    if getattr(method, "load_up_proj_weight_first", False):
        yield "w13_weight has the up projection first; weft serves the gate first: pass " + TRITON
    runner = getattr(getattr(method, "runner", None), "runner_backend", None)
    if runner is None or not runner.is_triton():
        have = "unknown" if runner is None else repr(runner.value)
        yield f"the runner is {have}, whose weight layout may differ: pass " + TRITON
