# SPDX-License-Identifier: Apache-2.0
"""Write tiny random checkpoints of popular models, in which the experts affect the output.

random_models.py DIR [NAME...]    Writes a folder per name, with the tokenizer of `weft demo`.
Weights are large enough that greedy text does not depend on rounding. gpt_oss_mxfp4 has MXFP4
experts, and gpt_oss the same values in bfloat16.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from weft.cli.demo import CHECKPOINT
from weft.gemm import quantize_mxfp4
from weft.gemm.mxfp4 import dequantize_mxfp4

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
HEADS = {"head_dim": 32}
DENSE = {"intermediate_size": 256, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
SIGMOID = DENSE | {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1}
SIGMOID |= {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
# Latent rows of 512 + 64, the only size that vLLM's CPU attention supports.
LATENT = SIGMOID | {"num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 512}
LATENT |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
SPARSE = LATENT | {"index_n_heads": 4, "index_head_dim": 64, "index_topk": 512}
MANY = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 64}
LINEAR = HEADS | MANY | {"shared_expert_intermediate_size": 64, "intermediate_size": 256}
LINEAR |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "norm_topk_prob": True}
LINEAR |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2}
OSS = HEADS | {"intermediate_size": 128, "num_local_experts": 16, "num_experts_per_tok": 4}
OSS |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", HEADS | MANY | {"norm_topk_prob": True, "num_experts": 16}),
    "qwen3_next": ("Qwen3NextConfig", LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", LINEAR),
    # The block of the two above without linear attention, whose kernels some CPUs lack.
    "qwen2_moe": (
        "Qwen2MoeConfig",
        MANY | {"shared_expert_intermediate_size": 64, "intermediate_size": 256},
    ),
    "glm4_moe": ("Glm4MoeConfig", HEADS | SIGMOID),
    "glm_moe_dsa": ("GlmMoeDsaConfig", SPARSE),
    "minimax_m2": (
        "MiniMaxM2Config",
        HEADS | {"intermediate_size": 64, "num_local_experts": 16, "num_experts_per_tok": 4},
    ),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "kimi_k2": ("DeepseekV3Config", LATENT | {"n_routed_experts": 384, "num_experts_per_tok": 8}),
    "deepseek_v32": ("DeepseekV32Config", SPARSE),
    "deepseek_v4": ("DeepseekV4Config", SIGMOID | {"num_key_value_heads": 1, "q_lora_rank": 64}),
    "gpt_oss": ("GptOssConfig", OSS),
}
# Fields of published configs that engines read and transformers' configs lack.
CHOICE = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
PUBLISHED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa"), CHOICE),
    "deepseek_v4": {"scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc"},
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}
    | {"qk_norm_type": "per_layer", "attn_type_list": [1, 1], "rotary_dim": 32},
}
MXFP4 = "gpt_oss_mxfp4"


def save(folder: Path, name: str) -> None:
    """Save a model of random weights in bfloat16."""
    import transformers

    kind, overrides = MODELS[name]
    tokens = json.loads((CHECKPOINT / "config.json").read_text())
    ids = {each: tokens[each] for each in ("vocab_size", "eos_token_id", "bos_token_id")}
    config = getattr(transformers, kind)(**SIZES | ids | {"pad_token_id": 0} | overrides)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for each, values in model.named_parameters():
        if each.endswith("bias") or "sinks" in each:
            values.data.normal_(0, 0.1)  # biases of attention and of experts
    for each, values in model.named_buffers():
        if each.endswith("e_score_correction_bias"):
            values.normal_(0, 0.01)
    model.save_pretrained(folder)
    # SGLang uses the config's dtype for GPT-OSS's attention, whatever --dtype is.
    saved = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    saved |= PUBLISHED.get(name, {})
    (folder / "config.json").write_text(json.dumps(saved, indent=1))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / file, folder)


def as_mxfp4(folder: Path, to: Path) -> None:
    """Copy GPT-OSS with MXFP4 experts, and round the experts of `folder` to the same values."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    tensors, packed = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith((".gate_up_proj", ".down_proj"))]:
        values, scales = quantize_mxfp4(tensors[name].transpose(1, 2).contiguous())
        rounded = dequantize_mxfp4(values, scales).to(torch.bfloat16)
        tensors[name] = rounded.transpose(1, 2).contiguous()
        packed[f"{name}_blocks"] = values.unflatten(2, (-1, 16)).contiguous()
        packed[f"{name}_scales"] = scales
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    unchanged = {
        n: t for n, t in tensors.items() if not n.endswith((".gate_up_proj", ".down_proj"))
    }
    save_file(unchanged | packed, to / "model.safetensors", {"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    config["dtype"] = "bfloat16"
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (to / "config.json").write_text(json.dumps(config, indent=1))


def main(folder: Path, names: list[str]) -> None:
    """Save the named models, or all."""
    for name in names or MODELS:
        save(folder / name, name)
        if name == "gpt_oss":
            as_mxfp4(folder / name, folder / MXFP4)
        print(folder / name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
