# SPDX-License-Identifier: Apache-2.0
"""Description and checks of vLLM's layers of routed experts, and checks of server flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from weft.errors import InvalidArgument
from weft.moe import CLAMPED_SWIGLU, RELU2, Gating, Ungated
from weft.moe.experts.quantize import convert_to_fp8
from weft.plugins.weights import Layer, build_layer_error, refuse_loads
from weft.shape import FP8_BLOCK

MXFP8_BLOCK = 32  # columns per scale
EXCHANGE_FIX = "use WEFT_VLLM=exchange, where vLLM computes the experts"


def build_layer(experts: Any) -> Layer:
    """Build the Layer of a RoutedExperts layer. Its expert ids are physical (EPLB).

    vLLM itself scales the routed experts' sum.
    """
    config = experts.moe_config
    parallel = config.moe_parallel_config
    return Layer(
        experts,
        experts.layer_name,
        num_experts=experts.global_num_experts,
        num_local_experts=experts.local_num_experts,
        ep_rank=parallel.ep_rank,
        ep_size=parallel.ep_size,
        top_k=experts.top_k,
        hidden=experts.hidden_size,
        intermediate=experts.intermediate_size_per_partition,
        dtype=config.in_dtype,
        gating=read_gating(experts),
        interleaved=experts.activation.value == "swigluoai",
        bias="bias" if config.has_bias else "",
    )


def convert_mxfp8(experts: Any) -> None:
    """Convert loaded MXFP8 experts in place to FP8 with a float32 scale per 128 x 128 block."""
    for name in ("w13_weight", "w2_weight"):
        weight, scale = getattr(experts, name).data, getattr(experts, f"{name}_scale", None)
        if scale is None:  # converted before
            continue
        rows, columns = weight.shape[1:]
        if rows % FP8_BLOCK or columns % FP8_BLOCK:
            text = f"{name} is {[*weight.shape]}; weft supports multiples of {FP8_BLOCK} for MXFP8"
            raise build_layer_error(experts.layer_name, "block", text)
        blocks = weight.new_empty(
            (len(weight), rows // FP8_BLOCK, columns // FP8_BLOCK), dtype=torch.float32
        )
        for matrix, powers, scales in zip(weight, scale, blocks, strict=True):
            factors = powers.view(torch.float8_e8m0fnu).float()
            values, block_scales = convert_to_fp8(matrix, factors, (1, MXFP8_BLOCK))
            matrix.copy_(values)
            scales.copy_(block_scales)
        delattr(experts, f"{name}_scale")
        for suffix, tensor in (("", weight), ("_scale_inv", blocks)):
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            experts.register_parameter(name + suffix, parameter)
            refuse_loads(parameter, f"{experts.layer_name}.{name}{suffix}")


def read_gating(experts: Any) -> Gating | Ungated:
    """Return the activation. Raises InvalidArgument if weft does not support it."""
    config, name = experts.moe_config, experts.activation.value
    limit, *factors = experts.swiglu_limit, experts.swiglu_alpha, experts.swiglu_beta
    # SiTU's parameters, which vLLM has since 0.32.
    betas = [getattr(config, f"activation_situ_{each}", None) for each in ("beta", "linear_beta")]
    if config.is_act_and_mul:
        if name == "swigluoai" and limit is None and factors == [None, None]:
            return CLAMPED_SWIGLU  # its limit, alpha and beta are constants in vLLM
        if name == "swigluoai_uninterleave" and None not in (limit, factors[0]):
            return Gating(factors[0], factors[1] or 0.0, limit)
        if name == "silu" and factors == [None, None]:
            return Gating(limit=limit)
        if name == "situ" and [limit, *factors] == [None] * 3 and None not in betas:
            return Gating(beta=betas[0], linear_beta=betas[1])
    elif name == "relu2_no_mul" and [limit, *factors] == [None] * 3:
        return RELU2
    raise InvalidArgument(
        f"activation is {name!r} with limit, alpha and beta {(limit, *factors)} and betas of SiTU "
        f"{(*betas,)}; weft supports gated 'silu' with or without limit, 'swigluoai', "
        "'swigluoai_uninterleave' with limit and alpha, 'situ' with both betas, and ungated "
        "'relu2_no_mul'"
    )


def check_server(config: Any, parallel: Any, *, form: str, cpu: bool) -> None:
    """Raise InvalidArgument with all server flags that weft does not support.

    Args:
        config: vLLM's VllmConfig.
        parallel: A layer's FusedMoEParallelConfig.
        form: "block" or "exchange".
        cpu: Whether ranks run on CPUs.
    """
    unsupported = list(_check_flags(config, form)) + list(_check_ranks(parallel))
    if cpu and not config.model_config.enforce_eager:
        unsupported.append("on CPU ranks vLLM compiles its layers of experts: add --enforce-eager")
    if unsupported:
        raise InvalidArgument(
            f"weft does not support vLLM with these flags: {'; '.join(unsupported)}"
        )


def _check_flags(config: Any, form: str) -> Iterator[str]:
    parallel, default = config.parallel_config, "allgather_reducescatter"
    if parallel.all2all_backend != default:
        yield (
            f"--all2all-backend is {parallel.all2all_backend}, but weft replaces the default, "
            f"{default}: remove the flag"
        )
    if parallel.expert_placement_strategy != "linear":
        yield (
            f"--expert-placement-strategy is {parallel.expert_placement_strategy}; weft supports "
            "linear: remove the flag"
        )
    offload = config.offload_config
    uses_gpu = "experts stay on the GPUs: use more ranks"
    for flag, is_set, fix in (
        (
            "--enable-dbo",
            parallel.enable_dbo or parallel.ubatch_size > 1,
            "weft overlaps within a batch: use WEFT_VLLM_OVERLAP",
        ),
        (
            "--enable-elastic-ep",
            parallel.enable_elastic_ep,
            "start a server with the final number of ranks",
        ),
        (
            "--enable-fault-tolerance",  # since 0.32
            getattr(parallel, "enable_fault_tolerance", False),
            "a rank's death ends the server, which a supervisor may start again",
        ),
        (
            "--prefill-context-parallel-size",
            parallel.prefill_context_parallel_size > 1,
            "use --data-parallel-size",
        ),
        ("--enable-lora", config.lora_config is not None, "merge the adapter into the checkpoint"),
        ("--cpu-offload-gb", form == "block" and offload.uva.cpu_offload_gb > 0, uses_gpu),
        (
            "--offload-group-size",
            form == "block" and offload.prefetch.offload_group_size > 0,
            uses_gpu,
        ),
    ):
        if is_set:
            yield f"{flag} is not supported: {fix}"


def _check_ranks(parallel: Any) -> Iterator[str]:
    """Yield an error if ranks do not have separate tokens or whole experts."""
    if parallel.tp_size * parallel.dp_size * parallel.ep_size == 1:
        return
    if not parallel.use_ep:
        yield "ranks have parts of every expert: add --enable-expert-parallel"
    elif not parallel.use_all2all_kernels:
        yield (
            "with --tensor-parallel-size alone every rank has all tokens, and there is no "
            "all-to-all: add --data-parallel-size, or use WEFT_VLLM_ALLREDUCE=1 alone"
        )
    elif parallel.ep_size != parallel.dp_size and not parallel.is_sequence_parallel:
        yield (
            "this model has the same tokens on all tensor-parallel ranks of a data-parallel rank: "
            "remove --tensor-parallel-size"
        )


def check_arithmetic(experts: Any, method: str) -> None:
    """Raise InvalidArgument for an unsupported activation. `check_weights` checks the tensors.

    Args:
        experts: vLLM's layer.
        method: Class name of its quantization method.
    """
    unsupported = []
    try:
        read_gating(experts)
    except InvalidArgument as error:
        unsupported.append(str(error))
    # GPT-OSS's method has constants of this activation, and only its loader interleaves rows.
    is_oai, is_gpt_oss = experts.activation.value == "swigluoai", method == "GptOssMxfp4MoEMethod"
    if is_gpt_oss and not is_oai or method == "Mxfp4MoEMethod" and is_oai:
        unsupported.append(f"{method} has experts with activation {experts.activation.value!r}")
    if experts.apply_router_weight_on_input:
        unsupported.append("apply_router_weight_on_input is True; weft supports False")
    if fused := experts.expert_map_manager.num_fused_shared_experts:
        unsupported.append(f"{fused} shared experts are fused into the routed experts")
    if unsupported:
        raise build_layer_error(experts.layer_name, "block", *unsupported, EXCHANGE_FIX)
