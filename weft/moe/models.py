# SPDX-License-Identifier: Apache-2.0
"""Configs of MoE layers: gating, sizes and routing, and those of known models by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from weft.arguments import check_bools, check_choice, check_instance, check_int, set_fields
from weft.errors import InvalidArgument
from weft.fields import max_value
from weft.gemm.config import GatingParams
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
        if not isinstance(gate_up, torch.Tensor):
            raise_not_tensor("gate_up", gate_up)
        check_dense("gate_up", gate_up)
        if not gate_up.dim() or gate_up.shape[-1] % 2:
            raise InvalidArgument(
                f"gate_up has shape {list(gate_up.shape)}; it must be [..., 2 * intermediate]"
            )
        dtypes, device = (*DTYPE_NAMES,), gate_up.device
        check_tensor("gate_up", gate_up, shape=gate_up.shape, dtypes=dtypes, device=device)
        gate, up = gate_up.chunk(2, dim=-1)
        if out is not None:
            check_tensor("out", out, shape=gate.shape, dtypes=(gate_up.dtype,), device=device)
            check_no_overlap("out", out, {"gate_up": gate_up})
        else:
            out = torch.empty_like(gate, memory_format=torch.contiguous_format)
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


SWIGLU = Gating()
CLAMPED_SWIGLU = Gating(alpha=1.702, offset=1.0, limit=7.0)  # GPT-OSS, MiniMax-M3


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Sizes and rules of one layer, equal on all ranks.

    Attributes:
        hidden: Hidden size of a token.
        intermediate: Intermediate size of an expert.
        routing: Rule by which experts are chosen and weighted.
        gating: Activation that combines gate and up.
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
    gating: Gating = SWIGLU
    shared: int = 0
    biased: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        check_instance("routing", self.routing, Routing)
        check_instance("gating", self.gating, Gating)
        check_instance("dtype", self.dtype, torch.dtype)
        check_bools(biased=self.biased)
        set_fields(
            self,
            hidden=check_int("hidden", self.hidden, 1, MAX_COLUMNS),
            intermediate=check_int("intermediate", self.intermediate, 1, MAX_COLUMNS),
            shared=check_int("shared", self.shared, 0, MAX_COLUMNS),
        )

    @classmethod
    def from_hf(cls, config: object) -> MoEConfig:
        """Return the config of a model's MoE layers from its transformers config.

        Supports the model types of docs/user/models.md. Without a dtype in the config, the result
        is bfloat16; `dataclasses.replace(c, dtype=...)` changes it.

        The result does not tell which of the model's layers are MoE layers. It describes only what
        the MoE layer computes: Kimi-K3's hidden size is that of the rows between the engine's
        latent projections, and its shared experts are left to the engine.

        Args:
            config: The content of config.json as a dict, its path or that of its folder, or a
                config object of transformers. If it contains a text_config, that is used.

        Raises:
            InvalidArgument: a field is missing, or requires arithmetic that weft does not support.
                The text names it.
        """
        kwargs = parse_config(config)
        gating = Gating(**kwargs.pop("gating", {}))
        return cls(**kwargs, gating=gating)


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
