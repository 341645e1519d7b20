# SPDX-License-Identifier: Apache-2.0
"""Conversion of transformers configs to `MoEConfig` fields, for each supported model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from weft.arguments import (
    check_bools,
    check_float,
    check_int,
    format_choices,
    format_value,
    raise_invalid,
)
from weft.errors import InvalidArgument
from weft.json_files import read_json
from weft.moe.routing.router import Routing, Score

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
LayerKwargs = dict[str, Any]
Names = tuple[str, ...]  # of a field; the first that is present counts
NUM_EXPERTS: Names = ("num_experts",)
SEMANTIC_WHEN_FALSE = (  # fields of which False affects routing
    "norm_topk_prob",
    "moe_renormalize",
    "moe_norm_gate_logits",
    "moe_router_enable_routed_scaling",
    "moe_router_enable_shared_expert",
    "moe_router_use_sigmoid",
    "route_norm",
    "use_mixed_mlp_moe",
)
# Fields that affect routing or gating, with their neutral values. Each family reads the fields that
# its layers use. A config that has another of these fields with any other value is rejected.
SEMANTIC_FIELDS: Mapping[str, tuple[object, ...]] = {
    "scoring_func": (),
    "score_function": (),
    "moe_gate_act": (),
    "moe_router_activation_func": (),
    "topk_method": ("greedy",),
    "routed_scaling_factor": (1.0,),
    "router_scaling_factor": (1.0,),
    "n_group": (1,),
    "num_expert_group": (1,),
    "topk_group": (1,),
    "moe_group_experts": (),
    "use_routing_bias": (),
    "use_expert_bias": (),
    "moe_use_aux_free": (),
    "moe_router_enable_expert_bias": (),
    "n_shared_experts": (),
    "num_shared_experts": (),
    "num_shared_expert": (),
    "moe_num_shared_experts": (),
    "shared_expert_intermediate_size": (),
    "shared_intermediate_size": (),
    "moe_shared_expert_intermediate_size": (),
    "routed_expert_hidden_size": (),
    "moe_latent_size": (),
    "zero_expert_num": (),
    "swiglu_limit": (),
    "swiglu_alpha": (),
    **dict.fromkeys(SEMANTIC_WHEN_FALSE, (True,)),
}


class ConfigFields:
    """Typed access to a config's fields that records which of them were read.

    Args:
        where: Name of the config, for errors.
        family: The config's model_type.
    """

    def __init__(self, values: Mapping[str, Any], where: str, family: str) -> None:
        self._values, self._where, self._family = values, where, family
        self._read: set[str] = set()

    def _get_value(self, name: str) -> Any:
        self._read.add(name)
        return self._values.get(name)

    def get(self, *names: str) -> Any:
        """Return the first of these fields that is present. Raises InvalidArgument if none is."""
        for name in names:
            value = self._get_value(name)
            if value is not None:
                return value
        raise InvalidArgument(
            f"{self._where} has no field {names[0]!r}, which a layer of model_type "
            f"{self._family!r} needs: add it"
        )

    def get_int(self, *names: str, minimum: int = 1) -> int:
        """Return an integer field."""
        return check_int(self._format_label(names[0]), self.get(*names), minimum)

    def get_float(self, name: str, default: float | None = None) -> float:
        """Return a numeric field, or `default` if it is missing."""
        missing = default is not None and self._get_value(name) is None
        return check_float(self._format_label(name), default if missing else self.get(name))

    def has(self, name: str) -> bool:
        """Whether the field is present."""
        return self._get_value(name) is not None

    def get_bool(self, *names: str) -> bool:
        """Return a boolean field."""
        value = self.get(*names)
        check_bools(**{self._format_label(names[0]): value})
        return bool(value)

    def get_choice(self, name: str, *allowed: str) -> str:
        """Return a field that must have one of the allowed values."""
        value = self.get(name)
        if value not in allowed:
            raise InvalidArgument(
                f"{self._format_label(name)} is {format_value(value)}; for model_type "
                f"{self._family!r} weft supports only {format_choices(allowed)}"
            )
        return str(value)

    def require(self, **expected: object) -> None:
        """Raise InvalidArgument if a field is present with another value; None allows no value.

        0, False and null count as missing.
        """
        for name, allowed in expected.items():
            value = self._get_value(name)
            if value and value != allowed:
                self._raise_unsupported(
                    name, value, "without it" if allowed is None else f"with {allowed!r}"
                )

    def merge_layers(self, *names: str) -> None:
        """Replace a field that lists one value for each layer by that value, if all are equal."""
        for name in names:
            value = self._values.get(name)
            if isinstance(value, list) and value and all(v == value[0] for v in value):
                self._values = {**self._values, name: value[0]}

    def ignore(self, *names: str) -> None:
        """Mark fields as read that only the engine uses."""
        self._read.update(names)

    def check_unread(self) -> None:
        """Raise InvalidArgument for an unread field of SEMANTIC_FIELDS without a neutral value."""
        for name, neutral in SEMANTIC_FIELDS.items():
            value = self._values.get(name)
            present = value is False if name in SEMANTIC_WHEN_FALSE else bool(value)
            if name not in self._read and present and value not in neutral:
                condition = f"with {neutral[0]!r}" if neutral else "without it"
                self._raise_unsupported(name, value, condition)

    def _raise_unsupported(self, name: str, value: object, condition: str) -> NoReturn:
        raise InvalidArgument(
            f"{self._format_label(name)} is {format_value(value)}; weft supports model_type "
            f"{self._family!r} only {condition}: write a MoEConfig by hand for other values"
        )

    def _format_label(self, name: str) -> str:
        return f"{name} in {self._where}"


def parse_config(config: object) -> LayerKwargs:
    """Return the arguments of `MoEConfig` for a model's config, with gating as a dict."""
    values, where = _read_config(config)
    outer = values
    if isinstance(inner := values.get("text_config"), Mapping):
        values, where = inner, f"text_config of {where}"
    # MiniMax-M3's text_config has no model_type of its own.
    family = values.get("model_type", outer.get("model_type"))
    if isinstance(family, str) and family in UNSUPPORTED:
        raise InvalidArgument(
            f"model_type in {where} is {family!r}, which weft does not support: "
            f"{UNSUPPORTED[family]}"
        )
    if not isinstance(family, str) or family not in FAMILIES:
        raise InvalidArgument(
            f"model_type in {where} is {format_value(family)}; weft supports the MoE layers of "
            f"{format_choices(FAMILIES)}: for other models, write a MoEConfig by hand"
        )
    fields = ConfigFields(values, where, family)
    if family not in NON_SILU_FAMILIES:
        fields.require(hidden_act="silu")
    candidates = (c.get(key) for c in (values, outer) for key in ("dtype", "torch_dtype"))
    dtype_name = next((name for name in candidates if name is not None), "bfloat16")
    dtype = DTYPES.get(str(dtype_name).removeprefix("torch."))
    if dtype is None:
        raise InvalidArgument(
            f"dtype in {where} is {format_value(dtype_name)}; choose one of "
            f"{format_choices(DTYPES)}"
        )
    layer = {"hidden": fields.get_int("hidden_size"), "dtype": dtype} | FAMILIES[family](fields)
    fields.check_unread()
    return layer


def _read_config(config: object) -> tuple[Mapping[str, Any], str]:
    """Return a config's fields, and its name for errors."""
    if isinstance(config, Mapping):
        return config, "config"
    if isinstance(config, str | Path):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        values = read_json(path, "the model's config")
        if not isinstance(values, dict):
            raise InvalidArgument(
                f"config {path} is {format_value(values)}; it must be a JSON object"
            )
        return values, str(path)
    # A transformers config, without importing transformers.
    to_dict = getattr(config, "to_dict", None)
    values = to_dict() if callable(to_dict) else None
    if not isinstance(values, Mapping):
        raise_invalid(
            "config", config, "a dict, a config.json or its folder, or a config of transformers"
        )
    return values, type(config).__name__


def _parse_deepseek(
    fields: ConfigFields,
    score: Score = "sigmoid",
    *,
    experts: Names = ("n_routed_experts", "num_local_experts"),
    top_k: Names = ("num_experts_per_tok",),
    shared: Names = ("n_shared_experts",),
    groups: Names = ("n_group",),
    scale: str | None = "routed_scaling_factor",
    renormalise: Names = ("norm_topk_prob",),
    correction: str | None = "use_routing_bias",
) -> LayerKwargs:
    """Parse a config of DeepSeek's kind, given the family's names of the fields.

    Without names, a layer has no shared experts, no groups and no scale, and renormalises. It has
    no correction if `correction` is None, and one if the config lacks that field.
    """
    fields.require(scoring_func=score)
    if correction is not None:
        fields.require(topk_method="noaux_tc")
    intermediate = fields.get_int("moe_intermediate_size")
    return {
        "intermediate": intermediate,
        "shared": intermediate * fields.get_int(*shared, minimum=0) if shared else 0,
        "routing": Routing(
            num_experts=fields.get_int(*experts),
            top_k=fields.get_int(*top_k),
            score=score,
            renormalise=fields.get_bool(*renormalise) if renormalise else True,
            correction=correction is not None and _has_correction(fields, correction),
            groups=fields.get_int(*groups) if groups else 1,
            top_groups=fields.get_int("topk_group") if groups else 1,
            scale=1.0 if scale is None else fields.get_float(scale),
        ),
    }


def _has_correction(fields: ConfigFields, name: str = "use_routing_bias") -> bool:
    return not fields.has(name) or fields.get_bool(name)


def _parse_deepseek_v4(fields: ConfigFields) -> LayerKwargs:
    """Parse a DeepSeek-V4 config; `compute_topk_weights` is for experts by token id."""
    fields.require(n_group=1, topk_group=1)
    layer = _parse_deepseek(fields, "sqrtsoftplus", groups=())
    return layer | {"gating": {"limit": fields.get_float("swiglu_limit")}}


def _parse_glm5_next(fields: ConfigFields) -> LayerKwargs:
    """Parse a config of GLM-5.3-Flash or Hunyuan 4, whose shared expert has no limit."""
    layer = _parse_deepseek(fields)
    return layer | {"gating": {"limit": fields.get_float("swiglu_limit")}}


def _parse_mimo_v2(fields: ConfigFields) -> LayerKwargs:
    scale = "routed_scaling_factor"
    return _parse_deepseek(fields, shared=(), scale=scale if fields.has(scale) else None)


def _parse_hy_v3(fields: ConfigFields) -> LayerKwargs:
    fields.require(mlp_bias=None, expert_hidden_dim=fields.get_int("moe_intermediate_size"))
    return _parse_deepseek(
        fields,
        experts=NUM_EXPERTS,
        shared=("num_shared_experts",),
        groups=(),
        scale="router_scaling_factor",
        renormalise=(),
        correction="moe_router_enable_expert_bias",
    )


def _parse_ernie4_5_moe(fields: ConfigFields) -> LayerKwargs:
    """Parse an ERNIE-4.5 config; moe_norm_min only affects sums of scores below 1e-12."""
    fields.require(moe_gate_act="softmax", moe_norm_min=1e-12, use_bias=None)
    return _parse_deepseek(
        fields,
        "softmax",
        experts=("moe_num_experts",),
        top_k=("moe_k",),
        shared=("moe_num_shared_experts",),
        groups=(),
        scale=None,
        renormalise=(),
        correction="moe_use_aux_free",
    )


def _parse_bailing(fields: ConfigFields) -> LayerKwargs:
    """Parse a config of Ling or Ring. Their code renormalises whatever norm_topk_prob is."""
    shared = fields.get_int("moe_intermediate_size")
    fields.require(
        score_function="sigmoid", use_bias=None, moe_shared_expert_intermediate_size=shared
    )
    top_k = ("num_experts_per_tok", "num_experts_per_token")
    fields.get_int(*top_k, minimum=2)  # one expert's weight is not renormalised
    return _parse_deepseek(
        fields,
        experts=NUM_EXPERTS,
        top_k=top_k,
        shared=("num_shared_experts",),
        groups=("n_group", "num_expert_group"),
        renormalise=(),
        correction="moe_router_enable_expert_bias",
    )


def _parse_bailing_moe(fields: ConfigFields) -> LayerKwargs:
    """Parse a config of Ling 2.0. Ling 1.5 has no score_function and another router."""
    fields.get_choice("score_function", "sigmoid")
    return _parse_bailing(fields)


def _parse_hunyuan(fields: ConfigFields) -> LayerKwargs:
    """Parse a Hunyuan-A13B config, which may list values for each layer."""
    fields.merge_layers("moe_topk", "moe_intermediate_size", "num_shared_expert")
    intermediate = fields.get_int("intermediate_size")
    fields.require(moe_intermediate_size=intermediate, num_shared_expert=1)
    return {
        "intermediate": intermediate,
        "shared": intermediate,
        "routing": Routing(
            num_experts=fields.get_int("num_experts", "num_local_experts"),
            # Engines do not renormalise the weight of one expert, and transformers does.
            top_k=fields.get_int("moe_topk", minimum=2),
        ),
    }


def _parse_qwen3_moe(fields: ConfigFields) -> LayerKwargs:
    return _parse_softmax_layer(fields, renormalise=fields.get_bool("norm_topk_prob"))


def _parse_mixtral(fields: ConfigFields) -> LayerKwargs:
    """Parse a Mixtral config, which always renormalises and has no field for it."""
    fields.require(scoring_func="softmax")
    return {
        "intermediate": fields.get_int("intermediate_size"),
        "routing": Routing(
            num_experts=fields.get_int("num_local_experts"),
            top_k=fields.get_int("num_experts_per_tok"),
        ),
    }


def _parse_qwen3_next(fields: ConfigFields) -> LayerKwargs:
    """Parse a Qwen3-Next config. The shared expert is a `GatedExpert`."""
    layer = _parse_softmax_layer(fields, renormalise=fields.get_bool("norm_topk_prob"))
    return layer | {"shared": fields.get_int("shared_expert_intermediate_size", minimum=0)}


def _parse_qwen3_5_moe(fields: ConfigFields) -> LayerKwargs:
    """Parse a Qwen3.5 config, which always renormalises and has no field for it."""
    layer = _parse_softmax_layer(fields, renormalise=True)
    return layer | {"shared": fields.get_int("shared_expert_intermediate_size", minimum=0)}


def _parse_softmax_layer(fields: ConfigFields, *, renormalise: bool) -> LayerKwargs:
    fields.require(scoring_func="softmax")
    return {
        "intermediate": fields.get_int("moe_intermediate_size"),
        "routing": Routing(
            num_experts=fields.get_int("num_experts", "num_local_experts"),
            top_k=fields.get_int("num_experts_per_tok"),
            renormalise=renormalise,
        ),
    }


def _parse_gpt_oss(fields: ConfigFields) -> LayerKwargs:
    return {
        "intermediate": fields.get_int("intermediate_size"),
        "gating": {
            "alpha": fields.get_float("swiglu_alpha", 1.702),
            "offset": 1.0,
            "limit": fields.get_float("swiglu_limit"),
        },
        "biased": True,
        "routing": Routing(
            num_experts=fields.get_int("num_local_experts", "num_experts"),
            top_k=fields.get_int("num_experts_per_tok"),
            score="softmax-chosen",
        ),
    }


def _parse_kimi_linear(fields: ConfigFields) -> LayerKwargs:
    """Parse a config of Kimi-Linear or Kimi-K3.

    Kimi-K3's experts work on rows that the engine projects to a latent size. Its shared experts
    read the unprojected tokens, so the engine runs them.
    """
    activation = fields.get_choice("hidden_act", "silu", "situ")
    fields.require(moe_router_activation_func="sigmoid")
    latent, names = "routed_expert_hidden_size", ("num_shared_experts", "n_shared_experts")
    shared = () if fields.has(latent) else names
    layer = _parse_deepseek(
        fields,
        experts=("num_experts", "num_local_experts", "n_routed_experts"),
        top_k=("num_experts_per_token", "num_experts_per_tok"),
        shared=shared,
        groups=("num_expert_group", "n_group"),
        renormalise=("moe_renormalize", "norm_topk_prob"),
    )
    if activation == "situ":
        beta, linear_beta = "activation_situ_beta", "activation_situ_linear_beta"
        layer["gating"] = {
            "beta": fields.get_float(beta),
            "linear_beta": fields.get_float(linear_beta),
        }
    if not shared:
        fields.ignore(*names)
        layer["hidden"] = fields.get_int(latent)
    return layer


def _parse_nemotron_h(fields: ConfigFields) -> LayerKwargs:
    """Parse a Nemotron-3 config.

    Experts of Super and Ultra work on rows that the engine projects to a latent size. Their shared
    expert reads the unprojected tokens, so the engine runs it.
    """
    layer = _parse_deepseek(fields, shared=())
    layer["gating"] = {"activation": fields.get_choice("mlp_hidden_act", "relu2")}
    latent, shared = "moe_latent_size", "moe_shared_expert_intermediate_size"
    if fields.has(latent):
        fields.ignore(shared, "n_shared_experts")
        layer["hidden"] = fields.get_int(latent)
        return layer
    fields.require(mlp_bias=None, n_shared_experts=1)  # engines multiply the size by the number
    if fields.get_int("n_shared_experts", minimum=0):
        layer["shared"] = fields.get_int(shared)
    return layer


def _parse_minimax_m2(fields: ConfigFields) -> LayerKwargs:
    fields.require(scoring_func="sigmoid")
    return _parse_minimax(fields, scale=1.0)


def _parse_minimax_m3(fields: ConfigFields) -> LayerKwargs:
    # transformers writes "silu" here, but gates with the swiglu fields below.
    fields.get_choice("hidden_act", "swigluoai", "silu")
    fields.require(scoring_func="sigmoid", n_shared_experts=1)
    return _parse_minimax(fields, scale=fields.get_float("routed_scaling_factor")) | {
        "shared": fields.get_int("shared_intermediate_size"),
        "gating": {
            "alpha": fields.get_float("swiglu_alpha"),
            "offset": 1.0,
            "limit": fields.get_float("swiglu_limit"),
        },
    }


def _parse_minimax(fields: ConfigFields, *, scale: float) -> LayerKwargs:
    return {
        "intermediate": fields.get_int("intermediate_size"),
        "routing": Routing(
            num_experts=fields.get_int("num_local_experts", "num_experts"),
            top_k=fields.get_int("num_experts_per_tok"),
            score="sigmoid",
            correction=_has_correction(fields),
            scale=scale,
        ),
    }


def _parse_llama4(fields: ConfigFields) -> LayerKwargs:
    fields.require(norm_topk_prob=None)
    intermediate = fields.get_int("intermediate_size")
    return {
        "intermediate": intermediate,
        "shared": intermediate,
        "routing": Routing(
            num_experts=fields.get_int("num_local_experts"),
            top_k=fields.get_int("num_experts_per_tok"),
            score="sigmoid",
            renormalise=False,
            weigh="input",
        ),
    }


FAMILIES: Mapping[str, Callable[[ConfigFields], LayerKwargs]] = {
    "bailing_hybrid": _parse_bailing,
    "bailing_moe": _parse_bailing_moe,
    "deepseek_v3": _parse_deepseek,
    "deepseek_v32": _parse_deepseek,
    "deepseek_v4": _parse_deepseek_v4,
    "dots1": partial(_parse_deepseek, groups=()),
    "ernie4_5_moe": _parse_ernie4_5_moe,
    "glm4_moe": _parse_deepseek,
    "glm4_moe_lite": _parse_deepseek,
    "glm5_next_text": _parse_glm5_next,
    "glm_moe_dsa": _parse_deepseek,
    "gpt_oss": _parse_gpt_oss,
    "hunyuan_v1_moe": _parse_hunyuan,
    "hy_v3": _parse_hy_v3,
    "hy_v4": _parse_glm5_next,
    "kimi_k2": _parse_deepseek,
    "kimi_linear": _parse_kimi_linear,
    # transformers adds 1e-6 to the sum by which it divides, weft 1e-20.
    "lfm2_moe": partial(
        _parse_deepseek, experts=NUM_EXPERTS, shared=(), groups=(), correction="use_expert_bias"
    ),
    "llama4_text": _parse_llama4,
    "mimo_v2": _parse_mimo_v2,
    "mimo_v2_flash": _parse_mimo_v2,
    "minimax_m2": _parse_minimax_m2,
    "minimax_m3_vl": _parse_minimax_m3,
    "minimax_m3_vl_text": _parse_minimax_m3,
    "mistral4": partial(_parse_deepseek, score="softmax", correction=None),
    "mistral_large4_text": partial(
        _parse_deepseek, score="softmax", renormalise=(), correction=None
    ),
    "mixtral": _parse_mixtral,
    "nemotron_h": _parse_nemotron_h,
    "qwen3_5_moe_text": _parse_qwen3_5_moe,
    "qwen3_moe": _parse_qwen3_moe,
    "qwen3_next": _parse_qwen3_next,
}
# Families whose layers a MoEConfig cannot describe, and why.
UNSUPPORTED: Mapping[str, str] = {
    "longcat_flash": "its zero experts return the token itself. Write a MoEConfig of the other "
    "experts by hand, route yourself, pass topk_ids with -1 for zero experts, and add the token "
    "times the sum of their weights",
    **dict.fromkeys(
        ("step3p5", "step3p7"),
        "experts of some layers clamp the result of SiLU, not its argument. Write a MoEConfig of "
        "the other layers by hand",
    ),
}
# Families whose hidden_act may differ from SiLU.
NON_SILU_FAMILIES = ("kimi_linear", "minimax_m3_vl", "minimax_m3_vl_text")
