# SPDX-License-Identifier: Apache-2.0
"""Compare MoE blocks that SGLang builds and weft runs with their published formulas, on CPU ranks.

SGLang has no CPU attention for these models, so no server runs: each rank builds the blocks alone,
loads random experts through SGLang's loaders, and passes its tokens to them. The exit status is 1
if a block's relative error is above 5 %; rounding rows to FP8 takes 3 %.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from job import OUT, describe_machine, free_port
from torch import nn

import weft
from weft.cli.demo import CHECKPOINT
from weft.gemm import quantize_mxfp4
from weft.gemm.mxfp4 import dequantize_mxfp4
from weft.launcher.launch import launch

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, VOCABULARY = 256, 128, 16, 4, 64
SIGMOID: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
COUNTS = (5, 9, 0, 3)  # tokens of each rank
TOLERANCE = 0.05
Block = tuple[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]  # and its formula


def set_up(group: weft.Group, port: int, folder: str) -> Any:
    """Start SGLang's process groups with weft's plug-in, as a server's scheduler does."""
    from sglang.srt import runtime_context
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.server_args import ServerArgs

    rank, size = group.rank, group.size
    flags = ServerArgs(
        model_path=folder,
        device="cpu",
        dtype="bfloat16",
        tp_size=size,
        attn_dp_size=size,
        moe_a2a_backend="weft",
        moe_runner_backend="triton",
        attention_backend="torch_native",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
    )
    ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=0)
    runtime_context.publish(flags, role="scheduler", ranks=ranks)
    init_distributed_environment(
        backend="gloo",
        world_size=size,
        rank=rank,
        local_rank=0,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
        timeout=60,
        moe_a2a_backend="weft",
        recovered_rank=False,
    )
    initialize_model_parallel()
    initialize_dp_attention(server_args=flags)
    initialize_moe_config()
    replace_gpu_kernels()
    return flags


def replace_gpu_kernels() -> None:
    """Replace kernels of shared experts that SGLang has for GPUs alone by plain torch."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.models import deepseek_v2

    def clamp(gate_up: torch.Tensor, out: torch.Tensor, limit: float) -> None:
        gate, up = gate_up.float().chunk(2, -1)
        out.copy_(nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit))

    def swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(gate_up.dtype)

    deepseek_v2.silu_and_mul_clamp = clamp
    fused_moe.swiglu_no_interleaved_with_alpha_and_limit = swiglu


def draw(module: nn.Module) -> None:
    """Draw random parameters with values of bfloat16."""
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape) * 0.2).bfloat16().float()


def load_experts(fused: Any, gate_up: torch.Tensor, down: torch.Tensor, kind: str) -> None:
    """Load experts with SGLang's loader, and round `gate_up` and `down` in place to its values."""
    scale_name = "_weight_scale" + "_inv" * hasattr(fused, "w13_weight_scale_inv")
    for weights, shards in ((gate_up, ("w1", "w3")), (down, ("w2",))):
        tensors = {"_weight": weights.bfloat16()}
        if kind == "mxfp4":
            values, scales = quantize_mxfp4(weights)
            weights.copy_(dequantize_mxfp4(values, scales))
            tensors = {"_weight": values.view(torch.int8)}
            tensors[scale_name] = scales.view(torch.float8_e8m0fnu)
        for suffix, tensor in tensors.items():
            name = ("w2" if shards == ("w2",) else "w13") + suffix
            parameter = getattr(fused, name)
            if parameter.dtype == torch.uint8:
                tensor = tensor.view(torch.uint8)
            for expert in range(len(weights)):
                for shard, part in zip(shards, tensor[expert].chunk(len(shards)), strict=True):
                    parameter.weight_loader(
                        parameter, part.contiguous(), name, shard_id=shard, expert_id=expert
                    )


def copy_mlp(mlp: Any, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
    """Load a shared expert."""
    mlp.gate_up_proj.weight.data.copy_(torch.cat((gate, up)))
    mlp.down_proj.weight.data.copy_(down)


def deepseek_v4(layer: int) -> Block:
    """A block of DeepSeek-V4 with MXFP4 experts: layer 0 chooses them by token id, 3 by logits."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    config = DeepseekV4Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        num_hidden_layers=4,
        vocab_size=VOCABULARY,
        routed_scaling_factor=1.5,
        swiglu_limit=2.0,
    )
    published = {"num_hash_layers": 3, "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1}
    for name, value in (published | {"norm_topk_prob": True, "n_shared_experts": 1}).items():
        setattr(config, name, value)
    theirs = modeling_deepseek_v4.DeepseekV4SparseMoeBlock(config, layer).float()
    draw(theirs)
    quantization = Fp8Config(True, "dynamic", ["shared_experts"], [128, 128], is_fp4_experts=True)
    with bfloat16_by_default():
        block = DeepseekV2MoE(
            config=config,
            layer_id=layer,
            quant_config=quantization,
            prefix=f"model.layers.{layer}.mlp",
            is_deepseek_v4=True,
        )
    block.gate.weight.data.copy_(theirs.gate.weight)
    if theirs.is_hash:
        table = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(VOCABULARY)])
        theirs.gate.tid2eid.copy_(table)
        block.topk.tid2eid.data.copy_(table)
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


def minimax_m3(layer: int) -> Block:
    """A block of MiniMax-M3 in bfloat16."""
    from sglang.srt.models.minimax_m3 import MiniMaxM3MoE
    from transformers import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl

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
    for name, value in (published | {"hidden_act": "swigluoai"}).items():
        setattr(config, name, value)
    with bfloat16_by_default():
        block = MiniMaxM3MoE(config, layer, prefix=f"model.layers.{layer}.mlp")
    block.gate.weight.data.copy_(theirs.gate.weight)
    theirs.gate.e_score_correction_bias.normal_(0, 0.1)
    block.e_score_correction_bias.data.copy_(theirs.gate.e_score_correction_bias)
    shared = theirs.shared_experts
    gate, up = shared.gate_up_proj.weight.chunk(2)
    copy_mlp(block.shared_experts, gate, up, shared.down_proj.weight)
    experts = theirs.experts
    load_experts(block.experts, experts.gate_up_proj.data, experts.down_proj.data, "bfloat16")
    return block, lambda x, ids: theirs(x[None])[0]


def glm4_moe_lite(layer: int) -> Block:
    """A block of GLM-4.7-Flash in bfloat16."""
    from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteSparseMoeBlock
    from transformers import Glm4MoeLiteConfig
    from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteMoE

    config = Glm4MoeLiteConfig(**SIGMOID, n_shared_experts=1, norm_topk_prob=True)
    theirs = Glm4MoeLiteMoE(config).float()
    with bfloat16_by_default():
        block = Glm4MoeLiteSparseMoeBlock(config, layer, prefix=f"model.layers.{layer}.mlp")
    copy_block(block, theirs)
    return block, lambda x, ids: theirs(x[None])[0]


def mimo_v2(layer: int) -> Block:
    """A block of MiMo-V2 in bfloat16, without a shared expert."""
    from sglang.srt.models.mimo_v2 import MiMoV2MoE
    from transformers import MiMoV2FlashConfig
    from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashMoE

    config = MiMoV2FlashConfig(**SIGMOID | {"routed_scaling_factor": 1.0})
    published = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
    for name, value in published.items():
        setattr(config, name, value)
    theirs = MiMoV2FlashMoE(config).float()
    with bfloat16_by_default():
        block = MiMoV2MoE(config, layer, prefix=f"model.layers.{layer}.mlp")
    copy_block(block, theirs)
    return block, lambda x, ids: theirs(x[None])[0]


def copy_block(block: Any, theirs: Any) -> None:
    """Draw transformers' block and load it, with bfloat16 experts."""
    draw(theirs)
    theirs.gate.e_score_correction_bias.normal_(0, 0.1)
    block.gate.weight.data.copy_(theirs.gate.weight)
    block.gate.e_score_correction_bias.data.copy_(theirs.gate.e_score_correction_bias)
    if hasattr(theirs, "shared_experts"):
        shared = theirs.shared_experts
        weights = (shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
        copy_mlp(block.shared_experts, *weights)
    experts = theirs.experts
    load_experts(block.experts, experts.gate_up_proj.data, experts.down_proj.data, "bfloat16")


def kimi_k3(layer: int) -> Block:
    """A block of Kimi-K3 with MXFP4 experts; transformers has none, so SGLang's parts are used."""
    from sglang.srt.layers.activation import SituAndMul
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
    from sglang.srt.models.kimi_k3 import KimiK3MoE

    latent = 128
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        n_routed_experts=EXPERTS,
        num_experts_per_token=TOP_K,
        moe_renormalize=True,
        routed_scaling_factor=1.5,
        num_shared_experts=1,
        routed_expert_hidden_size=latent,
        latent_moe_use_norm=True,
        rms_norm_eps=1e-5,
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        num_expert_group=1,
        topk_group=1,
        moe_router_activation_func="sigmoid",
        topk_method="noaux_tc",
        model_type="kimi_linear",
    )
    with bfloat16_by_default():
        quantization = Mxfp4Config(
            ignored_layers=["shared_experts"], is_checkpoint_mxfp4_serialized=True
        )
        quantization.quant_format = "mxfp4-pack-quantized"
        block = KimiK3MoE(config, quantization, f"model.layers.{layer}.mlp", layer)
    for parameter in (*block.gate.parameters(), *block.shared_experts.parameters()):
        parameter.data.normal_(0, 0.2)
    for module in (block.routed_expert_down_proj, block.routed_expert_up_proj):
        module.weight.data.normal_(0, 0.2)
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, latent)
    down = torch.randn(EXPERTS, latent, INTERMEDIATE) * 0.2
    load_experts(block.experts, gate_up, down, "mxfp4")
    activation = SituAndMul(4.0, 25.0).forward_native

    def run(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16()
        scores = torch.sigmoid(nn.functional.linear(x, block.gate.weight).float())
        chosen = (scores + block.gate.e_score_correction_bias).topk(TOP_K).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True) * config.routed_scaling_factor
        narrow = block.routed_expert_down_proj(x)[0].float()
        sums = torch.zeros_like(narrow)
        for row, (experts, factors) in enumerate(zip(chosen, weights, strict=True)):
            for expert, factor in zip(experts, factors, strict=True):
                sums[row] += factor * (down[expert] @ activation(gate_up[expert] @ narrow[row]))
        routed = block.routed_expert_up_proj(block.routed_expert_norm(sums.bfloat16()))[0]
        return (routed + block.shared_experts(x)).float()

    return block, run


def bfloat16_by_default() -> Any:
    """Return a context in which SGLang builds layers in bfloat16."""
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    return set_default_torch_dtype(torch.bfloat16)


BLOCKS: dict[str, Callable[[], Block]] = {
    "deepseek_v4, by token id": lambda: deepseek_v4(0),
    "deepseek_v4, by logits": lambda: deepseek_v4(3),
    "glm4_moe_lite": lambda: glm4_moe_lite(6),
    "mimo_v2": lambda: mimo_v2(7),
    "minimax_m3": lambda: minimax_m3(4),
    "kimi_k3": lambda: kimi_k3(5),
}


def compare(group: weft.Group, port: int, folder: str, names: list[str]) -> dict[str, float]:
    """Return each block's relative error on this rank's tokens."""
    flags, errors = set_up(group, port, folder), {}
    from sglang.srt.layers import dp_attention

    from weft.plugins.sglang import engine

    for name in names:
        torch.manual_seed(0)  # every rank draws the same model
        block, formula = BLOCKS[name]()
        model = nn.ModuleList([block])
        engine.after_load_model(
            None, SimpleNamespace(model=model, server_args=flags, device="cpu", gpu_id=0)
        )
        torch.manual_seed(1 + group.rank)
        # Kimi-K3's top-k takes no empty batch on CPUs.
        counts = [max(count, int(name == "kimi_k3")) for count in COUNTS[: group.size]]
        dp_attention._DpGatheredBufferWrapper._global_num_tokens = counts
        count = counts[group.rank]
        x, ids = torch.randn(count, HIDDEN).bfloat16(), torch.randint(VOCABULARY, (count,))
        by_token = {"input_ids": ids, "input_ids_global": ids} if hasattr(block, "is_hash") else {}
        batch = () if name == "kimi_k3" else (SimpleNamespace(),)
        with torch.no_grad():
            out = block(x.clone(), *batch, **by_token).float()
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
    os.environ |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_PLUGINS": "weft",
        "TORCHDYNAMO_DISABLE": "1",
    }
    for kernel in ("FUSED_HASH_TOPK", "BF16_ROUTER_GEMM"):  # SGLang has them for GPUs alone
        os.environ[f"SGLANG_OPT_USE_{kernel}"] = "0"
    worst = 0.0
    for ranks in args.ranks:
        results = launch(
            compare, free_port(), str(CHECKPOINT), args.names, ranks=ranks, timeout=600.0
        )
        for name in args.names:
            error = max(result[name] for result in results)
            line = {"bench": args.what, "block": name, "ranks": ranks, "relative_error": error}
            line |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
            with open(OUT / "results.jsonl", "a") as file:
                file.write(json.dumps(line | {"machine": describe_machine([])}) + "\n")
            print(f"{name}, {ranks} ranks: relative error {error:.3f}", flush=True)
            worst = max(worst, error)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
