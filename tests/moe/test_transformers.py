# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers: MoE blocks against weft's layers, loaded from files."""

import json
from typing import Any

import pytest
import torch

import weft
from weft.moe import (
    SWIGLU,
    Expert,
    ExpertWeights,
    GatedExpert,
    MoEConfig,
    compute_topk_weights,
    route,
    router_logits,
)

transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("safetensors.torch")
EXPERTS, LAYER, TOKENS = 8, 1, 40
SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 256},
}
HEADS = {"head_dim": 16}
DENSE = {"first_k_dense_replace": 1, "intermediate_size": 96}
LATENT = {
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 16, **DENSE},
}
LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 32}
DEEPSEEK = {**LATENT, "moe_intermediate_size": 32, "n_routed_experts": EXPERTS}
GROUPS = {"n_group": 4, "topk_group": 2}
NO_GROUPS = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
FEW = {
    **{**HEADS, "moe_intermediate_size": 32, "n_routed_experts": EXPERTS},
    "num_experts_per_tok": 3,
}
LOCAL = {**HEADS, "intermediate_size": 32, "num_local_experts": EXPERTS}
QWEN = {**HEADS, "moe_intermediate_size": 32, "num_experts": EXPERTS}
SHARED = {"num_experts_per_tok": 5, "shared_expert_intermediate_size": 40}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3", {**DEEPSEEK, **GROUPS, "num_experts_per_tok": 3}),
    "two shared": (
        "DeepseekV3",
        {**DEEPSEEK, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
         "n_shared_experts": 2, "norm_topk_prob": False, "routed_scaling_factor": 16.0},
    ),
    "kimi_k2": ("DeepseekV3", {**DEEPSEEK, **NO_GROUPS, "routed_scaling_factor": 2.827}),
    "glm4_moe": ("Glm4Moe", {**DENSE, **FEW, "n_group": 2, "topk_group": 1}),
    "glm_moe_dsa": ("GlmMoeDsa", {**DEEPSEEK, **INDEXER, **NO_GROUPS}),
    "deepseek_v32": ("DeepseekV32", {**DEEPSEEK, **INDEXER, **GROUPS, "num_experts_per_tok": 3}),
    "glm5_next_text": (
        "Glm5NextText",
        {**DEEPSEEK, **INDEXER, "num_experts_per_tok": 3, "swiglu_limit": 0.75,
         "mlp_layer_types": ["dense", "sparse"], "linear_head_dim": 8, "linear_num_heads": 2,
         "index_kpool": 4, "qk_rope_head_dim": 0, "pad_token_id": None},
    ),
    "mixtral": ("Mixtral", {**LOCAL, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**QWEN, "intermediate_size": 96, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "not normed": ("Qwen3Moe", {**QWEN, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    "deepseek_v4": (
        "DeepseekV4",
        {**FEW, "swiglu_limit": 0.75, "mlp_layer_types": ["hash_moe", "moe"],
         "num_key_value_heads": 1, "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 2, **INDEXER,
         "index_topk": 4, "layer_types": ["sliding_attention", "compressed_sparse_attention"]},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {**QWEN, **SHARED, **LINEAR, "intermediate_size": 96,
         "layer_types": ["linear_attention", "full_attention"]},
    ),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", {**QWEN, **SHARED, **LINEAR}),
    "gpt_oss": (
        "GptOss",
        {**LOCAL, "num_experts_per_tok": 3, "swiglu_limit": 1.5, "swiglu_alpha": 1.25,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "minimax_m2": ("MiniMaxM2", {**LOCAL, "num_experts_per_tok": 3}),
    "minimax_m3_vl_text": (
        "MiniMaxM3VLText",
        {**LOCAL, "num_experts_per_tok": 3, "shared_intermediate_size": 40, "swiglu_limit": 0.75,
         "swiglu_alpha": 1.25},
    ),
    "kimi_linear": (
        "KimiLinear",
        {**LATENT, "moe_intermediate_size": 32, "num_local_experts": EXPERTS, "n_group": 2,
         "topk_group": 1, "num_experts_per_tok": 3, "n_shared_experts": 2, "q_lora_rank": None,
         "pad_token_id": None, "linear_head_dim": 8, "linear_num_heads": 2},
    ),
    "llama4_text": ("Llama4Text", {**LOCAL, "intermediate_size_mlp": 48}),
    "glm4_moe_lite": ("Glm4MoeLite", {**DEEPSEEK, **GROUPS, "num_experts_per_tok": 3}),
    "mimo_v2_flash": ("MiMoV2Flash", {**FEW, "n_group": 2, "v_head_dim": 16, "pad_token_id": None}),
    "dots1": ("Dots1", {**FEW, "n_shared_experts": 2, "norm_topk_prob": True}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe", {"moe_intermediate_size": 32, "moe_num_experts": EXPERTS, "moe_k": 3}
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {**LOCAL, "moe_topk": [3, 3]}),
    "hy_v3": ("HYV3", {**QWEN, "num_experts_per_tok": 3, "num_shared_experts": 2}),
    "hy_v4": (
        "HYV4", {**DEEPSEEK, **INDEXER, **NO_GROUPS, "swiglu_limit": 0.75, "pad_token_id": None}
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {**QWEN, "num_experts_per_tok": 3, "num_dense_layers": 1, "routed_scaling_factor": 2.0,
         "layer_types": ["conv", "full_attention"]},
    ),
    "bailing_hybrid": (
        "BailingHybrid",
        {**LATENT, **QWEN, "num_expert_group": 4, "topk_group": 2, "num_experts_per_token": 3,
         "pad_token_id": None},
    ),
    "nemotron_h": (
        "NemotronH",
        {**FEW, **DENSE, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5,
         "moe_shared_expert_intermediate_size": 48, "layers_block_type": ["full_attention", "moe"]},
    ),
    "mistral4": ("Mistral4", {**DEEPSEEK, **GROUPS, "num_experts_per_tok": 3}),
    "mistral_large4_text": ("MistralLarge4Text", {**DEEPSEEK, **INDEXER, **NO_GROUPS}),
}  # fmt: skip


def model(name: str, **more: Any) -> torch.nn.Module:
    """Return a model of transformers in which every number matters, also biases."""
    family, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **sizes, **more})
    named = f"{family.removesuffix('Text')}ForCausalLM"
    if not hasattr(transformers, named):
        named = f"{family}Model"
    hf_model = getattr(transformers, named)(config).eval()
    assert isinstance(hf_model, torch.nn.Module)
    generator = torch.Generator().manual_seed(3)
    parts = (".experts.", "shared_", "router", ".gate.", "correction", "expert_bias")
    with torch.no_grad():
        for key, tensor in [*hf_model.named_parameters(), *hf_model.named_buffers()]:
            if any(part in key for part in parts):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 4)
    return hf_model


def block_of(hf_model: torch.nn.Module, number: int = LAYER) -> torch.nn.Module:
    layer = getattr(hf_model, "model", hf_model).get_submodule(f"layers.{number}")
    names = ("mlp", "feed_forward", "mixer")
    block = next(getattr(layer, name) for name in names if hasattr(layer, name))
    assert isinstance(block, torch.nn.Module)
    return block


def gate_of(block: torch.nn.Module) -> Any:
    gate = getattr(block, "gate", None) or getattr(block, "router", None)
    return getattr(gate, "wg", gate)


def correction_of(block: torch.nn.Module) -> torch.Tensor | None:
    endings = ("e_score_correction_bias", "expert_bias")
    tensors = [t for name, t in block.state_dict().items() if name.endswith(endings)]
    return tensors[0].flatten() if tensors else None


def shared_of(block: torch.nn.Module, config: MoEConfig) -> torch.nn.Module | None:
    """Return the block's shared expert in weft's modules, with its weights."""
    tensors = block.state_dict()
    names = [name for name in tensors if name.startswith("shared_")]
    assert bool(names) == bool(config.shared)
    if not names:
        return None
    parts = {name.split(".")[-2]: tensors[name] for name in names}
    gate_up = parts.get("gate_up_proj")  # MiniMax-M3
    projections = config.gating.num_projections
    if gate_up is None:
        gate_up = torch.cat([parts[name] for name in ("gate_proj", "up_proj")[-projections:]])
    assert gate_up.shape == (projections * config.shared, config.hidden)
    gating = SWIGLU if type(block).__name__ == "HYV4MoE" else config.gating
    expert = Expert(gate_up, parts["down_proj"], gating=gating)
    own = tensors.get("shared_expert_gate.weight")
    return expert if own is None else GatedExpert(expert, own)


def run_layer(
    group: weft.Group, folder: str, number: int, x: torch.Tensor, routing: Any, parts: Any
) -> torch.Tensor:
    """Run a layer of a checkpoint; `routing` and `parts` are arguments of its call and of MoE."""
    config = MoEConfig.from_hf(folder)

    def read_experts(local: Any) -> ExpertWeights:
        return ExpertWeights.from_safetensors(folder, number, local, config=config)

    with weft.MoE(group, config, read_experts, max_tokens=TOKENS, **parts) as layer:
        out = layer(x, **routing)
        layer.check()
        return out


@pytest.mark.parametrize(
    ("name", "original"),
    [
        *((name, True) for name in MODELS),
        ("deepseek_v3", False),
        ("qwen3_moe", False),
        ("deepseek_v4", False),
        ("lfm2_moe", False),
        ("nemotron_h", False),
    ],
)
@torch.no_grad()
def test_a_layer_over_ranks_is_the_block(name, original, ranks, tmp_path):
    hf_model = model(name)
    hf_model.save_pretrained(tmp_path, save_original_format=original, max_shard_size="40KB")  # type: ignore[operator]
    assert (tmp_path / "model.safetensors.index.json").is_file(), "shards must matter"
    if name == "kimi_k2":  # DeepSeek's code under another name
        saved = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**saved, "model_type": name}))
    config = MoEConfig.from_hf(tmp_path)
    assert config == MoEConfig.from_hf(hf_model.config), "from the file and from the object"
    assert config.dtype == torch.float32
    block = block_of(hf_model)
    x = torch.randn(TOKENS, config.hidden, generator=torch.Generator().manual_seed(4))
    expected = block(x[None])
    expected = (expected[0] if isinstance(expected, tuple) else expected).reshape(x.shape)
    gate = gate_of(block)
    logits = router_logits(x, gate.weight.data, getattr(gate, "bias", None))
    correction = correction_of(block)
    ids, _ = route(config.routing, logits, correction=correction)
    assert len(ids.unique()) > EXPERTS // 2, "the experts must differ"
    parts = {"correction": correction, "shared": shared_of(block, config)}
    routing = {"logits": logits}
    for out in ranks(2, "threads")(run_layer, str(tmp_path), LAYER, x, routing, parts):
        assert float((out - expected).abs().max() / expected.abs().max()) < 1e-5


@torch.no_grad()
def test_a_layer_between_latent_projections(ranks, tmp_path):
    hf_model = model("nemotron_h", moe_latent_size=32)
    hf_model.save_pretrained(tmp_path)  # type: ignore[operator]
    config, block = MoEConfig.from_hf(tmp_path), block_of(hf_model)
    assert (config.hidden, config.shared) == (32, 0)
    x = torch.randn(TOKENS, SIZES["hidden_size"], generator=torch.Generator().manual_seed(4))
    logits = router_logits(x, gate_of(block).weight.data)
    parts = {"correction": correction_of(block)}
    rows, expected = block.get_submodule("fc1_latent_proj")(x), block(x[None])[0]
    for out in ranks(2, "threads")(
        run_layer, str(tmp_path), LAYER, rows, {"logits": logits}, parts
    ):
        whole = block.get_submodule("fc2_latent_proj")(out)
        whole += block.get_submodule("shared_experts")(x)
        assert float((whole - expected).abs().max() / expected.abs().max()) < 1e-5


@torch.no_grad()
def test_a_layer_with_experts_by_token_id(ranks, tmp_path):
    hf_model = model("deepseek_v4")
    generator = torch.Generator().manual_seed(6)
    block = block_of(hf_model, 0)
    table = block.get_buffer("gate.tid2eid")
    table.copy_(torch.rand(len(table), EXPERTS, generator=generator).topk(table.shape[1]).indices)
    hf_model.save_pretrained(tmp_path)  # type: ignore[operator]
    config = MoEConfig.from_hf(tmp_path)
    x = torch.randn(TOKENS, SIZES["hidden_size"], generator=generator)
    tokens = torch.randint(SIZES["vocab_size"], (TOKENS,), generator=generator)
    expected = block(x[None], input_ids=tokens)[0]
    logits = router_logits(x, gate_of(block).weight.data)
    ids, weights = compute_topk_weights(config.routing, logits, table[tokens])
    routing = {"topk_ids": ids, "topk_weights": weights}
    parts = {"correction": torch.zeros(EXPERTS), "shared": shared_of(block, config)}
    for out in ranks(4, "threads")(run_layer, str(tmp_path), 0, x, routing, parts):
        assert float((out - expected).abs().max() / expected.abs().max()) < 1e-5
