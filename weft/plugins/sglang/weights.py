# SPDX-License-Identifier: Apache-2.0
"""Description and checks of SGLang's weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from weft.errors import InvalidArgument, SetupError
from weft.gemm.config import MXFP4
from weft.moe import RELU2, Gating, Ungated
from weft.plugins.weights import Layer, check_weights

TRITON = "--moe-runner-backend triton"
_DIGEST_FACTOR = 0x9E3779B97F4A7C1  # any odd number


def build_layer(fused: Any) -> Layer:
    """Build the Layer of a FusedMoE layer. Its expert ids are physical (EPLB)."""
    scale = fused.moe_runner_config.routed_scaling_factor
    is_scaled = scale is None or fused.should_fuse_routed_scaling_factor_in_topk
    return Layer(
        fused,
        f"layer {fused.layer_id}",
        num_experts=fused.num_experts,
        num_local_experts=fused.num_local_experts,
        ep_rank=fused.moe_ep_rank,
        ep_size=fused.moe_ep_size,
        top_k=fused.top_k,
        hidden=fused.hidden_size,
        intermediate=fused.intermediate_size_per_partition,
        dtype=fused.params_dtype,
        scale=1.0 if is_scaled else float(scale),
        flag=TRITON,
        gating=read_gating(fused.moe_runner_config),
        interleaved=_is_interleaved(fused.moe_runner_config),
        bias="weight_bias" if fused.with_bias else "",
    )


def unify_mxfp4(fused: Any) -> None:
    """Convert a layer's MXFP4 experts to uint8, if SGLang's FP8 method loaded them (DeepSeek-V4).

    That method loads values as int8, and the powers of two that are scales as float32.

    Raises:
        InvalidArgument: A scale is not a power of two.
    """
    if not getattr(fused.quant_method, "is_fp4_expert", False):
        return
    for name in ("w13", "w2"):
        weight = getattr(fused, f"{name}_weight")
        weight.data = weight.data.view(MXFP4)
        scale = getattr(fused, f"{name}_weight_scale_inv")
        powers = scale.data.to(torch.float8_e8m0fnu)
        if not torch.equal(powers.float(), scale.data):
            raise InvalidArgument(
                f"layer {fused.layer_id}: {name}_weight_scale_inv has values that are not powers "
                "of two, but MXFP4 has no others: load another checkpoint"
            )
        scale.data = powers.view(torch.uint8)


def split_mxfp4(fused: Any) -> None:
    """Undo `unify_mxfp4`, before SGLang loads weights."""
    if not getattr(fused.quant_method, "is_fp4_expert", False):
        return
    for name in ("w13", "w2"):
        weight, scale = (getattr(fused, f"{name}_weight{part}") for part in ("", "_scale_inv"))
        weight.data = weight.data.view(torch.int8)
        scale.data = scale.data.view(torch.float8_e8m0fnu).float()


def read_gating(config: Any) -> Gating | Ungated:
    """Return the activation, or SwiGLU if `_check_arithmetic` raises for the activation."""
    if config.activation == "relu2" and not config.is_gated:
        return RELU2
    if config.activation == "situ":
        return Gating(beta=config.gemm1_alpha, linear_beta=config.gemm1_clamp_limit)
    if config.gemm1_alpha is None:
        return Gating(limit=config.swiglu_limit)
    return Gating(config.gemm1_alpha, 1.0, config.gemm1_clamp_limit)


def _is_interleaved(config: Any) -> bool:
    """Whether the rows of w13_weight alternate between gate and up, as for GPT-OSS."""
    return config.gemm1_alpha is not None and bool(config.gate_up_interleaved)


def check_experts(fused: Any, *, form: str) -> None:
    """Raise InvalidArgument with all unsupported attributes of a layer, and their fixes.

    `form` is "block" if weft runs the experts, or "dispatcher" if SGLang does.
    """
    check_weights(build_layer(fused), form, _list_unsupported(fused, form))


def _list_unsupported(fused: Any, form: str) -> Iterator[str]:
    if fused.num_fused_shared_experts:
        yield (
            f"num_fused_shared_experts is {fused.num_fused_shared_experts}; weft supports 0: pass "
            "--disable-shared-experts-fusion"
        )
    if fused.moe_tp_size != 1:
        yield (
            f"moe_tp_size is {fused.moe_tp_size}; weft supports 1, whole experts on each rank: "
            "pass --ep-size equal to --tp-size"
        )
    if form == "block":
        yield from _check_arithmetic(fused)
    elif getattr(fused.quant_method, "is_fp4_expert", False):
        yield "SGLang's Triton runner has no MXFP4 experts: unset WEFT_SGLANG_FORM"


def _check_arithmetic(fused: Any) -> Iterator[str]:
    config, method = fused.moe_runner_config, fused.quant_method
    supported = {"activation": "silu", "is_gated": True, "apply_router_weight_on_input": False}
    if config.activation == "relu2" and not config.is_gated:
        supported |= {"activation": "relu2", "is_gated": False, "swiglu_limit": None}
        supported |= {"gemm1_alpha": None, "gemm1_clamp_limit": None}
    elif config.activation == "situ" and config.gemm1_alpha and config.gemm1_clamp_limit:
        supported |= {"activation": "situ", "swiglu_limit": None}
    elif config.gemm1_alpha is None:
        supported["gemm1_clamp_limit"] = None  # SGLang would apply it after the activation
    else:
        supported["swiglu_limit"] = None
    for name, value in supported.items():
        if getattr(config, name) != value:
            actual = getattr(config, name)
            yield f"moe_runner_config.{name} is {actual!r}; weft supports {value!r}"
    if getattr(config, "gemm1_beta", None) not in (None, 1.0):
        yield f"moe_runner_config.gemm1_beta is {config.gemm1_beta!r}; weft supports 1.0"
    if getattr(method, "load_up_proj_weight_first", False):
        yield "w13_weight has the up projection first; weft supports the gate first: pass " + TRITON
    runner = getattr(getattr(method, "runner", None), "runner_backend", None)
    if runner is None or not runner.is_triton():
        actual = "unknown" if runner is None else repr(runner.value)
        yield f"the runner is {actual}, whose weight layout may differ: pass " + TRITON


def describe_weights(
    model: Any, layers: Iterable[Any], locations: Any, rank: int
) -> dict[str, Any]:
    """Return digests of a rank's weights by name; those of an expert by layer and logical id.

    Args:
        model: SGLang's model.
        layers: Its FusedMoE layers.
        locations: SGLang's ExpertLocationMetadata.
        rank: This rank.
    """
    placement = locations.physical_to_logical_map_cpu.tolist()
    digests: dict[str, Any] = {
        "the placement of experts": hashlib.sha256(repr(placement).encode()).hexdigest()
    }
    num_local, of_experts = locations.num_local_physical_experts, set()
    for layer in layers:
        logical_ids = placement[layer.layer_id][rank * num_local :][:num_local]
        for name, tensor in layer.named_parameters():
            if tensor.dim() == 0 or len(tensor) != num_local:
                continue
            of_experts.add(id(tensor))
            for expert, digest in zip(logical_ids, _compute_digests(tensor), strict=True):
                digests[f"{name} of expert {expert} of layer {layer.layer_id}"] = digest
    for name, tensor in model.named_parameters():
        if id(tensor) not in of_experts:
            digests[name] = _compute_digests(tensor.unsqueeze(0))[0]
    return digests


def _compute_digests(tensor: torch.Tensor) -> list[int]:
    """Return a digest of each row of `tensor`, which depends on its bytes and on their places."""
    rows = tensor.detach().reshape(len(tensor), -1).contiguous().view(torch.uint8)
    blocks = rows.reshape(len(rows), -1, math.gcd(rows.shape[1], 128))

    def weigh(sums: torch.Tensor) -> torch.Tensor:
        return (sums * torch.arange(1, sums.shape[1] + 1, device=sums.device)).sum(1)

    by_block, by_place = (weigh(blocks.sum(dim, dtype=torch.int64)) for dim in (2, 1))
    digests: list[int] = (by_block * _DIGEST_FACTOR + by_place).tolist()  # modulo 2^64
    return digests


def check_weights_equal(digests_by_rank: list[dict[str, Any]]) -> None:
    """Raise SetupError unless all ranks have equal digests for equal names."""
    first: dict[str, tuple[int, Any]] = {}
    for rank, digests in enumerate(digests_by_rank):
        for name, digest in digests.items():
            first_rank, expected = first.setdefault(name, (rank, digest))
            if digest != expected:
                raise SetupError(
                    f"{name} differs between rank {first_rank} and rank {rank} ({expected} and "
                    f"{digest}): a replacement loads the checkpoint, so the weights were updated, "
                    "or the checkpoint has changed. Restart the server"
                )
