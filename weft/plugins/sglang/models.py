# SPDX-License-Identifier: Apache-2.0
"""MoE blocks of SGLang's models: their construction and parts."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import torch

from weft.errors import InvalidArgument
from weft.plugins.engine_api import ExpectedAPI, Parameters
from weft.plugins.settings import Settings
from weft.plugins.sglang.flags import is_weft_backend
from weft.plugins.sglang.hooks import SGLANG, SRT, Hook

_BLOCK = "self, hidden_states, forward_batch="
_MORE = ", gemm_output_zero_allocator=, input_ids=, input_ids_global=, skip_shared_experts="
# Forward methods of the supported MoE blocks: Qwen3-MoE, Qwen3-Next and -3.5, GLM-4.5 and
# -4.7-Flash, DeepSeek-V3 and -V4, MiMo-V2, MiniMax-M2 and -M3, GPT-OSS.
FORWARDS: dict[str, Parameters] = {
    SRT + "models.qwen3_moe.Qwen3MoeSparseMoeBlock.forward": _BLOCK,
    SRT + "models.glm4_moe.Glm4MoeSparseMoeBlock.forward": _BLOCK,
    SRT + "models.qwen2_moe.Qwen2MoeSparseMoeBlock.forward": {
        "0.5.17": _BLOCK,
        "0.5.23": _BLOCK + ", defer_finalize=",
    },
    SRT + "models.minimax_m2.MiniMaxM2MoE.forward": _BLOCK,
    SRT + "models.glm4_moe_lite.Glm4MoeLiteSparseMoeBlock.forward": {"0.5.23": _BLOCK},
    SRT + "models.mimo_v2.MiMoV2MoE.forward": {"0.5.23": _BLOCK},
    SRT + "models.minimax_m3.MiniMaxM3MoE.forward": {"0.5.23": _BLOCK.removesuffix("=")},
    SRT + "models.gpt_oss.GptOssSparseMoeBlock.forward": _BLOCK,
    SRT + "models.deepseek_v2.DeepseekV2MoE.forward": {
        "0.5.17": _BLOCK + _MORE,
        "0.5.23": _BLOCK + _MORE + ", return_moe_output=, leave_output_sum=",
    },
}

# Blocks whose forward stays SGLang's: weft runs the experts that they call. Kimi-K3's and
# Nemotron-3's blocks project tokens to fewer columns and back, and add the shared expert.
EXPERT_CALLERS: dict[str, Parameters] = {
    SRT + "models.kimi_k3.KimiK3MoE.forward": {"0.5.23": "self, hidden_states, *, prefix_sum="},
    SRT + "models.nemotron_h.NemotronHMoE.forward": {"0.5.23": _BLOCK},
}


def create_dispatcher(
    original: Callable[..., Any], moe_runner_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Create weft's dispatcher, which marks the layer as weft's; wraps create_moe_dispatcher."""
    if not is_weft_backend():
        return original(moe_runner_config, *args, **kwargs)
    from weft.plugins.sglang import dispatcher

    block = Settings.read("SGLANG").form == "block"
    dispatcher_class = dispatcher.BlockDispatcher if block else dispatcher.ExchangeDispatcher
    return dispatcher_class(moe_runner_config.layer_id)


def replicate_shared_expert(
    original: Callable[..., Any], mlp: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replicate the shared expert on every rank; wraps the constructor of the MLP."""
    if is_weft_backend() and str(kwargs.get("prefix", "")).endswith(
        ("shared_experts", "shared_expert")
    ):
        if "parallel_group" in inspect.signature(original).parameters:  # 0.5.23
            kwargs["parallel_group"] = "replicated"
        else:
            kwargs |= {"tp_rank": 0, "tp_size": 1}
    return original(mlp, *args, **kwargs)


def keep_mxfp4_layout(original: Callable[..., Any], method: Any, layer: Any) -> Any:
    """Keep the checkpoint's layout of MXFP4 weights; wraps the conversion for SGLang's kernels."""
    from weft.plugins.sglang.dispatcher import BlockDispatcher

    if isinstance(getattr(layer, "dispatcher", None), BlockDispatcher):
        return None
    return original(method, layer)


def moves_rows_to_experts(original: Callable[..., Any]) -> bool:
    """Return True for weft; wraps Kimi-K3's list of backends that need no gathered rows."""
    return is_weft_backend() or bool(original())


def find_weft_layers(model: Any) -> list[tuple[Any, Any]]:
    """Return weft's layers of experts, each with the block that calls it.

    Raises InvalidArgument for a block that weft does not support.
    """
    from weft.plugins.sglang.dispatcher import BlockDispatcher, ExchangeDispatcher

    supported = {
        entry.target: pkgutil.resolve_name(entry.target)
        for entry in SGLANG.select_entries(
            ExpectedAPI(*item) for item in (FORWARDS | EXPERT_CALLERS).items()
        )
    }
    layers = []
    for block in model.modules():
        for layer in block.children():
            if not isinstance(
                getattr(layer, "dispatcher", None), BlockDispatcher | ExchangeDispatcher
            ):
                continue
            if type(block).forward not in supported.values():
                names = ", ".join(name.rsplit(".", 2)[1] for name in supported)
                raise InvalidArgument(
                    f"{type(block).__name__} of {type(model).__name__} is not among the MoE blocks "
                    f"that weft supports: {names}; pass another --moe-a2a-backend"
                )
            layers.append((layer, block))
    return layers


def calls_experts(block: Any) -> bool:
    """Whether a block's own forward runs, and calls the experts that weft runs."""
    return any(name.split(".")[-2] == type(block).__name__ for name in EXPERT_CALLERS)


def get_gate(block: Any) -> Any:
    """Return the module that computes a block's router logits."""
    return block.router if type(block).__name__ == "GptOssSparseMoeBlock" else block.gate


def get_shared_mlp(block: Any) -> Any:
    """Return a block's shared-expert MLP, or None."""
    return getattr(block, "shared_experts", getattr(block, "shared_expert", None))


def get_shared_expert(block: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a block's shared expert, including its gate if it has one, or None."""
    mlp = get_shared_mlp(block)
    return getattr(block, "_forward_shared_experts", mlp) if mlp is not None else None


_MLP = "self, hidden_size, intermediate_size, hidden_act, quant_config=, reduce_results=, prefix="
_PLAIN_MLP = {"0.5.17": _MLP + ", tp_rank=, tp_size=", "0.5.23": _MLP + ", *, parallel_group="}
HOOKS = (
    Hook(
        SRT + "layers.moe.fused_moe_triton.layer.create_moe_dispatcher",
        {"0.5.17": "moe_runner_config", "0.5.23": "moe_runner_config, quant_method"},
        function=create_dispatcher,
    ),
    Hook(SRT + "models.glm4_moe.Glm4MoeMLP.__init__", _PLAIN_MLP, function=replicate_shared_expert),
    Hook(
        SRT + "models.qwen2_moe.Qwen2MoeMLP.__init__", _PLAIN_MLP, function=replicate_shared_expert
    ),
    Hook(
        SRT + "models.glm4_moe_lite.Glm4MoeLiteMLP.__init__",
        {"0.5.23": _MLP + ", *, parallel_group="},
        function=replicate_shared_expert,
    ),
    Hook(
        SRT + "models.minimax_m3.MiniMaxM3MLP.__init__",
        {
            "0.5.23": "self, config, quant_config=, prefix=, reduce_results=, intermediate_size=, "
            "*, parallel_group="
        },
        function=replicate_shared_expert,
    ),
    Hook(
        SRT + "models.nemotron_h.NemotronHMLP.__init__",
        {
            "0.5.23": "self, config, intermediate_size, quant_config=, bias=, reduce_results=, "
            "prefix=, *, parallel_group="
        },
        function=replicate_shared_expert,
    ),
    Hook(SRT + "models.kimi_k3._uses_ep_a2a", {"0.5.23": ""}, function=moves_rows_to_experts),
    Hook(
        SRT + "layers.quantization.mxfp4.Mxfp4MoEMethod.process_weights_after_loading",
        "self, layer",
        function=keep_mxfp4_layout,
    ),
    Hook(
        SRT + "models.deepseek_v2.DeepseekV2MLP.__init__",
        {
            "0.5.17": _MLP + ", tp_rank=, tp_size=, swiglu_limit=",
            "0.5.23": _MLP + ", swiglu_limit=, allow_fused_down=, *, parallel_group=",
        },
        function=replicate_shared_expert,
    ),
)
# Functions and classes that the hooks use.
_PARTS, _SHARED = "experts gate topk layer_id", " shared_experts"
_DISPATCHER = SRT + "layers.moe.token_dispatcher."
EXPECTED_API = (
    ExpectedAPI(_DISPATCHER + "base.BaseDispatcher.__init__", "self"),
    ExpectedAPI(_DISPATCHER + "base.BaseDispatcher.dispatch", "self, hidden_states, topk_output"),
    ExpectedAPI(_DISPATCHER + "base.BaseDispatcher.combine", "self, combine_input"),
    ExpectedAPI(_DISPATCHER + "standard.StandardDispatchOutput"),
    ExpectedAPI(_DISPATCHER + "standard.StandardCombineInput"),
    ExpectedAPI(
        SRT + "layers.moe.fused_moe_triton.layer.FusedMoE.__init__",
        attributes="layer_id num_experts num_local_experts top_k hidden_size params_dtype "
        "with_bias intermediate_size_per_partition moe_ep_size moe_ep_rank moe_tp_size dispatcher "
        "num_fused_shared_experts moe_runner_config quant_method "
        "should_fuse_routed_scaling_factor_in_topk",
    ),
    ExpectedAPI(SRT + "models.qwen3_moe.Qwen3MoeSparseMoeBlock.__init__", attributes=_PARTS),
    ExpectedAPI(
        SRT + "models.qwen2_moe.Qwen2MoeSparseMoeBlock.__init__",
        attributes=_PARTS + " shared_expert shared_expert_gate",
    ),
    ExpectedAPI(
        SRT + "models.qwen2_moe.Qwen2MoeSparseMoeBlock._forward_shared_experts",
        "self, hidden_states, apply_gate=",
    ),
    ExpectedAPI(SRT + "models.minimax_m2.MiniMaxM2MoE.__init__", attributes=_PARTS),
    ExpectedAPI(
        SRT + "models.glm4_moe_lite.Glm4MoeLiteSparseMoeBlock.__init__",
        {"0.5.23": None},
        attributes=_PARTS + _SHARED,
    ),
    ExpectedAPI(SRT + "models.mimo_v2.MiMoV2MoE.__init__", {"0.5.23": None}, attributes=_PARTS),
    ExpectedAPI(
        SRT + "models.minimax_m3.MiniMaxM3MoE.__init__",
        {"0.5.23": None},
        attributes=_PARTS + _SHARED,
    ),
    ExpectedAPI(
        SRT + "models.minimax_m3.MiniMaxM3MoE._compute_router_logits",
        {"0.5.23": "self, hidden_states"},
    ),
    ExpectedAPI(
        SRT + "models.kimi_k3.KimiK3MoE.__init__",
        {"0.5.23": None},
        attributes="experts _ep_a2a _shared_experts_tp1",
    ),
    ExpectedAPI(
        SRT + "models.nemotron_h.NemotronHMoE.__init__",
        {"0.5.23": None},
        attributes="experts gate shared_experts",
    ),
    ExpectedAPI(
        SRT + "models.gpt_oss.GptOssSparseMoeBlock.__init__",
        attributes="experts router topk layer_id",
    ),
    ExpectedAPI(
        SRT + "models.glm4_moe.Glm4MoeSparseMoeBlock.__init__", attributes=_PARTS + _SHARED
    ),
    ExpectedAPI(
        SRT + "models.deepseek_v2.DeepseekV2MoE.__init__",
        attributes=_PARTS + _SHARED + " is_nextn is_hash",
    ),
)
