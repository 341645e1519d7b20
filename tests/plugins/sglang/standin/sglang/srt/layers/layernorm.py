# SPDX-License-Identifier: Apache-2.0
"""Norms that may be left a sum to make."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sglang.srt.runtime_context import STATE


def _forward_with_allreduce_fusion(
    norm_module: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    post_residual_addition: torch.Tensor | None,
    weight: torch.Tensor,
    use_attn_tp_group: bool = True,
) -> Any:
    STATE.ways.append("not summed")
    return norm_module.forward(x, residual, post_residual_addition)


class RMSNorm(nn.Module):
    """calls: how often it normed by itself.   offset: added to the weight."""

    offset = 0.0

    def __init__(self, weight: torch.Tensor, eps: float, **settings: Any) -> None:
        super().__init__()
        self.variance_size_override: int | None = None
        self.cast_x_before_out_mul = self.fp32_residual = False
        self.override_orig_dtype: torch.dtype | None = None
        self.weight, self.variance_epsilon = nn.Parameter(weight, requires_grad=False), eps
        if self.offset:
            self.gemma_weight = weight + self.offset
        self.calls = 0
        for name, value in settings.items():
            setattr(self, name, value)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
    ) -> Any:
        """Writes into the residual, as SGLang's kernel does."""
        self.calls += 1
        if residual is not None:
            if post_residual_addition is not None:
                residual = residual + post_residual_addition
            residual += x
            x = residual
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        normed = (wide * rstd * (self.weight.float() + self.offset)).to(x.dtype)
        return normed if residual is None else (normed, residual)

    def forward_with_allreduce_fusion(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
        use_attn_tp_group: bool = True,
    ) -> Any:
        weight = self.gemma_weight if self.offset else self.weight
        return _forward_with_allreduce_fusion(
            self, x, residual, post_residual_addition, weight, use_attn_tp_group
        )


class GemmaRMSNorm(RMSNorm):
    offset = 1.0
