# SPDX-License-Identifier: Apache-2.0
"""Compare MoE blocks that vLLM builds and weft runs with their published formulas, on CPU ranks.

vLLM has no CPU attention for these models, so no server runs: each rank builds the blocks alone,
loads random experts through vLLM's loaders, and passes its tokens to them. The exit status is 1 if
a block's relative error is above 5 %; rounding rows to FP8 takes 3 %.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import moe_blocks
import torch
from moe_blocks import BETA, HIDDEN, INTERMEDIATE, LATENT, LINEAR_BETA, SCALE, Block

import weft

EXPERTS, TOP_K = 64, 6  # numbers that vLLM's top-k on CPUs has kernels of
COUNTS = (5, 9, 1, 3)  # tokens of each rank; vLLM gives a rank without requests one token


def set_up(group: weft.Group) -> Any:
    """Start vLLM's process groups with weft's plug-in, as a worker does; return a VllmConfig."""
    group.process_group()  # vLLM keeps torch's default group
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    os.environ["RANK"] = str(group.rank)
    config = VllmConfig(
        parallel_config=ParallelConfig(
            data_parallel_size=group.size,
            enable_expert_parallel=group.size > 1,
            distributed_executor_backend="external_launcher",
        )
    )
    with set_current_vllm_config(config):
        init_distributed_environment(group.size, group.rank, "env://", group.rank, "gloo")
        initialize_model_parallel()
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16, enforce_eager=True, enable_sleep_mode=False, hf_config=None
    )
    return config


def deepseek_v4(vllm: Any, layer: int, version: str = "deepseek_v4") -> Block:
    """A block of DeepSeek-V4 with MXFP4 experts. All layers of V4.1 choose experts by logits."""
    model = importlib.import_module(f"vllm.models.{version}.nvidia.model")
    quantization = importlib.import_module(f"vllm.models.{version}.quant_config")
    config, theirs = moe_blocks.deepseek_v4(layer, EXPERTS, TOP_K)
    prefix = f"model.layers.{layer}.ffn"
    vllm.model_config.hf_config = config
    vllm.quant_config = quantization.DeepseekV4FP8Config(
        is_checkpoint_fp8_serialized=True,
        ignored_layers=[f"{prefix}.shared_experts.{name}_proj" for name in ("gate_up", "down")],
        weight_block_size=[128, 128],
    )
    by_token = {"num_hash_layers": 3} if version == "deepseek_v4" else {}
    block = model.DeepseekV4MoE(vllm, prefix, **by_token)
    bias = None if theirs.is_hash else block.gate.e_score_correction_bias
    layer_of_experts = block.experts.routed_experts
    formula = moe_blocks.load_block(block, theirs, layer_of_experts, "mxfp4", bias)
    if theirs.is_hash:
        block.gate.tid2eid.data.copy_(theirs.gate.tid2eid)
    return block, formula


def minimax_m3(vllm: Any, layer: int, kind: str) -> Block:
    """A block of MiniMax-M3, in bfloat16 or with MXFP8 experts."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config

    for name in ("torchvision", "torchvision.transforms"):  # of images; CPU builds lack it
        sys.modules.setdefault(name, MagicMock())
    from vllm.models.minimax_m3.nvidia.model import MiniMaxM3MoE

    # vLLM has kernels of this activation for GPUs alone, and raises without one.
    unquantized_fused_moe_method.select_unquantized_moe_backend = lambda moe_config: (None, None)
    config, theirs = moe_blocks.minimax_m3(EXPERTS, TOP_K)
    prefix, quantization = f"model.layers.{layer}.mlp", None
    if kind == "mxfp8":
        ignored = [f"{prefix}.shared_experts.{name}_proj" for name in ("gate_up", "down")]
        quantization = ModelOptMxFp8Config.from_config(
            {"quant_method": "mxfp8", "ignored_layers": ignored}
        )
    block = MiniMaxM3MoE(config, layer, quantization, prefix=prefix)
    router = block.experts.router  # on CPUs it corrects sigmoid scores only in groups
    router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1
    bias, layer_of_experts = block.e_score_correction_bias, block.experts.routed_experts
    return block, moe_blocks.load_block(block, theirs, layer_of_experts, kind, bias)


def kimi_k3(vllm: Any, layer: int) -> Block:
    """A block of Kimi-K3 with MXFP4 experts."""
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
    from vllm.models.kimi_k3.nvidia.model import KimiMoE
    from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig

    config = KimiLinearConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        num_experts_per_token=TOP_K,
        routed_scaling_factor=SCALE,
        num_shared_experts=1,
        routed_expert_hidden_size=LATENT,
        latent_moe_use_norm=True,
        hidden_act="situ",
        activation_situ_beta=BETA,
        activation_situ_linear_beta=LINEAR_BETA,
    )
    torch.cuda.Event = SimpleNamespace  # two that overlap GEMMs on a GPU
    block = KimiMoE(config, vllm, Mxfp4Config(), f"model.layers.{layer}.mlp", layer)
    for name, parameter in block.named_parameters():
        if "routed_experts" not in name and "norm" not in name:
            parameter.data.normal_(0, 0.2)
    layer_of_experts, restore = block.experts.routed_experts, block.routed_output_transform
    return block, moe_blocks.kimi_k3(block, layer_of_experts, TOP_K, restore)


BLOCKS: dict[str, Callable[[Any], Block]] = {
    "deepseek_v4, by token id": lambda vllm: deepseek_v4(vllm, 0),
    "deepseek_v4, by logits": lambda vllm: deepseek_v4(vllm, 3),
    "deepseek_v41": lambda vllm: deepseek_v4(vllm, 4, "deepseek_v41"),
    "minimax_m3": lambda vllm: minimax_m3(vllm, 5, "bfloat16"),
    "minimax_m3, mxfp8": lambda vllm: minimax_m3(vllm, 7, "mxfp8"),
    "kimi_k3": lambda vllm: kimi_k3(vllm, 6),
}


def compare(group: weft.Group, names: list[str]) -> dict[str, float]:
    """Return each block's relative error on this rank's tokens."""
    config, errors = set_up(group), {}
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.utils.torch_utils import set_default_torch_dtype

    from weft.plugins.vllm import engine

    counts = torch.tensor(COUNTS[: group.size])
    for name in names:
        torch.manual_seed(0)  # every rank draws the same model
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            block, formula = BLOCKS[name](config)
            for module in block.modules():
                if isinstance(getattr(module, "quant_method", None), QuantizeMethodBase):
                    module.quant_method.process_weights_after_loading(module)
        torch.manual_seed(1 + group.rank)
        count = int(counts[group.rank])
        run = functools.partial(run_block, block, name.startswith("deepseek"))
        with set_forward_context(None, config, count, counts):
            errors[name] = moe_blocks.compare_block(run, formula, count)
        engine.close()
    return errors


def run_block(block: Any, by_token: bool, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Call a block as its model does."""
    out: torch.Tensor = block(x, ids) if by_token else block(x)
    return out


def main() -> int:
    """Compare the blocks for each number of ranks."""
    environment = {"WEFT_VLLM": "block", "VLLM_TARGET_DEVICE": "cpu"}
    return moe_blocks.main(str(__doc__), BLOCKS, compare, **environment)


if __name__ == "__main__":
    sys.exit(main())
