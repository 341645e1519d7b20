# SPDX-License-Identifier: Apache-2.0
"""Compare MoE blocks that vLLM builds and weft runs with their published formulas.

No server runs: each rank builds the blocks alone, loads random experts through vLLM's loaders, and
passes its tokens to them. CPU ranks run small blocks, because vLLM has no CPU attention for these
models. With --device cuda, --gpus run blocks of the published size, also by vLLM's own kernels,
and --calls measures them in CUDA graphs. The exit status is 1 if a block's relative error is above
5 %; rounding rows to FP8 takes 3 to 4.5 %.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import moe_blocks
import torch
from moe_blocks import BETA, LINEAR_BETA, SCALE, Block, Formula, Shape, Task

import weft

SMALL = Shape(experts=64, top_k=6)  # numbers that vLLM's top-k on CPUs has kernels of
COUNTS = (5, 9, 1, 3)  # tokens of each rank; vLLM gives a rank without requests one token
DECODE, PREFILL = 256, 4096  # most tokens of a graph and of a batch, on a GPU
VARIANTS = {
    "weft": "weft's block",
    "auto": "vLLM's choice",
    "triton": "Triton, for bfloat16 experts",
    "marlin": "MXFP4 experts: W4A16",
    "humming": "MXFP4 experts: Humming",
    "triton_unfused": "MXFP4 experts: Triton",
}
LAYOUTS = {
    "-ep": "of several GPUs, each with all tokens and whole experts instead of TP",
    "-dp": "of several GPUs, each with tokens of its own, which vLLM gathers, and whole experts",
}


def set_up(group: weft.Group, device: str = "cpu", layout: str = "dp") -> Any:
    """Start vLLM's process groups with weft's plug-in, as a worker does; return a VllmConfig."""
    group.process_group()  # vLLM keeps torch's default group
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    os.environ["RANK"] = str(group.rank)
    ranks = "data_parallel_size" if layout == "dp" else "tensor_parallel_size"
    config = VllmConfig(
        parallel_config=ParallelConfig(
            enable_expert_parallel=group.size > 1 and layout != "tp",
            distributed_executor_backend="external_launcher",
            **{ranks: group.size},
        )
    )
    with set_current_vllm_config(config):
        backend = "gloo" if device == "cpu" else "nccl"
        init_distributed_environment(group.size, group.rank, "env://", group.rank, backend)
        initialize_model_parallel(config.parallel_config.tensor_parallel_size)
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16,
        enforce_eager=True,
        enable_sleep_mode=False,
        hf_config=None,
        quantization_config=None,
    )
    if device == "cuda":
        config.compilation_config.max_cudagraph_capture_size = DECODE
        config.scheduler_config.max_num_batched_tokens = PREFILL
        # Nothing is compiled here, so the layers need vLLM's own kernels of small operations.
        config.compilation_config.custom_ops = ["all"]
    return config


def deepseek_v4(
    layer: int, vllm: Any, shape: Shape, root: str, version: str = "deepseek_v4"
) -> Block:
    """A block of DeepSeek-V4 with MXFP4 experts. All layers of V4.1 choose experts by logits."""
    model = importlib.import_module(f"vllm.models.{version}.nvidia.model")
    quantization = importlib.import_module(f"vllm.models.{version}.quant_config")
    config, theirs = moe_blocks.deepseek_v4(layer, shape)
    prefix = f"{root}.layers.{layer}.ffn"
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


def minimax_m3(layer: int, kind: str, vllm: Any, shape: Shape, root: str) -> Block:
    """A block of MiniMax-M3, in bfloat16 or with MXFP8 experts."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config

    for name in ("torchvision", "torchvision.transforms"):  # of images; CPU builds lack it
        sys.modules.setdefault(name, MagicMock())
    from vllm.models.minimax_m3.nvidia.model import MiniMaxM3MoE

    if not torch.cuda.is_available():
        # vLLM has kernels of this activation for GPUs alone, and raises without one.
        unquantized_fused_moe_method.select_unquantized_moe_backend = _no_backend
    config, theirs = moe_blocks.minimax_m3(shape)
    prefix, quantization = f"{root}.layers.{layer}.mlp", None
    if kind == "mxfp8":
        ignored = [f"{prefix}.shared_experts.{name}_proj" for name in ("gate_up", "down")]
        quantization = ModelOptMxFp8Config.from_config(
            {"quant_method": "mxfp8", "ignored_layers": ignored}
        )
    block = MiniMaxM3MoE(config, layer, quantization, prefix=prefix)
    if not torch.cuda.is_available():
        router = block.experts.router  # on CPUs it corrects sigmoid scores only in groups
        router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1
    bias, layer_of_experts = block.e_score_correction_bias, block.experts.routed_experts
    return block, moe_blocks.load_block(block, theirs, layer_of_experts, kind, bias)


def _no_backend(moe_config: Any) -> tuple[None, None]:
    return None, None


def qwen3_moe(layer: int, vllm: Any, shape: Shape, root: str) -> Block:
    """A block of Qwen3-MoE in bfloat16."""
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock

    config, theirs = moe_blocks.qwen3_moe(shape)
    vllm.model_config.hf_text_config, vllm.quant_config = config, None
    block = Qwen3MoeSparseMoeBlock(vllm, prefix=f"{root}.layers.{layer}.mlp")
    experts = block.experts.routed_experts
    return block, moe_blocks.load_block(block, theirs, experts, "bfloat16", None)


def glm4_moe(layer: int, vllm: Any, shape: Shape, root: str) -> Block:
    """A block of GLM-4.5 in bfloat16."""
    from vllm.model_executor.models.glm4_moe import Glm4MoE

    config, theirs = moe_blocks.glm4_moe(shape)
    block = Glm4MoE(config, prefix=f"{root}.layers.{layer}.mlp")
    bias, experts = block.gate.e_score_correction_bias, block.experts.routed_experts
    return block, moe_blocks.load_block(block, theirs, experts, "bfloat16", bias)


def nemotron_h(layer: int, vllm: Any, shape: Shape, root: str, *, latent: bool = False) -> Block:
    """A block of Nemotron-3 in bfloat16."""
    from vllm.model_executor.layers.fused_moe import config as moe_config
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.models.nemotron_h import NemotronHMoE

    platform = moe_config.current_platform
    if not torch.cuda.is_available():
        # vLLM has kernels of experts without a gate for GPUs alone, and raises on CPUs.
        unquantized_fused_moe_method.select_unquantized_moe_backend = _no_backend
        platform = MagicMock(wraps=platform)
        platform.is_cuda_alike.return_value = True
    config, theirs = moe_blocks.nemotron_h(shape, latent=latent)
    prefix = f"{root}.layers.{layer}.mixer"
    with patch.object(moe_config, "current_platform", platform):
        block = NemotronHMoE(config, parallel_config=vllm.parallel_config, prefix=prefix)
    bias, layer_of_experts = block.gate.e_score_correction_bias, block.experts.routed_experts
    return block, moe_blocks.load_block(block, theirs, layer_of_experts, "bfloat16", bias)


def kimi_k3(layer: int, vllm: Any, shape: Shape, root: str) -> Block:
    """A block of Kimi-K3 with MXFP4 experts."""
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
    from vllm.models.kimi_k3.nvidia.model import KimiMoE
    from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig

    config = KimiLinearConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_token=shape.top_k,
        routed_scaling_factor=SCALE,
        num_shared_experts=1,
        routed_expert_hidden_size=shape.latent,
        latent_moe_use_norm=True,
        hidden_act="situ",
        activation_situ_beta=BETA,
        activation_situ_linear_beta=LINEAR_BETA,
    )
    if not torch.cuda.is_available():
        torch.cuda.Event = SimpleNamespace  # two that overlap GEMMs on a GPU
    block = KimiMoE(config, vllm, Mxfp4Config(), f"{root}.layers.{layer}.mlp", layer)
    torch.manual_seed(0)
    for name, parameter in block.named_parameters():
        if "routed_experts" not in name and "norm" not in name:
            if parameter.dim() == 2:
                moe_blocks.fill_matrices([parameter])
            else:
                parameter.data.normal_(0, 0.1)
    layer_of_experts, restore = block.experts.routed_experts, block.routed_output_transform
    return block, moe_blocks.kimi_k3(block, layer_of_experts, shape, restore)


def gpt_oss(layer: int, kind: str, vllm: Any, shape: Shape, root: str) -> Block:
    """A block of GPT-OSS in bfloat16 or MXFP4."""
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM, GptOssModel, MLPBlock

    config, formula, checkpoint = moe_blocks.gpt_oss(shape, kind)
    vllm.model_config.hf_config, vllm.quant_config = config, None
    if kind == "mxfp4":
        vllm.quant_config = GptOssMxfp4Config()
        config.quantization_config = {"quant_method": "mxfp4"}
    block = MLPBlock(vllm, layer, f"{root}.layers.{layer}.mlp")
    weights = GptOssForCausalLM.hf_to_vllm_mapper.apply(checkpoint.items())
    fields = {"config": config, "parallel_config": vllm.parallel_config}
    moe_blocks.load_gpt_oss(GptOssModel, block, weights, **fields)
    return block, formula


# Each takes a VllmConfig, a shape, and the root of the layers' names, which differ in a process.
BLOCKS: dict[str, Callable[..., Block]] = {
    "deepseek_v4, by token id": functools.partial(deepseek_v4, 0),
    "deepseek_v4, by logits": functools.partial(deepseek_v4, 3),
    "deepseek_v41": functools.partial(deepseek_v4, 4, version="deepseek_v41"),
    "minimax_m3": functools.partial(minimax_m3, 5, "bfloat16"),
    "minimax_m3, mxfp8": functools.partial(minimax_m3, 7, "mxfp8"),
    "kimi_k3": functools.partial(kimi_k3, 6),
    "qwen3_moe": functools.partial(qwen3_moe, 8),
    "glm4_moe": functools.partial(glm4_moe, 9),
    "nemotron_h": functools.partial(nemotron_h, 10),
    "nemotron_h, latent": functools.partial(nemotron_h, 11, latent=True),
    "gpt_oss": functools.partial(gpt_oss, 12, "bfloat16"),
    "gpt_oss, mxfp4": functools.partial(gpt_oss, 13, "mxfp4"),
}


def compare(group: weft.Group, names: list[str]) -> dict[str, float]:
    """Return each block's relative error on this CPU rank's tokens."""
    config, errors = set_up(group), {}
    from vllm.forward_context import set_forward_context

    from weft.plugins.vllm import engine

    counts = torch.tensor(COUNTS[: group.size])
    for name in names:
        torch.manual_seed(0)  # every rank draws the same model
        block, formula = build_block(name, config, SMALL, "model")
        torch.manual_seed(1 + group.rank)
        count = int(counts[group.rank])
        run = functools.partial(run_block, block, name.startswith("deepseek"))
        with set_forward_context(None, config, count, counts):
            errors[name] = moe_blocks.compare_block(run, formula, count, SMALL)
        engine.close()
    return errors


def compare_on_gpu(group: weft.Group, task: Task) -> bool:
    """Return whether all blocks are right on this rank's GPU."""
    from vllm.distributed import parallel_state
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.workspace import init_workspace_manager

    create = functools.partial(set_up, group, "cuda")
    layouts = moe_blocks.Layouts(group, parallel_state, create)
    layouts.activate("weft")  # loads weft's plug-in
    from weft.plugins.vllm import engine

    init_workspace_manager(group.device)

    def build(name: str, variant: str, shape: Shape) -> tuple[Callable[..., Any], Formula]:
        """Build a block as vLLM's loader does, and return its forward function and formula."""
        config, kernels = layouts.activate(variant), moe_blocks.split_variant(variant)[0]
        with use_backend(kernels, config):
            block, formula = build_block(name, config, shape, variant, "cuda")

        def run(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            config = layouts.activate(variant)
            size = config.parallel_config.data_parallel_size
            counts = torch.full((size,), len(x)) if size > 1 else None
            with set_forward_context(None, config, len(x), counts):
                return run_block(block, name.startswith("deepseek"), x, ids)

        return run, formula

    @contextlib.contextmanager
    def capture(variant: str) -> Iterator[None]:
        layouts.activate(variant)
        communicator = parallel_state.get_tp_group().device_communicator  # None for one rank
        moe_blocks.check_all_reduce(variant, getattr(communicator, "ca_comm", None))
        with parallel_state.graph_capture(group.device):
            yield

    return moe_blocks.on_gpu(group, task, build, capture, engine.close)


def build_block(name: str, config: Any, shape: Shape, root: str, device: str = "cpu") -> Block:
    """Build a block and process its weights, as vLLM's loader does."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        with torch.device(device):
            block, formula = BLOCKS[name](config, shape, root)
        for module in block.modules():
            if isinstance(getattr(module, "quant_method", None), QuantizeMethodBase):
                module.quant_method.process_weights_after_loading(module)
    return block, formula


@contextlib.contextmanager
def use_backend(variant: str, config: Any) -> Iterator[None]:
    """Select a variant's kernels for layers that are built in this context."""
    from vllm.model_executor.custom_op import op_registry_oot

    replaced = dict(op_registry_oot)  # by weft's layers
    if variant != "weft":
        op_registry_oot.clear()
        config.kernel_config.moe_backend = variant
    try:
        yield
    finally:
        op_registry_oot.update(replaced)
        config.kernel_config.moe_backend = "auto"


def run_block(block: Any, by_token: bool, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Call a block as its model does."""
    out: torch.Tensor = block(x, ids) if by_token else block(x)
    return out


def main() -> int:
    """Compare the blocks on CPU ranks or GPUs."""
    os.environ["WEFT_VLLM"] = "block"
    return moe_blocks.main(
        str(__doc__), BLOCKS, compare, compare_on_gpu, VARIANTS, LAYOUTS, VLLM_TARGET_DEVICE="cpu"
    )


if __name__ == "__main__":
    sys.exit(main())
