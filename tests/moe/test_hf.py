# SPDX-License-Identifier: Apache-2.0
"""MoEConfig.from_hf: published configs, and refused ones."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from weft.errors import InvalidArgument
from weft.moe import MODELS, RELU2, Gating, MoEConfig, Routing
from weft.moe.hf import SEMANTIC_FIELDS, SEMANTIC_WHEN_FALSE

BF16 = {"torch_dtype": "bfloat16"}
SIZED = {"hidden_act": "silu", "intermediate_size": 10944, **BF16}
QWEN = {
    "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048, "mlp_only_layers": [],
    "norm_topk_prob": True, **BF16,
}  # fmt: skip
# What the config.json of each model says, attention and vocabulary left out. Families that
# transformers saves with the same names are in test_transformers.py.
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "routed_scaling_factor": 2.5,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", **BF16,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856,
    "mlp_hidden_act": "relu2", "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_experts_per_tok": 6, "routed_scaling_factor": 2.5, "topk_group": 1, **BF16,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-v3": DEEPSEEK,
    "kimi-k2": {
        **DEEPSEEK, "model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1,
        "n_routed_experts": 384, "routed_scaling_factor": 2.827, "topk_group": 1,
    },
    "deepseek-v4-flash": {
        "model_type": "deepseek_v4", "expert_dtype": "fp4", "hidden_act": "silu",
        "hidden_size": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 6,
        "num_hash_layers": 3, "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0"},
        "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0,
        "topk_method": "noaux_tc", **BF16,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe", "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "topk_group": 1, **BF16,
    },
    "glm-5.3-flash": {
        "model_type": "glm5_next", **BF16,
        "text_config": {
            "model_type": "glm5_next_text", "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 12288, "moe_intermediate_size": 2048, "n_group": 1,
            "n_routed_experts": 288, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
            "swiglu_limit": 10.0, "topk_group": 1,
        },
    },
    "qwen3-30b-a3b": {
        **QWEN, "model_type": "qwen3_moe", "intermediate_size": 6144, "num_experts": 128,
        "moe_intermediate_size": 768, "num_experts_per_tok": 8,
    },
    "qwen3-next-80b-a3b": {
        **QWEN, "model_type": "qwen3_next", "intermediate_size": 5120, "num_experts": 512,
        "moe_intermediate_size": 512, "num_experts_per_tok": 10,
        "shared_expert_intermediate_size": 512,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "experts_per_token": 4, "hidden_act": "silu", "hidden_size": 2880,
        "intermediate_size": 2880, "num_experts_per_tok": 4, "num_local_experts": 128,
        "quantization_config": {"quant_method": "mxfp4"}, "swiglu_limit": 7.0,
    },
    "minimax-m2": {
        "model_type": "minimax_m2", "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 1536, "num_experts_per_tok": 8, "num_local_experts": 256,
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_routing_bias": True, **BF16,
    },
    "minimax-m3": {
        "model_type": "minimax_m3_vl", **BF16,
        "quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        "text_config": {
            "dense_intermediate_size": 12288, "hidden_act": "swigluoai", "hidden_size": 6144,
            "intermediate_size": 3072, "n_shared_experts": 1, "num_experts_per_tok": 4,
            "num_local_experts": 128, "routed_scaling_factor": 2.0, "scoring_func": "sigmoid",
            "shared_intermediate_size": 3072, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
            "use_routing_bias": True,
        },
    },
    "kimi-k3": {
        "model_type": "kimi_k3", **BF16,
        "text_config": {
            "model_type": "kimi_linear", "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0, "first_k_dense_replace": 1, "hidden_act": "situ",
            "hidden_size": 7168, "intermediate_size": 33792, "latent_moe_use_norm": True,
            "moe_intermediate_size": 3072, "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "num_experts": 896,
            "num_experts_per_token": 16, "num_shared_experts": 2,
            "routed_expert_hidden_size": 3584, "routed_scaling_factor": 1.0, "topk_group": 1,
            "topk_method": "noaux_tc",
        },
    },
    "nemotron-3-nano": NEMOTRON,
    "nemotron-3-super": {
        **NEMOTRON, "hidden_size": 4096, "intermediate_size": 2688, "moe_intermediate_size": 2688,
        "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376,
        "n_routed_experts": 512, "num_experts_per_tok": 22, "routed_scaling_factor": 5.0,
    },
    "llama-4-scout": {
        "model_type": "llama4", **BF16,
        "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408},
        "text_config": {
            "model_type": "llama4_text", "hidden_act": "silu", "hidden_size": 5120,
            "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "interleave_moe_layer_step": 1, "num_experts_per_tok": 1, "num_local_experts": 16,
            "router_jitter_noise": 0.0,
        },
    },
    "ernie-4.5-21b-a3b": {
        **SIZED, "model_type": "ernie4_5_moe", "hidden_size": 2560, "moe_intermediate_size": 1536,
        "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_use_aux_free": True,
    },
    "hunyuan-a13b": {
        **SIZED, "model_type": "hunyuan_v1_moe", "hidden_size": 4096, "intermediate_size": 3072,
        "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32, "num_experts": 64,
        "num_shared_expert": [1] * 32,
    },
    "hy3": {
        **SIZED, "model_type": "hy_v3", "expert_hidden_dim": 1536, "hidden_size": 4096,
        "moe_intermediate_size": 1536, "moe_router_enable_expert_bias": True, "num_experts": 192,
        "num_experts_per_tok": 8, "num_shared_experts": 1, "router_scaling_factor": 2.826,
    },
    "ling-mini-2.0": {
        **SIZED, "model_type": "bailing_moe", "hidden_size": 2048, "moe_intermediate_size": 512,
        "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 512,
        "n_group": 8, "num_experts": 256, "num_experts_per_tok": 8, "num_shared_experts": 1,
        "routed_scaling_factor": 2.5, "score_function": "sigmoid", "topk_group": 4,
    },
}  # fmt: skip


def layer(hidden: int, intermediate: int, shared: int, **rules: Any) -> MoEConfig:
    routing = Routing(**rules)
    return MoEConfig(hidden=hidden, intermediate=intermediate, shared=shared, routing=routing)


NOAUX = {"score": "sigmoid", "correction": True}
LING = {"groups": 8, "top_groups": 4, "scale": 2.5, **NOAUX}
EXPECTED = {
    **MODELS,
    "ernie-4.5-21b-a3b": layer(2560, 1536, 3072, num_experts=64, top_k=6, correction=True),
    "hunyuan-a13b": layer(4096, 3072, 3072, num_experts=64, top_k=8),
    "hy3": layer(4096, 1536, 1536, num_experts=192, top_k=8, scale=2.826, **NOAUX),
    "ling-mini-2.0": layer(2048, 512, 512, num_experts=256, top_k=8, **LING),
    "nemotron-3-super": replace(
        layer(1024, 2688, 0, num_experts=512, top_k=22, scale=5.0, **NOAUX), gating=RELU2
    ),
}
# Fields of the engine's projections and shared experts.
LATENT = {
    "kimi-k3": {"hidden_size", "num_shared_experts"},
    "nemotron-3-super": {
        "hidden_size", "moe_shared_expert_intermediate_size", "n_shared_experts"
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_published_models(name, tmp_path):
    published = PUBLISHED[name]
    assert MoEConfig.from_hf(published) == EXPECTED[name]
    (tmp_path / "config.json").write_text(json.dumps(published))
    for path in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert MoEConfig.from_hf(path) == EXPECTED[name]


def test_other_values_of_published_models():
    assert MoEConfig.from_hf({**DEEPSEEK, "torch_dtype": torch.float32}).dtype == torch.float32
    assert MoEConfig.from_hf({**DEEPSEEK, "n_shared_experts": 2}).shared == 4096
    assert MoEConfig.from_hf({**DEEPSEEK, "n_shared_experts": 0}).shared == 0
    coder = {**PUBLISHED["qwen3-30b-a3b"], "shared_expert_intermediate_size": 0}
    assert MoEConfig.from_hf(coder) == MODELS["qwen3-30b-a3b"]
    limited = MoEConfig.from_hf({**PUBLISHED["gpt-oss-120b"], "swiglu_limit": 5})
    assert limited.gating == Gating(1.702, 1.0, 5.0)
    unbiased = {**PUBLISHED["minimax-m2"], "use_routing_bias": False}
    assert not MoEConfig.from_hf(unbiased).routing.correction
    outer = {"model_type": "kimi_k25", "text_config": PUBLISHED["kimi-k2"]}
    assert MoEConfig.from_hf(outer) == MODELS["kimi-k2"]


# Fields that from_hf does not read.
FREE = {
    "architectures", "decoder_sparse_step", "dense_intermediate_size", "expert_dtype",
    "experts_per_token", "first_k_dense_replace", "interleave_moe_layer_step",
    "intermediate_size_mlp", "latent_moe_use_norm", "mlp_only_layers", "moe_layer_freq",
    "n_groups", "num_hash_layers", "num_hidden_layers", "quantization_config",
    "router_jitter_noise", "text_config",
}  # fmt: skip
BIASES = {
    "use_routing_bias", "moe_router_enable_expert_bias", "use_expert_bias", "moe_use_aux_free",
}  # fmt: skip
# Decisive fields that a config may leave out: there is one value only, or a default.
OPTIONAL = {"hidden_act", "scoring_func", "topk_method", "torch_dtype"} | BIASES
OPTIONAL_OF = {
    "hunyuan-a13b": {"moe_intermediate_size", "num_shared_expert"},
    "hy3": {"expert_hidden_dim"},
    "kimi-k3": {"moe_router_activation_func", "routed_expert_hidden_size"},
    "ling-mini-2.0": {"moe_shared_expert_intermediate_size"},
    "minimax-m2": {"shared_intermediate_size"},
    "minimax-m3": {"n_shared_experts"},
    "nemotron-3-super": {"moe_latent_size"},
}


def other_value(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value or 512
    if isinstance(value, list):
        return [2 * v for v in value]
    return f"{value}?" if isinstance(value, str) else {}


def wrong_values(value: Any) -> list[Any]:
    """Return values of other types, or out of every range."""
    wrong: list[Any] = [[value]]
    if isinstance(value, bool):
        wrong.append(int(value))
    elif isinstance(value, int | float):
        wrong += [str(value)] + [True] * (value != 1)
        wrong += [-1] if isinstance(value, int) else []
    return wrong


def config_with(name: str, **fields: Any) -> MoEConfig:
    """Read a published config with other fields of its layers; None removes one."""
    outer = PUBLISHED[name]
    inner = {**outer.get("text_config", outer), **fields}
    return MoEConfig.from_hf({**outer, "text_config": inner} if "text_config" in outer else inner)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_field_that_decides_something_is_needed_and_checked(name):
    inner = PUBLISHED[name].get("text_config", PUBLISHED[name])
    free = set(FREE)
    if "moe_intermediate_size" in inner and name != "hunyuan-a13b":
        free.add("intermediate_size")
    free |= LATENT.get(name, set())
    decisive = set()
    for field, value in inner.items():
        try:
            if config_with(name, **{field: other_value(value)}) != EXPECTED[name]:
                decisive.add(field)
        except InvalidArgument:
            decisive.add(field)
        if field not in decisive and field != "hidden_size":  # which every family needs
            assert config_with(name, **{field: None}) == EXPECTED[name], field
            continue
        refused = wrong_values(value)
        if field not in OPTIONAL | OPTIONAL_OF.get(name, set()):
            refused.append(None)
        for wrong in refused:
            with pytest.raises(InvalidArgument, match=field.removeprefix("torch_")):
                config_with(name, **{field: wrong})
    assert decisive == inner.keys() - free


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (DEEPSEEK, {"model_type": "deepseek_v2"}, "'deepseek_v2'; .*'deepseek_v3', 'deepseek_v32'"),
        (DEEPSEEK, {"model_type": "longcat_flash"}, "'longcat_flash'.* its zero experts return"),
        (DEEPSEEK, {"model_type": "step3p5"}, "'step3p5'.* clamp the result of SiLU"),
        *(
            (PUBLISHED[name], {field: value}, f"{field} in config is")
            for name, field, value in (
                ("ernie-4.5-21b-a3b", "moe_norm_min", 0.1),
                ("ernie-4.5-21b-a3b", "use_bias", True),
                ("hunyuan-a13b", "moe_topk", [8, 4]),
                ("hunyuan-a13b", "moe_topk", 1),
                ("hunyuan-a13b", "num_shared_expert", [1, 2]),
                ("hy3", "mlp_bias", True),
                ("ling-mini-2.0", "num_experts_per_tok", 1),
                ("ling-mini-2.0", "use_bias", True),
                ("nemotron-3-nano", "mlp_bias", True),
                ("nemotron-3-nano", "n_shared_experts", 2),
            )
        ),
        (DEEPSEEK, {"torch_dtype": "float8"}, "dtype in config is 'float8'; choose one of"),
        (PUBLISHED["llama-4-scout"], {"text_config": {}}, "model_type in text_config of config is"),
    ],
)
def test_unsupported_configs_are_refused(config, changes, words):
    MoEConfig.from_hf(config)
    with pytest.raises(InvalidArgument, match=words):
        MoEConfig.from_hf({**config, **changes})


def test_invalid_config_files_are_refused(tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    for config, words in (
        (tmp_path, "cannot read the model's config .*config.json"),
        (tmp_path / "list.json", "is .1.; it must be"),
        (7, r"config is 7; it must be a dict, a config\.json"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            MoEConfig.from_hf(config)


OTHER_VALUES = {
    "scoring_func": "softplus",
    "moe_router_activation_func": "softplus",
    "topk_method": "other",
    "swiglu_limit": 3.5,
    "swiglu_alpha": 3.5,
    "routed_scaling_factor": 3.5,
}

FLAGS = (*SEMANTIC_WHEN_FALSE, *BIASES)


@pytest.mark.parametrize("name", EXPECTED)
def test_no_field_with_a_meaning_is_ignored(name):
    """Each field is refused or changes the layer; only fields of the engine change nothing."""
    ignored = set()
    for field in SEMANTIC_FIELDS:
        same = []
        for value in (True, False) if field in FLAGS else (OTHER_VALUES.get(field, 3),):
            with contextlib.suppress(InvalidArgument):
                same.append(config_with(name, **{field: value}) == EXPECTED[name])
        if same == [True] * (2 if field in FLAGS else 1):
            ignored.add(field)
    # The engine runs the shared experts of a latent layer beside it.
    assert ignored <= ({"n_shared_experts"} | LATENT[name] if name in LATENT else set())
