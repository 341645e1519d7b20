"""The experts of a FusedMoE layer as weft takes them: the same tensors, or a refusal in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from weft.errors import InvalidArgument
from weft.moe import ExpertWeights, MoEConfig, Routing
from weft.shape import FP8_BLOCK

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def config_of(layer: Any, *, shared: int = 0) -> MoEConfig:
    """Sizes of a layer that `refusals` lets pass. Its ids are those of physical experts (EPLB).

    shared: the intermediate size of the shared expert that belongs to the block, 0 for none.
    """
    return MoEConfig(
        hidden=layer.hidden_size,
        intermediate=layer.intermediate_size_per_partition,
        routing=Routing(layer.num_experts, layer.top_k),
        shared=shared,
        dtype=layer.params_dtype,
    )


def experts_of(layer: Any) -> ExpertWeights:
    """This rank's experts: no copy, so what EPLB or an update writes in place is seen."""
    scales = (getattr(layer, f"{name}_weight_scale_inv", None) for name in ("w13", "w2"))
    gate_up_scale, down_scale = (None if scale is None else scale.data for scale in scales)
    return ExpertWeights(
        layer.w13_weight.data,
        layer.w2_weight.data,
        gate_up_scale=gate_up_scale,
        down_scale=down_scale,
    )


def is_fp8(layer: Any) -> bool:
    """Are the weights FP8 with a scale for each block?"""
    return bool(layer.w13_weight.dtype == torch.float8_e4m3fn)


def check_experts(layer: Any, *, form: str) -> None:
    """Raise InvalidArgument naming the layer, each wrong attribute and its fix.

    form: "block", which multiplies itself, or "dispatcher", which leaves that to SGLang's runner.
    """
    wrong = list(_of_placement(layer))
    if form == "block":
        wrong += [*_of_arithmetic(layer), *_of_tensors(layer)]
    if wrong:
        raise InvalidArgument(
            f"weft cannot serve the experts of layer {layer.layer_id} in form {form!r}: "
            + "; ".join(wrong)
        )


def _of_placement(layer: Any) -> Iterator[str]:
    if layer.num_fused_shared_experts:
        yield (
            f"num_fused_shared_experts is {layer.num_fused_shared_experts}, served is 0: pass "
            "--disable-shared-experts-fusion"
        )
    if layer.moe_tp_size != 1:
        yield (
            f"moe_tp_size is {layer.moe_tp_size}, served is 1, whole experts on each rank: pass "
            "--ep-size equal to --tp-size"
        )
    if layer.num_local_experts * layer.moe_ep_size != layer.num_experts:
        yield (
            f"num_experts is {layer.num_experts}, num_local_experts {layer.num_local_experts} on "
            f"{layer.moe_ep_size} ranks; served are equal parts"
        )


def _of_arithmetic(layer: Any) -> Iterator[str]:
    config, method = layer.moe_runner_config, layer.quant_method
    served = {"activation": "silu", "is_gated": True, "apply_router_weight_on_input": False}
    served |= dict.fromkeys(("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit"))
    for name, value in served.items():
        if getattr(config, name) != value:
            have = getattr(config, name)
            yield f"moe_runner_config.{name} is {have!r}, served is {value!r}"
    if layer.with_bias:
        yield "with_bias is True, served are experts without biases"
    if getattr(method, "load_up_proj_weight_first", False):
        yield "w13_weight has the up projection first, served is the gate first: pass " + TRITON
    runner = getattr(getattr(method, "runner", None), "runner_backend", None)
    if runner is None or not runner.is_triton():
        have = "unknown" if runner is None else repr(runner.value)
        yield f"the runner is {have}, whose weights may be in another order: pass " + TRITON


TRITON = "--moe-runner-backend triton"


def _of_tensors(layer: Any) -> Iterator[str]:
    wide, hidden = 2 * layer.intermediate_size_per_partition, layer.hidden_size
    local, fp8 = layer.num_local_experts, is_fp8(layer)
    shapes = {"w13_weight": (local, wide, hidden), "w2_weight": (local, hidden, wide // 2)}
    if layer.params_dtype not in DTYPES:
        yield f"params_dtype is {layer.params_dtype}, served are {', '.join(map(str, DTYPES))}"
    wanted = torch.float8_e4m3fn if fp8 else layer.params_dtype
    for name, shape in shapes.items():
        tensor = getattr(layer, name)
        yield from _unlike(name, tensor, shape, wanted)
        scale = getattr(layer, f"{name}_scale_inv", None)
        if not fp8:
            if scale is not None or hasattr(layer, f"{name}_scale"):
                yield f"{name} is {tensor.dtype} with scales; served with scales is float8_e4m3fn"
            continue
        if shape[1] % FP8_BLOCK or shape[2] % FP8_BLOCK:
            yield f"{name} is {list(shape)}, served in FP8 are multiples of {FP8_BLOCK}"
        elif scale is None:
            yield (
                f"{name} is FP8 and there is no {name}_scale_inv; served is a float32 scale for "
                f"each block of {FP8_BLOCK} x {FP8_BLOCK}, not one for a tensor or a channel"
            )
        elif getattr(scale, "format_ue8m0", False):
            yield f"{name}_scale_inv has format_ue8m0, served are float32 scales: pass " + TRITON
        else:
            blocks = (local, shape[1] // FP8_BLOCK, shape[2] // FP8_BLOCK)
            yield from _unlike(f"{name}_scale_inv", scale, blocks, torch.float32)


def _unlike(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[str]:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        order = "" if tensor.is_contiguous() else ", not contiguous"
        have = f"{list(tensor.shape)} {tensor.dtype}{order}"
        yield f"{name} is {have}, served is {list(shape)} {dtype}, contiguous"
