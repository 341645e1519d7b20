# SPDX-License-Identifier: Apache-2.0
"""Compare MoE blocks that SGLang builds and weft runs with their published formulas, on CPU ranks.

SGLang has no CPU attention for these models, so no server runs: each rank builds the blocks alone,
loads random experts through SGLang's loaders, and passes its tokens to them. The exit status is 1
if a block's relative error is above 5 %; rounding rows to FP8 takes 3 %.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import moe_blocks
import torch
from job import free_port
from moe_blocks import BETA, HIDDEN, INTERMEDIATE, LATENT, LINEAR_BETA, SCALE, Block, set_fields
from torch import nn

import weft
from weft.cli.demo import CHECKPOINT

EXPERTS, TOP_K = 16, 4
SIGMOID: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": SCALE,
}
COUNTS = (5, 9, 0, 3)  # tokens of each rank


def set_up(group: weft.Group) -> Any:
    """Start SGLang's process groups with weft's plug-in, as a server's scheduler does."""
    from sglang.srt import runtime_context
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.server_args import ServerArgs

    rank, size = group.rank, group.size
    port = group.all_gather(free_port())[0]
    flags = ServerArgs(
        model_path=str(CHECKPOINT),
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


def deepseek_v4(layer: int) -> Block:
    """A block of DeepSeek-V4 with MXFP4 experts."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    config, theirs = moe_blocks.deepseek_v4(layer, EXPERTS, TOP_K)
    set_fields(config, num_hash_layers=3, n_group=1, topk_group=1)
    quantization = Fp8Config(True, "dynamic", ["shared_experts"], [128, 128], is_fp4_experts=True)
    with bfloat16_by_default():
        block = DeepseekV2MoE(
            config=config,
            layer_id=layer,
            quant_config=quantization,
            prefix=f"model.layers.{layer}.mlp",
            is_deepseek_v4=True,
        )
    bias = block.gate.e_score_correction_bias
    formula = moe_blocks.load_block(block, theirs, block.experts, "mxfp4", bias)
    if theirs.is_hash:
        block.topk.tid2eid.data.copy_(theirs.gate.tid2eid)
    return block, formula


def minimax_m3(layer: int) -> Block:
    """A block of MiniMax-M3 in bfloat16."""
    from sglang.srt.models.minimax_m3 import MiniMaxM3MoE

    config, theirs = moe_blocks.minimax_m3(EXPERTS, TOP_K)
    with bfloat16_by_default():
        block = MiniMaxM3MoE(config, layer, prefix=f"model.layers.{layer}.mlp")
    bias = block.e_score_correction_bias
    return block, moe_blocks.load_block(block, theirs, block.experts, "bfloat16", bias)


def glm4_moe_lite(layer: int) -> Block:
    """A block of GLM-4.7-Flash in bfloat16."""
    from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteSparseMoeBlock
    from transformers import Glm4MoeLiteConfig
    from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteMoE

    config = Glm4MoeLiteConfig(**SIGMOID, n_shared_experts=1, norm_topk_prob=True)
    with bfloat16_by_default():
        block = Glm4MoeLiteSparseMoeBlock(config, layer, prefix=f"model.layers.{layer}.mlp")
    theirs, bias = Glm4MoeLiteMoE(config).float(), block.gate.e_score_correction_bias
    return block, moe_blocks.load_block(block, theirs, block.experts, "bfloat16", bias)


def mimo_v2(layer: int) -> Block:
    """A block of MiMo-V2 in bfloat16, without a shared expert."""
    from sglang.srt.models.mimo_v2 import MiMoV2MoE
    from transformers import MiMoV2FlashConfig
    from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashMoE

    config = MiMoV2FlashConfig(**SIGMOID | {"routed_scaling_factor": 1.0})
    set_fields(config, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True)
    with bfloat16_by_default():
        block = MiMoV2MoE(config, layer, prefix=f"model.layers.{layer}.mlp")
    theirs, bias = MiMoV2FlashMoE(config).float(), block.gate.e_score_correction_bias
    return block, moe_blocks.load_block(block, theirs, block.experts, "bfloat16", bias)


def kimi_k3(layer: int) -> Block:
    """A block of Kimi-K3 with MXFP4 experts."""
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
    from sglang.srt.models.kimi_k3 import KimiK3MoE

    config = SimpleNamespace(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        n_routed_experts=EXPERTS,
        num_experts_per_token=TOP_K,
        moe_renormalize=True,
        routed_scaling_factor=SCALE,
        num_shared_experts=1,
        routed_expert_hidden_size=LATENT,
        latent_moe_use_norm=True,
        rms_norm_eps=1e-5,
        hidden_act="situ",
        activation_situ_beta=BETA,
        activation_situ_linear_beta=LINEAR_BETA,
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

    def restore(sums: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = block.routed_expert_up_proj(block.routed_expert_norm(sums))[0]
        return out

    return block, moe_blocks.kimi_k3(block, block.experts, TOP_K, restore)


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


def compare(group: weft.Group, names: list[str]) -> dict[str, float]:
    """Return each block's relative error on this rank's tokens."""
    flags, errors = set_up(group), {}
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
        run = functools.partial(run_block, block, name)
        errors[name] = moe_blocks.compare_block(run, formula, counts[group.rank])
        engine.close()
    return errors


def run_block(block: Any, name: str, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Call a block as its model does."""
    by_token = {"input_ids": ids, "input_ids_global": ids} if hasattr(block, "is_hash") else {}
    batch = () if name == "kimi_k3" else (SimpleNamespace(),)
    out: torch.Tensor = block(x, *batch, **by_token)
    return out


def main() -> int:
    """Compare the blocks for each number of ranks."""
    # SGLang has fused routers for GPUs alone.
    kernels = ("FUSED_HASH_TOPK", "BF16_ROUTER_GEMM")
    environment = {f"SGLANG_OPT_USE_{kernel}": "0" for kernel in kernels}
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "weft"}
    return moe_blocks.main(str(__doc__), BLOCKS, compare, **environment)


if __name__ == "__main__":
    sys.exit(main())
