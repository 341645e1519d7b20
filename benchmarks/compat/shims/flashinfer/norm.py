# SPDX-License-Identifier: Apache-2.0
"""Reference norms of flashinfer's tests, in torch."""

import torch


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> torch.Tensor:
    """Return x / rms(x) * weight, computed in fp32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def gemma_fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> None:
    """Compute residual += x; x = residual / rms(residual) * (1 + weight), both in place."""
    total = x.float() + residual.float()
    x.copy_(rmsnorm(total, weight.float() + 1, eps))
    residual.copy_(total)
