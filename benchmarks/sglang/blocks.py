# SPDX-License-Identifier: Apache-2.0
"""Compare MoE blocks that SGLang builds and weft runs with their published formulas.

No server runs: each rank builds the blocks alone, loads random experts through SGLang's loaders,
and passes its tokens to them. CPU ranks run small blocks, because SGLang has no CPU attention for
these models. With --device cuda, --gpus run blocks of the published size, also by SGLang's own
kernels, and --calls measures them in CUDA graphs. The exit status is 1 if a block's relative error
is above 5 %; rounding rows to FP8 takes 3 to 4.5 %.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import moe_blocks
import torch
from job import free_port
from moe_blocks import BETA, LINEAR_BETA, SCALE, Block, Formula, Shape, Task, set_fields
from torch import nn

import weft
from weft.cli.demo import CHECKPOINT

SMALL = Shape()
CALLERS = ("kimi_k3", "nemotron_h")  # blocks whose forward stays SGLang's
COUNTS = (5, 9, 0, 3)  # tokens of each rank
DECODE, PREFILL = 256, 4096  # most tokens of a graph and of a prefill chunk, on a GPU
VARIANTS = {
    "weft": "weft's block",
    "auto": "SGLang's choice for bfloat16 experts, Triton",
    "marlin": "MXFP4 experts: W4A16",
    "flashinfer_mxfp4": "MXFP4 experts: FlashInfer's CUTLASS, SGLang's choice for DeepSeek-V4",
    "humming": "MXFP4 experts: Humming",
    "triton_kernel": "MXFP4 experts: triton_kernels, SGLang's choice for GPT-OSS",
    "fp8_triton": "MXFP4 experts as FP8: SGLANG_DSV4_FP4_DEQUANT=1",
    "fp8_deep_gemm": "the same with DeepGEMM",
    "dispatcher": "MXFP4 experts as FP8: weft moves tokens, SGLang's Triton runs the experts",
}
LAYOUTS = {"-ep": "of several GPUs, each with all tokens and whole experts instead of TP"}


def set_up(group: weft.Group, device: str = "cpu", layout: str = "dp") -> Any:
    """Start SGLang's process groups with weft's plug-in, as a server's scheduler does.

    Returns SGLang's context, in which they are used. "dp" is weft's layout.
    """
    from sglang.srt import runtime_context
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.server_args import ServerArgs

    rank, size = group.rank, group.size
    port = group.all_gather(free_port())[0]
    sizes: dict[str, Any] = {"disable_cuda_graph": True, "attention_backend": "torch_native"}
    if device == "cuda":
        sizes = {"cuda_graph_max_bs_decode": DECODE, "chunked_prefill_size": PREFILL}
        sizes |= {"attention_backend": "triton", "sampling_backend": "pytorch"}
    gpu = rank if device == "cuda" else 0
    if layout == "dp":
        sizes |= {"attn_dp_size": size, "moe_a2a_backend": "weft"}
    else:
        sizes |= {"ep_size": size if layout == "ep" else 1, "disable_shared_experts_fusion": True}
    flags = ServerArgs(
        model_path=str(CHECKPOINT),
        device=device,
        dtype="bfloat16",
        tp_size=size,
        moe_runner_backend="triton",
        skip_tokenizer_init=True,
        **sizes,
    )
    ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=gpu)
    context = runtime_context.create_context(flags, role="scheduler", ranks=ranks)
    with runtime_context.use_context(context):
        init_distributed_environment(
            backend="gloo" if device == "cpu" else "nccl",
            world_size=size,
            rank=rank,
            local_rank=gpu,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            timeout=60,
            recovered_rank=False,
        )
        initialize_model_parallel()
        initialize_dp_attention(server_args=flags)
        initialize_moe_config()
    if device == "cpu":
        replace_gpu_kernels()
    return context


def replace_gpu_kernels() -> None:
    """Replace kernels of gates and shared experts that exist for GPUs alone by plain torch."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.models import deepseek_v2

    def clamp(gate_up: torch.Tensor, out: torch.Tensor, limit: float) -> None:
        gate, up = gate_up.float().chunk(2, -1)
        out.copy_(nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit))

    def swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(gate_up.dtype)

    multiply = torch.mm

    def mm(x: torch.Tensor, y: torch.Tensor, *, out_dtype: Any = None, **kwargs: Any) -> Any:
        wide = out_dtype is not None
        return multiply(x.to(out_dtype), y.to(out_dtype)) if wide else multiply(x, y, **kwargs)

    torch.mm = mm
    deepseek_v2.silu_and_mul_clamp = clamp
    fused_moe.swiglu_no_interleaved_with_alpha_and_limit = swiglu


def get_sigmoid_fields(shape: Shape) -> dict[str, Any]:
    """Return the fields of a config with sigmoid scores and groups of experts."""
    return {
        "hidden_size": shape.hidden,
        "moe_intermediate_size": shape.intermediate,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": SCALE,
    }


def get_side_stream() -> Any:
    """Return a stream for shared experts, which SGLang's own blocks overlap in CUDA graphs."""
    return torch.cuda.Stream() if torch.get_default_device().type == "cuda" else None


def deepseek_v4(layer: int, shape: Shape, variant: str = "weft") -> Block:
    """A block of DeepSeek-V4 with MXFP4 experts."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    config, theirs = moe_blocks.deepseek_v4(layer, shape)
    set_fields(config, num_hash_layers=3, n_group=1, topk_group=1)
    quantization = Fp8Config(True, "dynamic", ["shared_experts"], [128, 128], is_fp4_experts=True)
    quantization.dequant_fp4_to_fp8 = variant.startswith(("fp8", "dispatcher"))
    with bfloat16_by_default():
        block = DeepseekV2MoE(
            config=config,
            layer_id=layer,
            quant_config=quantization,
            prefix=f"model.layers.{layer}.mlp",
            alt_stream=get_side_stream(),
            is_deepseek_v4=True,
        )
    bias = block.gate.e_score_correction_bias
    formula = moe_blocks.load_block(block, theirs, block.experts, "mxfp4", bias)
    if theirs.is_hash:
        block.topk.tid2eid.data.copy_(theirs.gate.tid2eid)
    return block, formula


def minimax_m3(layer: int, shape: Shape) -> Block:
    """A block of MiniMax-M3 in bfloat16."""
    from sglang.srt.models.minimax_m3 import MiniMaxM3MoE

    config, theirs = moe_blocks.minimax_m3(shape)
    with bfloat16_by_default():
        block = MiniMaxM3MoE(
            config, layer, alt_stream=get_side_stream(), prefix=f"model.layers.{layer}.mlp"
        )
    bias = block.e_score_correction_bias
    return block, moe_blocks.load_block(block, theirs, block.experts, "bfloat16", bias)


def qwen3_moe(layer: int, shape: Shape) -> Block:
    """A block of Qwen3-MoE in bfloat16."""
    from sglang.srt.models.qwen3_moe import Qwen3MoeSparseMoeBlock

    config, theirs = moe_blocks.qwen3_moe(shape)
    with bfloat16_by_default():
        block = Qwen3MoeSparseMoeBlock(layer, config, prefix=f"model.layers.{layer}.mlp")
    return block, moe_blocks.load_block(block, theirs, block.experts, "bfloat16", None)


def glm4_moe(layer: int, shape: Shape) -> Block:
    """A block of GLM-4.5 in bfloat16."""
    from sglang.srt.models.glm4_moe import Glm4MoeSparseMoeBlock

    config, theirs = moe_blocks.glm4_moe(shape)
    with bfloat16_by_default():
        block = Glm4MoeSparseMoeBlock(config, layer, prefix=f"model.layers.{layer}.mlp")
    bias = block.gate.e_score_correction_bias
    return block, moe_blocks.load_block(block, theirs, block.experts, "bfloat16", bias)


def glm4_moe_lite(layer: int, shape: Shape) -> Block:
    """A block of GLM-4.7-Flash in bfloat16."""
    from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteSparseMoeBlock
    from transformers import Glm4MoeLiteConfig
    from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteMoE

    config = Glm4MoeLiteConfig(**get_sigmoid_fields(shape), n_shared_experts=1, norm_topk_prob=True)
    with bfloat16_by_default():
        block = Glm4MoeLiteSparseMoeBlock(config, layer, prefix=f"model.layers.{layer}.mlp")
    theirs, bias = Glm4MoeLiteMoE(config).float(), block.gate.e_score_correction_bias
    return block, moe_blocks.load_block(block, theirs, block.experts, "bfloat16", bias)


def mimo_v2(layer: int, shape: Shape) -> Block:
    """A block of MiMo-V2 in bfloat16, without a shared expert."""
    from sglang.srt.models.mimo_v2 import MiMoV2MoE
    from transformers import MiMoV2FlashConfig
    from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashMoE

    config = MiMoV2FlashConfig(**get_sigmoid_fields(shape) | {"routed_scaling_factor": 1.0})
    set_fields(config, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True)
    with bfloat16_by_default():
        block = MiMoV2MoE(config, layer, prefix=f"model.layers.{layer}.mlp")
    theirs, bias = MiMoV2FlashMoE(config).float(), block.gate.e_score_correction_bias
    return block, moe_blocks.load_block(block, theirs, block.experts, "bfloat16", bias)


def nemotron_h(layer: int, shape: Shape, *, latent: bool = False) -> Block:
    """A block of Nemotron-3 in bfloat16."""
    from sglang.srt.models.nemotron_h import NemotronHMoE

    config, theirs = moe_blocks.nemotron_h(shape, latent=latent)
    with bfloat16_by_default():
        block = NemotronHMoE(config, layer, prefix=f"model.layers.{layer}.mixer")
    bias = block.gate.e_score_correction_bias
    return block, moe_blocks.load_block(block, theirs, block.experts, "bfloat16", bias)


def kimi_k3(layer: int, shape: Shape) -> Block:
    """A block of Kimi-K3 with MXFP4 experts."""
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
    from sglang.srt.models.kimi_k3 import KimiK3MoE

    config = SimpleNamespace(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        n_routed_experts=shape.experts,
        num_experts_per_token=shape.top_k,
        moe_renormalize=True,
        routed_scaling_factor=SCALE,
        num_shared_experts=1,
        routed_expert_hidden_size=shape.latent,
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
    torch.manual_seed(0)
    block.gate.e_score_correction_bias.data.normal_(0, 0.1)
    latent = (block.routed_expert_down_proj, block.routed_expert_up_proj)
    moe_blocks.fill_matrices(
        [block.gate.weight, *block.shared_experts.parameters(), *(each.weight for each in latent)]
    )

    def restore(sums: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = block.routed_expert_up_proj(block.routed_expert_norm(sums))[0]
        return out

    return block, moe_blocks.kimi_k3(block, block.experts, shape, restore)


def gpt_oss(layer: int, kind: str, shape: Shape) -> Block:
    """A block of GPT-OSS in bfloat16 or MXFP4."""
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
    from sglang.srt.models.gpt_oss import GptOssForCausalLM, GptOssSparseMoeBlock

    config, formula, checkpoint = moe_blocks.gpt_oss(shape, kind)
    mxfp4 = kind == "mxfp4"
    quantization = Mxfp4Config(is_checkpoint_mxfp4_serialized=True) if mxfp4 else None
    prefix = f"model.layers.{layer}.mlp"
    with bfloat16_by_default():
        block = GptOssSparseMoeBlock(layer, config, quantization, prefix=prefix)
    if not mxfp4:  # SGLang's loader selects a rank's experts in MXFP4 alone
        num_local = block.experts.num_local_experts
        first = block.experts.moe_ep_rank * num_local
        for name in [each for each in checkpoint if ".experts." in each]:
            checkpoint[name] = checkpoint[name][first : first + num_local]
    fields = {"config": config, "quant_config": quantization}
    moe_blocks.load_gpt_oss(GptOssForCausalLM, block, checkpoint.items(), **fields)
    return block, formula


def bfloat16_by_default() -> Any:
    """Return a context in which SGLang builds layers in bfloat16."""
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    return set_default_torch_dtype(torch.bfloat16)


BLOCKS: dict[str, Callable[..., Block]] = {
    "deepseek_v4, by token id": functools.partial(deepseek_v4, 0),
    "deepseek_v4, by logits": functools.partial(deepseek_v4, 3),
    "glm4_moe_lite": functools.partial(glm4_moe_lite, 6),
    "mimo_v2": functools.partial(mimo_v2, 7),
    "minimax_m3": functools.partial(minimax_m3, 4),
    "kimi_k3": functools.partial(kimi_k3, 5),
    "qwen3_moe": functools.partial(qwen3_moe, 8),
    "glm4_moe": functools.partial(glm4_moe, 9),
    "nemotron_h": functools.partial(nemotron_h, 10),
    "nemotron_h, latent": functools.partial(nemotron_h, 11, latent=True),
    "gpt_oss": functools.partial(gpt_oss, 12, "bfloat16"),
    "gpt_oss, mxfp4": functools.partial(gpt_oss, 13, "mxfp4"),
}


def compare(group: weft.Group, names: list[str]) -> dict[str, float]:
    """Return each block's relative error on this CPU rank's tokens."""
    context, errors = set_up(group), {}
    from sglang.srt.runtime_context import use_context

    from weft.plugins.sglang import engine

    for name in names:
        torch.manual_seed(0)  # every rank draws the same model
        with use_context(context):
            block, formula = BLOCKS[name](SMALL)
            add_to_weft(block, context.server_args)
            torch.manual_seed(1 + group.rank)
            # SGLang's top-k takes no empty batch on CPUs. Where SGLang calls it, ranks have tokens.
            fewest = int(name.startswith(CALLERS))
            counts = [max(count, fewest) for count in COUNTS[: group.size]]
            set_counts(counts)
            run = functools.partial(run_block, block, name)
            errors[name] = moe_blocks.compare_block(run, formula, counts[group.rank], SMALL)
        engine.close()
    return errors


def compare_on_gpu(group: weft.Group, task: Task) -> bool:
    """Return whether all blocks are right on this rank's GPU."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import use_context

    create = functools.partial(set_up, group, "cuda")
    layouts = moe_blocks.Layouts(group, parallel_state, create)
    from weft.plugins.sglang import engine

    def build(name: str, variant: str, shape: Shape) -> tuple[Callable[..., Any], Formula]:
        """Build a block as SGLang's loader does, and return its forward function and formula."""
        kernels = moe_blocks.split_variant(variant)[0]
        options = {"variant": kernels} if name.startswith("deepseek_v4") else {}
        os.environ["WEFT_SGLANG_FORM"] = "dispatcher" if kernels == "dispatcher" else "block"
        context = layouts.activate(variant)
        with use_context(context), use_backend(kernels), bfloat16_by_default():
            with torch.device("cuda"):
                block, formula = BLOCKS[name](shape, **options)
            for module in block.modules():
                method = getattr(module, "quant_method", None)
                if hasattr(method, "process_weights_after_loading"):
                    method.process_weights_after_loading(module)
            if kernels in moe_blocks.WEFT_VARIANTS:
                add_to_weft(block, context.server_args)

        def run(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            set_counts([len(x)] * group.size)
            with use_context(layouts.activate(variant)), use_backend(kernels), capture_mode():
                return run_block(block, name, x, ids)

        return run, formula

    @contextlib.contextmanager
    def capture(variant: str) -> Iterator[None]:
        with use_context(layouts.activate(variant)):
            moe_blocks.check_all_reduce(variant, parallel_state.get_tp_group().ca_comm)
            with parallel_state.graph_capture():
                yield

    return moe_blocks.on_gpu(group, task, build, capture, engine.close)


def add_to_weft(block: nn.Module, flags: Any) -> None:
    """Let weft run a block's experts, as its plug-in does once a server has loaded a model."""
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    from weft.plugins.sglang import engine

    device = next(block.parameters()).device
    runner = {"model": nn.ModuleList([block]), "server_args": flags, "gpu_id": device.index}
    runner |= {"is_draft_worker": False}
    runner |= {"memory_saver_adapter": TorchMemorySaverAdapter.create(enable=False)}
    engine.after_load_model(None, SimpleNamespace(device=device.type, **runner))


def set_counts(counts: list[int]) -> None:
    """Set the ranks' numbers of tokens, as a forward pass does."""
    from sglang.srt.layers import dp_attention

    dp_attention._DpGatheredBufferWrapper._global_num_tokens = counts


@contextlib.contextmanager
def use_backend(variant: str) -> Iterator[None]:
    """Select a variant's backends for layers that are built or run in this context."""
    if variant == "weft":
        yield
        return
    from sglang.srt.layers.moe.utils import MoeA2ABackend, resolve_moe_runner_backend
    from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
    from sglang.srt.runtime_context import get_exec, get_flags

    runner = "auto" if variant.startswith(("fp8", "dispatcher")) else variant
    a2a = "weft" if variant == "dispatcher" else "none"
    chooses, name = Fp8MoEMethod, "is_deepgemm_moe_runner_backend_enabled"
    kept = chooses.__dict__[name]
    if variant == "fp8_deep_gemm":  # with this conversion SGLang refuses any other flag than auto
        setattr(chooses, name, staticmethod(lambda *args, **kwargs: True))
    try:
        with (
            get_flags().moe.override(
                a2a_backend=MoeA2ABackend(a2a), runner_backend=resolve_moe_runner_backend(runner)
            ),
            get_exec().moe.override(moe_a2a_backend=a2a, moe_runner_backend=runner),
        ):
            yield
    finally:
        setattr(chooses, name, kept)


@contextlib.contextmanager
def capture_mode() -> Iterator[None]:
    """Let SGLang know that a CUDA graph is captured, if one is."""
    if not torch.cuda.is_current_stream_capturing():
        yield
        return
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

    with model_capture_mode():
        yield


def run_block(block: Any, name: str, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Call a block as its model does."""
    by_token = {"input_ids": ids, "input_ids_global": ids} if hasattr(block, "is_hash") else {}
    batch = () if name.startswith(CALLERS) else (SimpleNamespace(),)
    out: torch.Tensor = block(x, *batch, **by_token)
    return out


def main() -> int:
    """Compare the blocks on CPU ranks or GPUs."""
    # SGLang has fused routers for GPUs alone.
    kernels = ("FUSED_HASH_TOPK", "BF16_ROUTER_GEMM")
    environment = {f"SGLANG_OPT_USE_{kernel}": "0" for kernel in kernels}
    environment["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ["SGLANG_PLUGINS"] = "weft"
    return moe_blocks.main(
        str(__doc__), BLOCKS, compare, compare_on_gpu, VARIANTS, LAYOUTS, **environment
    )


if __name__ == "__main__":
    sys.exit(main())
