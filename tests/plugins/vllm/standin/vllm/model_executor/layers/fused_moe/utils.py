# SPDX-License-Identifier: Apache-2.0
"""Rows in FP8."""

from __future__ import annotations

import torch


def moe_kernel_quantize_input(
    A: torch.Tensor,
    A_scale: torch.Tensor | None,
    quant_dtype: torch.dtype,
    per_act_token_quant: bool,
    block_shape: list[int] | None = None,
    is_scale_swizzled: bool = True,
    quantization_emulation: bool = False,
    mx_alignment: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert block_shape is not None
    blocks = A.float().view(A.shape[0], -1, block_shape[1])
    scale = blocks.abs().amax(2).clamp(min=1e-10) / 448
    return (blocks / scale[..., None]).view(A.shape).to(quant_dtype), scale
