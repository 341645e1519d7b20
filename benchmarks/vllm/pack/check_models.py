# SPDX-License-Identifier: Apache-2.0
"""Check that weft replaces the experts of current models, which vLLM constructs without a GPU.

check_models.py TOKENIZER_DIR    Each model has a few layers of a small config, on PyTorch's device
"meta". Prints a line per model, and fails if one is refused or does not use weft's layers.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import fake_nvml  # noqa: F401  must be first
import torch
from check_pack import FLAGS, make, method, without_gpu

Config = dict[str, Any]
PLAIN: Config = {"vocab_size": 512, "hidden_size": 2048, "num_attention_heads": 16}
PLAIN |= {"max_position_embeddings": 4096, "hidden_act": "silu", "torch_dtype": "bfloat16"}
HEADS: Config = {"num_key_value_heads": 4, "head_dim": 128}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
EXPERTS: Config = {"intermediate_size": 4096, "moe_intermediate_size": 1024}
QWEN: Config = EXPERTS | {"num_experts_per_tok": 4, "norm_topk_prob": True, "mlp_only_layers": []}
SIGMOID: Config = EXPERTS | {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 1}
SIGMOID |= {"topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
SIGMOID |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
SIGMOID |= {"norm_topk_prob": True}
LATENT: Config = SIGMOID | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
LATENT |= {"qk_nope_head_dim": 128, "v_head_dim": 128, "num_key_value_heads": 16}
LATENT |= {"quantization_config": FP8}
SPARSE = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
LINEAR: Config = {"full_attention_interval": 4, "linear_conv_kernel_dim": 4}
LINEAR |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
LINEAR |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
MODELS: dict[str, tuple[str, Config]] = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", HEADS | QWEN | {"num_experts": 16}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        QWEN
        | LINEAR
        | {"num_experts": 512, "num_experts_per_tok": 10, "shared_expert_intermediate_size": 512}
        | {"num_key_value_heads": 2, "head_dim": 256},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
    "kimi_k2": ("DeepseekV3ForCausalLM", LATENT),
    "deepseek_v32": ("DeepseekV32ForCausalLM", LATENT | SPARSE),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", LATENT | SPARSE),
    "glm4_moe": ("Glm4MoeForCausalLM", HEADS | SIGMOID),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        HEADS
        | {"intermediate_size": 1024, "num_local_experts": 16, "num_experts_per_tok": 4}
        | {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}
        | {"qk_norm_type": "per_layer", "attn_type_list": [1] * 4, "rotary_dim": 64}
        | {"quantization_config": FP8},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
        | {"intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4}
        | {"sliding_window": 128, "quantization_config": {"quant_method": "mxfp4"}},
    ),
}
TAKES_A_DEVICE = ("arange", "empty", "full", "ones", "randn", "tensor", "zeros")


def on_meta() -> None:
    """Create tensors that a model places on the GPU by name on "meta" instead."""

    def make_on_meta(make_one: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        on_gpu = isinstance(device, int) or str(device).startswith("cuda")
        return make_one(*args, device="meta" if on_gpu else device, **kwargs)

    for name in TAKES_A_DEVICE:
        setattr(torch, name, functools.partial(make_on_meta, getattr(torch, name)))


def without_triton_and_processes() -> None:
    """Set Triton's target, and let vLLM inspect model classes here instead of in a new process."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from vllm.model_executor.models import registry

    utils = types.SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132}
    )
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, utils=utils
        )
    )
    registry._LazyRegisteredModel.inspect_model_cls = lambda lazy: (
        registry._ModelInfo.from_model_cls(lazy.load_model_cls())
    )


def main(tokenizer: Path) -> None:
    """Construct each model in each form."""
    from weft.plugins.vllm import register

    without_gpu()
    without_triton_and_processes()
    on_meta()
    FLAGS["linear_backend"] = "auto"
    for form in ("block", "exchange"):
        os.environ["WEFT_VLLM"] = form
        register()
        for name, (architecture, config) in MODELS.items():
            with tempfile.TemporaryDirectory() as folder:
                for file in ("tokenizer.json", "tokenizer_config.json"):
                    shutil.copy(tokenizer / file, folder)
                about = PLAIN | {"model_type": name, "architectures": [architecture]} | config
                (Path(folder) / "config.json").write_text(json.dumps(about))
                method_name = method(make(folder))
            print(f"{form}, {name}: {method_name}", flush=True)
            if "Weft" not in method_name:
                sys.exit("weft's layers do not replace vLLM's")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
