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
    "gptoss": (
        "GptOssConfig",
        {"head_dim": 16, "intermediate_size": 32, "num_local_experts": 8},
    ),
}


def save(folder: Path) -> None:
    """Every family's model in a folder of its name, in safetensors."""
    import transformers

    for name, (kind, sizes) in FAMILIES.items():
        config = getattr(transformers, kind)(**_SIZES, **sizes)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for each, values in model.named_parameters():
            if "bias" in each:
                values.data.normal_(0, 0.2)
        model.save_pretrained(folder / name)


def load(folder: Path, dtype: torch.dtype, **distributed: Any) -> Any:
    """A model, of this rank's part of the experts where `distributed` says how ranks share it."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    options = {"distributed_config": DistributedConfig(**distributed)} if distributed else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
