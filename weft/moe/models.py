# SPDX-License-Identifier: Apache-2.0
"""Configs of MoE layers: gating, sizes and routing, and those of known models by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from weft.arguments import (
    check_bools,
    check_choice,
    check_instance,
    check_int,
    raise_invalid,
    set_fields,
)
from weft.errors import InvalidArgument
from weft.fields import max_value
from weft.gemm.config import (
    ACTIVATIONS,
    Epilogue,
    Gated,
    GatedQuant,
    GatingParams,
    Store,
    StoreQuant,
)
from weft.moe.hf import parse_config
from weft.moe.routing.router import Routing
from weft.runtime.check import check_dense, check_no_overlap, check_tensor, raise_not_tensor
from weft.shape import DTYPE_NAMES, Shape

MAX_COLUMNS = max_value(Shape, "hidden")


@dataclass(frozen=True, slots=True)
class Gating(GatingParams):
    """An expert's activation: `g * sigmoid(alpha * gate) * (u + offset)` with optional limits.

    Attributes:
        alpha: Factor inside the sigmoid; 1 gives SwiGLU.
        offset: Added to up; 0 gives SwiGLU.
        limit: Clamps gate to at most limit and up to -limit..limit. None: no limit.
        beta: SiTU: g is `beta * tanh(gate / beta)`. None: g is gate.
        linear_beta: SiTU: u is `linear_beta * tanh(up / linear_beta)`. None: u is up.

    Raises:
        InvalidArgument: a number is not finite, a limit or beta is not positive, or only one beta
            is set.
    """

    num_projections: ClassVar[int] = 2  # gate and up

    def apply(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the gating, which overwrites gate_up. Each step is rounded to gate_up's dtype.

        Args:
            gate_up: bfloat16, float16 or float32 `[..., 2 * intermediate]`, gate first, contiguous.
            out: `[..., intermediate]` to write to. Default: a new tensor.

        Returns:
            `[..., intermediate]`.

        Raises:
            InvalidArgument: a tensor has the wrong shape, dtype, device or layout, or out overlaps
                gate_up.
        """
        out = _check_apply("gate_up", gate_up, out, self.num_projections)
        gate, up = gate_up.chunk(2, dim=-1)
        if self.limit is not None:
            gate.clamp_(max=self.limit)
            up.clamp_(-self.limit, self.limit)
        if self.beta is not None and self.linear_beta is not None:
            torch.mul(gate, self.alpha, out=out).sigmoid_()
            gate.div_(self.beta).tanh_().mul_(self.beta).mul_(out)
            up.div_(self.linear_beta).tanh_().mul_(self.linear_beta)
        elif self.alpha == 1.0:
            functional.silu(gate, inplace=True)
        else:
            gate.mul_(torch.mul(gate, self.alpha, out=out).sigmoid_())
        if self.offset:
            up.add_(self.offset)
        return torch.mul(gate, up, out=out)


@dataclass(frozen=True, slots=True)
class Ungated:
    """The activation of experts without a gate, `down(activation(up(x)))`.

    Attributes:
        activation: "relu2", which is `max(up, 0) ** 2`.

    Raises:
        InvalidArgument: the activation is not supported.
    """

    activation: str = "relu2"
    num_projections: ClassVar[int] = 1  # up

    def __post_init__(self) -> None:
        """Check the activation."""
        check_choice("activation", self.activation, ACTIVATIONS)

    def apply(self, up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the activation, which overwrites up. Each step is rounded to up's dtype.

        Args:
            up: bfloat16, float16 or float32 `[..., intermediate]`, contiguous.
            out: `[..., intermediate]` to write to. Default: a new tensor.

        Returns:
            `[..., intermediate]`.

        Raises:
            InvalidArgument: a tensor has the wrong shape, dtype, device or layout, or out overlaps
                up.
        """
        out = _check_apply("up", up, out, self.num_projections)
        up.relu_()
        return torch.mul(up, up, out=out)


def check_gating(gating: object) -> None:
    """Raise InvalidArgument for anything but a `Gating` or an `Ungated`."""
    if not isinstance(gating, Gating | Ungated):
        raise_invalid("gating", gating, "a Gating or an Ungated of weft.moe")


def build_epilogue(gating: Gating | Ungated, *, quantise: bool) -> Epilogue:
    """Return the epilogue of the first projection that applies `gating`, in FP8 if `quantise`."""
    if isinstance(gating, Gating):
        return (GatedQuant if quantise else Gated)(**asdict(gating))
    return (StoreQuant if quantise else Store)(gating.activation)


def _check_apply(
    name: str, sums: torch.Tensor, out: torch.Tensor | None, num_projections: int
) -> torch.Tensor:
    """Check the tensors of an activation and return out, allocated if it is None."""
    if not isinstance(sums, torch.Tensor):
        raise_not_tensor(name, sums)
    check_dense(name, sums)
    if not sums.dim() or sums.shape[-1] % num_projections:
        columns = "2 * intermediate" if num_projections == 2 else "intermediate"
        raise InvalidArgument(f"{name} has shape {list(sums.shape)}; it must be [..., {columns}]")
    dtypes, device = (*DTYPE_NAMES,), sums.device
    check_tensor(name, sums, shape=sums.shape, dtypes=dtypes, device=device)
    shape = (*sums.shape[:-1], sums.shape[-1] // num_projections)
    if out is None:
        return torch.empty(shape, dtype=sums.dtype, device=device)
    check_tensor("out", out, shape=shape, dtypes=(sums.dtype,), device=device)
    check_no_overlap("out", out, {name: sums})
    return out


SWIGLU = Gating()
CLAMPED_SWIGLU = Gating(alpha=1.702, offset=1.0, limit=7.0)  # GPT-OSS, MiniMax-M3
RELU2 = Ungated("relu2")  # Nemotron-3


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Sizes and rules of one layer, equal on all ranks.

    Attributes:
        hidden: Hidden size of a token.
        intermediate: Intermediate size of an expert.
        routing: Rule by which experts are chosen and weighted.
        gating: Activation: `Gating` of gate and up, or `Ungated` of up alone.
        shared: Intermediate size of the shared expert, 0 for none. Use
            `dataclasses.replace(c, shared=0)` if you compute it elsewhere.
        biased: Whether the experts' projections have biases.
        dtype: Dtype of tokens, weights and results: bfloat16, float16 or float32.

    Raises:
        InvalidArgument: a size or a rule is invalid.
    """

    hidden: int
    intermediate: int
    routing: Routing
    gating: Gating | Ungated = SWIGLU
    shared: int = 0
    biased: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        check_instance("routing", self.routing, Routing)
        check_gating(self.gating)
        check_instance("dtype", self.dtype, torch.dtype)
        check_bools(biased=self.biased)
        set_fields(
            self,
            hidden=check_int("hidden", self.hidden, 1, MAX_COLUMNS),
            intermediate=check_int("intermediate", self.intermediate, 1, MAX_COLUMNS),
            shared=check_int("shared", self.shared, 0, MAX_COLUMNS),
        )

    @property
    def gate_up_rows(self) -> int:
        """Rows of an expert's first projection: gate and up, or up alone if it has no gate."""
        return self.intermediate * self.gating.num_projections

    @classmethod
    def from_hf(cls, config: object) -> MoEConfig:
        """Return the config of a model's MoE layers from its transformers config.

        Supports the model types of docs/user/models.md. Without a dtype in the config, the result
        is bfloat16; `dataclasses.replace(c, dtype=...)` changes it.

        The result does not tell which of the model's layers are MoE layers. It describes only what
        the MoE layer computes: with latent projections (Kimi-K3, Nemotron-3 Super and Ultra), the
        hidden size is that of the rows between them, and the shared experts are left to the engine.

        Args:
            config: The content of config.json as a dict, its path or that of its folder, or a
                config object of transformers. If it contains a text_config, that is used.

        Raises:
            InvalidArgument: a field is missing, or requires arithmetic that weft does not support.
                The text names it.
        """
        kwargs = parse_config(config)
        gating = kwargs.pop("gating", {})
        kind = Ungated if "activation" in gating else Gating
        return cls(**kwargs, gating=kind(**gating))


class _Models(dict[str, MoEConfig]):
    """Configs by model name. An unknown name raises InvalidArgument that suggests a similar one."""

    def __missing__(self, name: object) -> MoEConfig:
        return self[check_choice("model", name, self)]


MODELS: Mapping[str, MoEConfig] = _Models(
    {
        "deepseek-v3": MoEConfig(
            hidden=7168,
            intermediate=2048,
            shared=2048,
            routing=Routing(
                num_experts=256,
                top_k=8,
                score="sigmoid",
                correction=True,
                groups=8,
                top_groups=4,
                scale=2.5,
            ),
        ),
        "deepseek-v4-flash": MoEConfig(
            hidden=4096,
            intermediate=2048,
            shared=2048,
            gating=Gating(limit=10.0),
            routing=Routing(
                num_experts=256, top_k=6, score="sqrtsoftplus", correction=True, scale=1.5
            ),
        ),
        "qwen3-30b-a3b": MoEConfig(
            hidden=2048, intermediate=768, routing=Routing(num_experts=128, top_k=8)
        ),
        "qwen3-next-80b-a3b": MoEConfig(
            hidden=2048, intermediate=512, shared=512, routing=Routing(num_experts=512, top_k=10)
        ),
        "glm-4.5-air": MoEConfig(
            hidden=4096,
            intermediate=1408,
            shared=1408,
            routing=Routing(num_experts=128, top_k=8, score="sigmoid", correction=True),
        ),
        "glm-5.3-flash": MoEConfig(
            hidden=4096,
            intermediate=2048,
            shared=2048,
            gating=Gating(limit=10.0),
            routing=Routing(num_experts=288, top_k=8, score="sigmoid", correction=True, scale=2.5),
        ),
        "gpt-oss-120b": MoEConfig(
            hidden=2880,
            intermediate=2880,
            routing=Routing(num_experts=128, top_k=4, score="softmax-chosen"),
            gating=CLAMPED_SWIGLU,
            biased=True,
        ),
        "kimi-k2": MoEConfig(
            hidden=7168,
            intermediate=2048,
            shared=2048,
            routing=Routing(
                num_experts=384, top_k=8, score="sigmoid", correction=True, scale=2.827
            ),
        ),
        "nemotron-3-nano": MoEConfig(
            hidden=2688,
            intermediate=1856,
            shared=3712,
            gating=RELU2,
            routing=Routing(num_experts=128, top_k=6, score="sigmoid", correction=True, scale=2.5),
        ),
        "minimax-m2": MoEConfig(
            hidden=3072,
            intermediate=1536,
            routing=Routing(num_experts=256, top_k=8, score="sigmoid", correction=True),
        ),
        "minimax-m3": MoEConfig(
            hidden=6144,
            intermediate=3072,
            shared=3072,
            gating=CLAMPED_SWIGLU,
            routing=Routing(num_experts=128, top_k=4, score="sigmoid", correction=True, scale=2.0),
        ),
        # The rows between the engine's latent projections. The engine runs the shared experts.
        "kimi-k3": MoEConfig(
            hidden=3584,
            intermediate=3072,
            gating=Gating(beta=4.0, linear_beta=25.0),
            routing=Routing(num_experts=896, top_k=16, score="sigmoid", correction=True),
        ),
        "llama-4-scout": MoEConfig(
            hidden=5120,
            intermediate=8192,
            shared=8192,
            routing=Routing(
                num_experts=16, top_k=1, score="sigmoid", renormalise=False, weigh="input"
            ),
        ),
    }
)
