# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of four families of transformers, and how N ranks load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,  # ranks that share a batch share the heads
    "max_position_embeddings": 256,
    "num_experts_per_tok": 3,
    "initializer_range": 0.2,  # logits that part: greedy text would hang on a rounding otherwise
    "tie_word_embeddings": False,
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id")),
}
_DENSE = {"intermediate_size": 96, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "norm_topk_prob": True,
        },
    ),
    "glm4": (
        "Glm4MoeConfig",
        {**_DENSE, "head_dim": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    ),
    "deepseek3": (
        "DeepseekV3Config",
        {
            **_DENSE,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "deepseek4": (
        "DeepseekV4Config",
        {
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "mlp_layer_types": ["hash_moe", "moe"],
            "layer_types": ["sliding_attention", "compressed_sparse_attention"],
            "num_key_value_heads": 1,
            "q_lora_rank": 32,
            "o_lora_rank": 32,
            "o_groups": 2,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 4,
            "head_dim": 16,
            "swiglu_limit": 1.0,
        },
    ),
    "glm5": (
        "GlmMoeDsaConfig",
        {
            **_DENSE,
            "n_routed_experts": 8,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 32,
        },
    ),
    "minimax2": (
        "MiniMaxM2Config",
        {"head_dim": 16, "intermediate_size": 32, "num_local_experts": 8},
    ),
    "qwen3next": (
        "Qwen3NextConfig",
        {
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "gptoss": (
        "GptOssConfig",
        {"head_dim": 16, "intermediate_size": 32, "num_local_experts": 8},
    ),
}


def save(folder: Path) -> None:
    """Every family's model in a folder of its name, in safetensors."""
    import transformers

    for name, (kind, sizes) in FAMILIES.items():
        config = getattr(transformers, kind)(**{**_SIZES, **sizes})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for each, values in model.named_parameters():
            if "bias" in each:
                values.data.normal_(0, 0.2)
        for each, table in model.named_buffers():
            if each.endswith("tid2eid"):  # experts by token, of which a token has different ones
                table.copy_(torch.rand(len(table), 8).topk(table.shape[1]).indices)
        model.save_pretrained(folder / name)


def load(folder: Path, dtype: torch.dtype, **distributed: Any) -> Any:
    """A model, of this rank's part of the experts where `distributed` says how ranks share it."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    options = {"distributed_config": DistributedConfig(**distributed)} if distributed else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
