# SPDX-License-Identifier: Apache-2.0
"""Compare MoE blocks that vLLM builds and weft runs with their published formulas, on CPU ranks.

vLLM has no CPU attention for these models, so no server runs: each rank builds the blocks alone,
loads random experts through vLLM's loaders, and passes its tokens to them. The exit status is 1 if
a block's relative error is above 5 %; rounding rows to FP8 takes 3 %.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn

import weft
from weft.fp8 import quantize
from weft.gemm import quantize_mxfp4
from weft.gemm.mxfp4 import dequantize_mxfp4
from weft.launcher.launch import launch

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, VOCABULARY = (
    256,
    128,
    64,
    6,
    64,
)  # of which vLLM's CPU top-k has kernels
COUNTS = (5, 9, 1, 3)  # tokens of each rank; vLLM gives a rank without requests one token
TOLERANCE = 0.05
Block = tuple[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]  # and its formula


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


def draw(module: nn.Module) -> None:
    """Draw random parameters with values of bfloat16."""
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape) * 0.2).bfloat16().float()


def load_experts(runner: Any, gate_up: torch.Tensor, down: torch.Tensor, kind: str) -> None:
    """Load experts with vLLM's loader, and round `gate_up` and `down` in place to its values."""
    experts = runner.routed_experts
    for weights, shards in ((gate_up, ("w1", "w3")), (down, ("w2",))):
        tensors = {"_weight": weights.bfloat16()}
        if kind == "mxfp4":
            values, scales = quantize_mxfp4(weights)
            weights.copy_(dequantize_mxfp4(values, scales))
            tensors = {"_weight": values, "_weight_scale": scales.view(torch.float8_e8m0fnu)}
        elif kind == "mxfp8":
            values, scales = quantize(weights, "mxfp8")
            weights.copy_(
                (values.float().unflatten(2, (-1, 32)) * scales.float()[..., None]).flatten(2)
            )
            tensors = {"_weight": values, "_weight_scale": scales.view(torch.uint8)}
        for suffix, tensor in tensors.items():
            name = ("w2" if shards == ("w2",) else "w13") + suffix
            parameter = getattr(experts, name)
            for expert in range(len(weights)):
                for shard, part in zip(shards, tensor[expert].chunk(len(shards)), strict=True):
                    parameter.weight_loader(parameter, part, name, shard, expert)


def copy_mlp(mlp: Any, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
    """Load a shared expert."""
    mlp.gate_up_proj.weight.data.copy_(torch.cat((gate, up)))
    mlp.down_proj.weight.data.copy_(down)


def deepseek_v4(vllm: Any, layer: int, version: str = "deepseek_v4") -> Block:
    """A block of DeepSeek-V4 with MXFP4 experts: layer 0 chooses them by token id, 3 by logits.

    All layers of V4.1 choose by logits.
    """
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    model = importlib.import_module(f"vllm.models.{version}.nvidia.model")
    quantization = importlib.import_module(f"vllm.models.{version}.quant_config")
    config = DeepseekV4Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        num_hidden_layers=5,
        vocab_size=VOCABULARY,
        routed_scaling_factor=1.5,
        swiglu_limit=2.0,
    )
    theirs = modeling_deepseek_v4.DeepseekV4SparseMoeBlock(config, layer).float()
    draw(theirs)
    published = {"topk_method": "noaux_tc", "norm_topk_prob": True, "n_shared_experts": 1}
    for name, value in published.items():
        setattr(config, name, value)
    prefix = f"model.layers.{layer}.ffn"
    vllm.model_config.hf_config = config
    vllm.quant_config = quantization.DeepseekV4FP8Config(
        is_checkpoint_fp8_serialized=True,
        ignored_layers=[f"{prefix}.shared_experts.{name}_proj" for name in ("gate_up", "down")],
        weight_block_size=[128, 128],
    )
    by_token = {"num_hash_layers": 3} if version == "deepseek_v4" else {}
    block = model.DeepseekV4MoE(vllm, prefix, **by_token)
    block.gate.weight.data.copy_(theirs.gate.weight)
    if theirs.is_hash:
        table = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(VOCABULARY)])
        theirs.gate.tid2eid.copy_(table)
        block.gate.tid2eid.data.copy_(table)
    else:
        theirs.gate.e_score_correction_bias.normal_(0, 0.1)
        block.gate.e_score_correction_bias.data.copy_(theirs.gate.e_score_correction_bias)
    shared = theirs.shared_experts
    weights = (shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
    copy_mlp(block.shared_experts, *weights)
    experts = theirs.experts
    load_experts(block.experts, experts.gate_up_proj.data, experts.down_proj.data, "mxfp4")

    def run(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return theirs(x[None], *((ids[None],) if theirs.is_hash else ()))[0]

    return block, run


def minimax_m3(vllm: Any, layer: int, kind: str) -> Block:
    """A block of MiniMax-M3, in bfloat16 or with MXFP8 experts."""
    from transformers import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config

    for name in ("torchvision", "torchvision.transforms"):  # of images; CPU builds lack it
        sys.modules.setdefault(name, MagicMock())
    from vllm.models.minimax_m3.nvidia.model import MiniMaxM3MoE

    # vLLM has kernels of this activation for GPUs alone, and raises without one.
    unquantized_fused_moe_method.select_unquantized_moe_backend = lambda moe_config: (None, None)
    config = MiniMaxM3VLTextConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        shared_intermediate_size=INTERMEDIATE,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        swiglu_limit=2.0,
        routed_scaling_factor=1.5,
    )
    theirs = modeling_minimax_m3_vl.MiniMaxM3VLSparseMoeBlock(config).float()
    draw(theirs)
    published = {"use_routing_bias": True, "scoring_func": "sigmoid", "n_shared_experts": 1}
    for name, value in (published | {"hidden_act": "swigluoai", "swiglu_beta": 1.0}).items():
        setattr(config, name, value)
    prefix, quantization = f"model.layers.{layer}.mlp", None
    if kind == "mxfp8":
        ignored = [f"{prefix}.shared_experts.{name}_proj" for name in ("gate_up", "down")]
        quantization = ModelOptMxFp8Config.from_config(
            {"quant_method": "mxfp8", "ignored_layers": ignored}
        )
    block = MiniMaxM3MoE(config, layer, quantization, prefix=prefix)
    router = block.experts.router  # on CPUs it corrects sigmoid scores only in groups
    router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1
    block.gate.weight.data.copy_(theirs.gate.weight)
    theirs.gate.e_score_correction_bias.normal_(0, 0.1)
    block.e_score_correction_bias.data.copy_(theirs.gate.e_score_correction_bias)
    shared = theirs.shared_experts
    gate, up = shared.gate_up_proj.weight.chunk(2)
    copy_mlp(block.shared_experts, gate, up, shared.down_proj.weight)
    experts = theirs.experts
    load_experts(block.experts, experts.gate_up_proj.data, experts.down_proj.data, kind)
    return block, lambda x, ids: theirs(x[None])[0]


def kimi_k3(vllm: Any, layer: int) -> Block:
    """A block of Kimi-K3 with MXFP4 experts; transformers has none, so vLLM's parts are used."""
    from vllm.model_executor.layers.activation import SituAndMul
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
    from vllm.models.kimi_k3.nvidia.model import KimiMoE
    from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig

    latent = 128
    config = KimiLinearConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        num_experts_per_token=TOP_K,
        routed_scaling_factor=1.5,
        num_shared_experts=1,
        routed_expert_hidden_size=latent,
        latent_moe_use_norm=True,
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
    )
    torch.cuda.Event = SimpleNamespace  # two that overlap GEMMs on a GPU
    block = KimiMoE(config, vllm, Mxfp4Config(), f"model.layers.{layer}.mlp", layer)
    for name, parameter in block.named_parameters():
        if "routed_experts" not in name and "norm" not in name:
            parameter.data.normal_(0, 0.2)
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, latent).float()
    down = torch.randn(EXPERTS, latent, INTERMEDIATE).float() * 0.2
    load_experts(block.experts, gate_up, down, "mxfp4")
    activation = SituAndMul(4.0, 25.0).forward_native
    gate, bias = block.gate.weight.data.clone(), block.gate.e_score_correction_bias

    def run(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16()
        scores = torch.sigmoid(nn.functional.linear(x, gate).float())
        chosen = (scores + bias).topk(TOP_K).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True) * config.routed_scaling_factor
        narrow = block.routed_expert_down_proj(x)[0].float()
        sums = torch.zeros_like(narrow)
        for row, (experts, factors) in enumerate(zip(chosen, weights, strict=True)):
            for expert, factor in zip(experts, factors, strict=True):
                sums[row] += factor * (down[expert] @ activation(gate_up[expert] @ narrow[row]))
        routed = block.routed_output_transform(sums.bfloat16())
        return (routed + block.shared_experts(x)).float()

    return block, run


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
        x, ids = torch.randn(count, HIDDEN).bfloat16(), torch.randint(VOCABULARY, (count,))
        by_token = (ids,) if name.startswith("deepseek") else ()
        with torch.no_grad(), set_forward_context(None, config, count, counts):
            out = block(x.clone(), *by_token).float()
            expected = formula(x.float(), ids) if count else out
        errors[name] = float((out - expected).norm() / expected.norm()) if count else 0.0
        engine.close()
    return errors


def main() -> int:
    """Compare the blocks for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--names", nargs="*", default=[*BLOCKS], choices=BLOCKS)
    args = parser.parse_args()
    os.environ |= {"WEFT_VLLM": "block", "TORCHDYNAMO_DISABLE": "1", "VLLM_TARGET_DEVICE": "cpu"}
    worst = 0.0
    for ranks in args.ranks:
        results = launch(compare, args.names, ranks=ranks)
        for name in args.names:
            error = max(result[name] for result in results)
            print(f"{name}, {ranks} ranks: relative error {error:.3f}", flush=True)
            worst = max(worst, error)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
