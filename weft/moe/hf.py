# SPDX-License-Identifier: Apache-2.0
"""What a model's config.json says of its MoE layers: each served family's names and rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from weft.arguments import flags, integer, listed, real, refuse, shown
from weft.errors import InvalidArgument
from weft.json_files import read_json
from weft.moe.router import Routing, Score

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
Layer = dict[str, Any]
# Fields that change how a layer chooses, weighs or gates, with the values that change nothing. A
# family reads those that its layers have; any other one in its config is refused, not ignored.
MEANINGFUL: Mapping[str, tuple[object, ...]] = {
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
ALWAYS_DIVIDED = ("norm_topk_prob", "moe_renormalize")  # False has a meaning, too


class Fields:
    """A config's fields by name; `where` is how an error names the config."""

    def __init__(self, values: Mapping[str, Any], where: str, family: str) -> None:
        self._values, self._where, self._family = values, where, family
        self._read: set[str] = set()

    def _value(self, name: str) -> Any:
        self._read.add(name)
        return self._values.get(name)

    def get(self, *names: str) -> Any:
        """The first of these fields that is there. Raises InvalidArgument where none is."""
        for name in names:
            value = self._value(name)
            if value is not None:
                return value
        raise InvalidArgument(
            f"{self._where} has no field {names[0]!r}, which a layer of model_type "
            f"{self._family!r} needs: add it"
        )

    def size(self, *names: str, least: int = 1) -> int:
        """A field that is a whole number."""
        return integer(self._named(names[0]), self.get(*names), least)

    def real(self, name: str, default: float | None = None) -> float:
        """A field that is a number; `default` where configs may leave it out."""
        missing = default is not None and self._value(name) is None
        return real(self._named(name), default if missing else self.get(name))

    def has(self, name: str) -> bool:
        """Whether the field is there."""
        return self._value(name) is not None

    def flag(self, *names: str) -> bool:
        """A field that is True or False."""
        value = self.get(*names)
        flags(**{self._named(names[0]): value})
        return bool(value)

    def choice(self, name: str, *allowed: str) -> str:
        """A field that is one of these words."""
        value = self.get(name)
        if value not in allowed:
            raise InvalidArgument(
                f"{self._named(name)} is {shown(value)}; weft serves model_type "
                f"{self._family!r} with {listed(allowed)} only"
            )
        return str(value)

    def require(self, **wanted: object) -> None:
        """Refuse other values of fields that change the arithmetic; those left out are as wanted.

        0, False and null count as left out.
        """
        for name, only in wanted.items():
            value = self._value(name)
            if value and value != only:
                self._refuse(name, value, "without it" if only is None else f"with {only!r}")

    def leave(self, *names: str) -> None:
        """Accept fields that the engine reads, not the layer."""
        self._read.update(names)

    def refuse_unread(self) -> None:
        """Refuse fields of MEANINGFUL that the family did not read and that change something."""
        for name, neutral in MEANINGFUL.items():
            value = self._values.get(name)
            counts = value is False if name in ALWAYS_DIVIDED else bool(value)
            if name not in self._read and counts and value not in neutral:
                serves = f"with {neutral[0]!r}" if neutral else "without it"
                self._refuse(name, value, serves)

    def _refuse(self, name: str, value: object, serves: str) -> NoReturn:
        raise InvalidArgument(
            f"{self._named(name)} is {shown(value)}; weft serves model_type {self._family!r} "
            f"{serves} only: write a MoEConfig by hand for another rule"
        )

    def _named(self, name: str) -> str:
        return f"{name} in {self._where}"


def layer_of(config: object) -> Layer:
    """The fields of `MoEConfig` that a model's config has; gating as the fields of a `Gating`."""
    values, where = _values_of(config)
    outer = values
    if isinstance(inner := values.get("text_config"), Mapping):
        values, where = inner, f"text_config of {where}"
    # MiniMax-M3's text_config has no model_type of its own.
    family = values.get("model_type", outer.get("model_type"))
    if not isinstance(family, str) or family not in FAMILIES:
        raise InvalidArgument(
            f"model_type in {where} is {shown(family)}; weft knows the MoE layers of "
            f"{listed(FAMILIES)}: write a MoEConfig for others by hand"
        )
    fields = Fields(values, where, family)
    if family not in OWN_ACTIVATION:
        fields.require(hidden_act="silu")
    found = (each.get(name) for each in (values, outer) for name in ("dtype", "torch_dtype"))
    named = next((name for name in found if name is not None), "bfloat16")
    dtype = DTYPES.get(str(named).removeprefix("torch."))
    if dtype is None:
        raise InvalidArgument(f"dtype in {where} is {shown(named)}; choose one of {listed(DTYPES)}")
    layer = {"hidden": fields.size("hidden_size"), "dtype": dtype} | FAMILIES[family](fields)
    fields.refuse_unread()
    return layer


def _values_of(config: object) -> tuple[Mapping[str, Any], str]:
    """A config's fields, and how an error names it."""
    if isinstance(config, Mapping):
        return config, "config"
    if isinstance(config, str | Path):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        found = read_json(path, "the model's config")
        if not isinstance(found, dict):
            raise InvalidArgument(f"config {path} holds {shown(found)}; it must be a JSON object")
        return found, str(path)
    # What transformers' configs offer; nothing of transformers is imported.
    to_dict = getattr(config, "to_dict", None)
    found = to_dict() if callable(to_dict) else None
    if not isinstance(found, Mapping):
        refuse("config", config, "a dict, a config.json or its folder, or a config of transformers")
    return found, type(config).__name__


def _deepseek(fields: Fields, score: Score, *, grouped: bool) -> Layer:
    """Shared experts, and a choice by corrected scores, first of groups where `grouped`."""
    fields.require(scoring_func=score, topk_method="noaux_tc")
    intermediate = fields.size("moe_intermediate_size")
    return {
        "intermediate": intermediate,
        "shared": intermediate * fields.size("n_shared_experts", least=0),
        "routing": Routing(
            num_experts=fields.size("n_routed_experts", "num_local_experts"),
            top_k=fields.size("num_experts_per_tok"),
            score=score,
            renormalise=fields.flag("norm_topk_prob"),
            correction=_has_correction(fields),
            groups=fields.size("n_group") if grouped else 1,
            top_groups=fields.size("topk_group") if grouped else 1,
            scale=fields.real("routed_scaling_factor"),
        ),
    }


def _has_correction(fields: Fields) -> bool:
    return not fields.has("use_routing_bias") or fields.flag("use_routing_bias")


def _deepseek_v3(fields: Fields) -> Layer:
    return _deepseek(fields, "sigmoid", grouped=True)


def _deepseek_v4(fields: Fields) -> Layer:
    """Of all layers: the first ones are told their experts by token id, `weft.moe.weigh`."""
    fields.require(n_group=1, topk_group=1)
    layer = _deepseek(fields, "sqrtsoftplus", grouped=False)
    return layer | {"gating": {"limit": fields.real("swiglu_limit")}}


def _glm5_next(fields: Fields) -> Layer:
    layer = _deepseek(fields, "sigmoid", grouped=True)
    return layer | {"gating": {"limit": fields.real("swiglu_limit")}}


def _qwen3_moe(fields: Fields) -> Layer:
    return _softmax_of_all(fields, renormalise=fields.flag("norm_topk_prob"))


def _mixtral(fields: Fields) -> Layer:
    """Weights are always divided by their sum; Mixtral's configs have no field for it."""
    fields.require(scoring_func="softmax")
    return {
        "intermediate": fields.size("intermediate_size"),
        "routing": Routing(
            num_experts=fields.size("num_local_experts"),
            top_k=fields.size("num_experts_per_tok"),
        ),
    }


def _qwen3_next(fields: Fields) -> Layer:
    """The shared expert has a gate of its own: `GatedExpert`."""
    layer = _softmax_of_all(fields, renormalise=fields.flag("norm_topk_prob"))
    return layer | {"shared": fields.size("shared_expert_intermediate_size", least=0)}


def _qwen3_5_moe(fields: Fields) -> Layer:
    """As Qwen3-Next, but always divided by the sum: the config has no field for it."""
    layer = _softmax_of_all(fields, renormalise=True)
    return layer | {"shared": fields.size("shared_expert_intermediate_size", least=0)}


def _softmax_of_all(fields: Fields, *, renormalise: bool) -> Layer:
    fields.require(scoring_func="softmax")
    return {
        "intermediate": fields.size("moe_intermediate_size"),
        "routing": Routing(
            num_experts=fields.size("num_experts", "num_local_experts"),
            top_k=fields.size("num_experts_per_tok"),
            renormalise=renormalise,
        ),
    }


def _gpt_oss(fields: Fields) -> Layer:
    return {
        "intermediate": fields.size("intermediate_size"),
        "gating": {
            "alpha": fields.real("swiglu_alpha", 1.702),
            "offset": 1.0,
            "limit": fields.real("swiglu_limit"),
        },
        "biased": True,
        "routing": Routing(
            num_experts=fields.size("num_local_experts", "num_experts"),
            top_k=fields.size("num_experts_per_tok"),
            score="softmax-chosen",
        ),
    }


def _kimi_linear(fields: Fields) -> Layer:
    """Kimi-Linear, and Kimi-K3: its experts are as wide as the engine's latent projections make
    their rows, and its shared experts, which read the tokens themselves, are the engine's.
    """
    activation = fields.choice("hidden_act", "silu", "situ")
    fields.require(moe_router_activation_func="sigmoid", topk_method="noaux_tc")
    intermediate = fields.size("moe_intermediate_size")
    layer: Layer = {
        "intermediate": intermediate,
        "routing": Routing(
            num_experts=fields.size("num_experts", "num_local_experts", "n_routed_experts"),
            top_k=fields.size("num_experts_per_token", "num_experts_per_tok"),
            score="sigmoid",
            renormalise=fields.flag("moe_renormalize", "norm_topk_prob"),
            correction=_has_correction(fields),
            groups=fields.size("num_expert_group", "n_group"),
            top_groups=fields.size("topk_group"),
            scale=fields.real("routed_scaling_factor"),
        ),
    }
    if activation == "situ":
        beta, linear_beta = "activation_situ_beta", "activation_situ_linear_beta"
        layer["gating"] = {"beta": fields.real(beta), "linear_beta": fields.real(linear_beta)}
    shared = ("num_shared_experts", "n_shared_experts")
    if fields.has("routed_expert_hidden_size"):
        fields.leave(*shared)
        return layer | {"hidden": fields.size("routed_expert_hidden_size")}
    return layer | {"shared": intermediate * fields.size(*shared, least=0)}


def _minimax_m2(fields: Fields) -> Layer:
    fields.require(scoring_func="sigmoid")
    return _minimax(fields, scale=1.0)


def _minimax_m3(fields: Fields) -> Layer:
    """The shared expert is gated as the others are."""
    # transformers writes "silu", and gates by the numbers all the same.
    fields.choice("hidden_act", "swigluoai", "silu")
    fields.require(scoring_func="sigmoid", n_shared_experts=1)
    return _minimax(fields, scale=fields.real("routed_scaling_factor")) | {
        "shared": fields.size("shared_intermediate_size"),
        "gating": {
            "alpha": fields.real("swiglu_alpha"),
            "offset": 1.0,
            "limit": fields.real("swiglu_limit"),
        },
    }


def _minimax(fields: Fields, *, scale: float) -> Layer:
    return {
        "intermediate": fields.size("intermediate_size"),
        "routing": Routing(
            num_experts=fields.size("num_local_experts", "num_experts"),
            top_k=fields.size("num_experts_per_tok"),
            score="sigmoid",
            correction=_has_correction(fields),
            scale=scale,
        ),
    }


def _llama4(fields: Fields) -> Layer:
    fields.require(norm_topk_prob=None)
    intermediate = fields.size("intermediate_size")
    return {
        "intermediate": intermediate,
        "shared": intermediate,
        "routing": Routing(
            num_experts=fields.size("num_local_experts"),
            top_k=fields.size("num_experts_per_tok"),
            score="sigmoid",
            renormalise=False,
            weigh="input",
        ),
    }


FAMILIES: Mapping[str, Callable[[Fields], Layer]] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v3,
    "deepseek_v4": _deepseek_v4,
    "glm4_moe": _deepseek_v3,
    "glm5_next_text": _glm5_next,
    "glm_moe_dsa": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "kimi_k2": _deepseek_v3,
    "kimi_linear": _kimi_linear,
    "llama4_text": _llama4,
    "minimax_m2": _minimax_m2,
    "minimax_m3_vl": _minimax_m3,
    "minimax_m3_vl_text": _minimax_m3,
    "mixtral": _mixtral,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
}
# Where hidden_act is not SiLU.
OWN_ACTIVATION = ("kimi_linear", "minimax_m3_vl", "minimax_m3_vl_text")
