# SPDX-License-Identifier: Apache-2.0
"""Conversion of transformers configs to `MoEConfig` fields, for each supported model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
# Fields that affect routing or gating, with their neutral values. Each family reads the fields that
# its layers use. A config that has another of these fields with any other value is rejected.
SEMANTIC_FIELDS: Mapping[str, tuple[object, ...]] = {
    "scoring_func": (),
    "moe_router_activation_func": (),
    "topk_method": ("greedy",),
    "routed_scaling_factor": (1.0,),
    "norm_topk_prob": (True,),
    "moe_renormalize": (True,),
    "n_group": (1,),
    "num_expert_group": (1,),
    "topk_group": (1,),
    "use_routing_bias": (),
    "moe_router_enable_expert_bias": (),
    "n_shared_experts": (),
    "num_shared_experts": (),
    "shared_expert_intermediate_size": (),
    "shared_intermediate_size": (),
    "routed_expert_hidden_size": (),
    "zero_expert_num": (),
    "swiglu_limit": (),
    "swiglu_alpha": (),
}
SEMANTIC_WHEN_FALSE = ("norm_topk_prob", "moe_renormalize")


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


def _parse_deepseek(fields: ConfigFields, score: Score, *, grouped: bool) -> LayerKwargs:
    """Parse a config with shared experts and a score correction; `grouped`: with expert groups."""
    fields.require(scoring_func=score, topk_method="noaux_tc")
    intermediate = fields.get_int("moe_intermediate_size")
    return {
        "intermediate": intermediate,
        "shared": intermediate * fields.get_int("n_shared_experts", minimum=0),
        "routing": Routing(
            num_experts=fields.get_int("n_routed_experts", "num_local_experts"),
            top_k=fields.get_int("num_experts_per_tok"),
            score=score,
            renormalise=fields.get_bool("norm_topk_prob"),
            correction=_has_correction(fields),
            groups=fields.get_int("n_group") if grouped else 1,
            top_groups=fields.get_int("topk_group") if grouped else 1,
            scale=fields.get_float("routed_scaling_factor"),
        ),
    }


def _has_correction(fields: ConfigFields) -> bool:
    return not fields.has("use_routing_bias") or fields.get_bool("use_routing_bias")


def _parse_deepseek_v3(fields: ConfigFields) -> LayerKwargs:
    return _parse_deepseek(fields, "sigmoid", grouped=True)


def _parse_deepseek_v4(fields: ConfigFields) -> LayerKwargs:
    """Parse a DeepSeek-V4 config; `compute_topk_weights` is for experts by token id."""
    fields.require(n_group=1, topk_group=1)
    layer = _parse_deepseek(fields, "sqrtsoftplus", grouped=False)
    return layer | {"gating": {"limit": fields.get_float("swiglu_limit")}}


def _parse_glm5_next(fields: ConfigFields) -> LayerKwargs:
    layer = _parse_deepseek(fields, "sigmoid", grouped=True)
    return layer | {"gating": {"limit": fields.get_float("swiglu_limit")}}


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
    fields.require(moe_router_activation_func="sigmoid", topk_method="noaux_tc")
    intermediate = fields.get_int("moe_intermediate_size")
    layer: LayerKwargs = {
        "intermediate": intermediate,
        "routing": Routing(
            num_experts=fields.get_int("num_experts", "num_local_experts", "n_routed_experts"),
            top_k=fields.get_int("num_experts_per_token", "num_experts_per_tok"),
            score="sigmoid",
            renormalise=fields.get_bool("moe_renormalize", "norm_topk_prob"),
            correction=_has_correction(fields),
            groups=fields.get_int("num_expert_group", "n_group"),
            top_groups=fields.get_int("topk_group"),
            scale=fields.get_float("routed_scaling_factor"),
        ),
    }
    if activation == "situ":
        beta, linear_beta = "activation_situ_beta", "activation_situ_linear_beta"
        layer["gating"] = {
            "beta": fields.get_float(beta),
            "linear_beta": fields.get_float(linear_beta),
        }
    shared = ("num_shared_experts", "n_shared_experts")
    if fields.has("routed_expert_hidden_size"):
        fields.ignore(*shared)
        return layer | {"hidden": fields.get_int("routed_expert_hidden_size")}
    return layer | {"shared": intermediate * fields.get_int(*shared, minimum=0)}


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
    "deepseek_v3": _parse_deepseek_v3,
    "deepseek_v32": _parse_deepseek_v3,
    "deepseek_v4": _parse_deepseek_v4,
    "glm4_moe": _parse_deepseek_v3,
    "glm5_next_text": _parse_glm5_next,
    "glm_moe_dsa": _parse_deepseek_v3,
    "gpt_oss": _parse_gpt_oss,
    "kimi_k2": _parse_deepseek_v3,
    "kimi_linear": _parse_kimi_linear,
    "llama4_text": _parse_llama4,
    "minimax_m2": _parse_minimax_m2,
    "minimax_m3_vl": _parse_minimax_m3,
    "minimax_m3_vl_text": _parse_minimax_m3,
    "mixtral": _parse_mixtral,
    "qwen3_5_moe_text": _parse_qwen3_5_moe,
    "qwen3_moe": _parse_qwen3_moe,
    "qwen3_next": _parse_qwen3_next,
}
# Families whose hidden_act may differ from SiLU.
NON_SILU_FAMILIES = ("kimi_linear", "minimax_m3_vl", "minimax_m3_vl_text")
