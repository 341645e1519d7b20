# SPDX-License-Identifier: Apache-2.0
"""A shared expert in FP8, which quantises its tokens itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.arguments import check_choice, check_instance
from weft.errors import InvalidArgument
from weft.gemm import grouped_gemm, quantize_rows
from weft.gemm.call import OUT_DTYPES
from weft.gemm.config import (
    CLUSTER_N,
    DTYPES_16BIT,
    FP8,
    ONE_EXPERT_BLOCK_MS,
    WgmmaPlan,
    fastest_plan,
    is_hopper,
)
from weft.gemm.kernels import GemmShape, describe_epilogue, preload_kernels
from weft.moe.experts.modules import Expert
from weft.moe.experts.quantize import quantize_blocks
from weft.moe.models import SWIGLU, Gating, Ungated, build_epilogue, check_gating
from weft.runtime.check import check_tensor, raise_not_tensor
from weft.shape import FP8_BLOCK

ALL_ROWS = 2**31 - 1  # grouped_gemm clamps counts to the number of rows


class FP8Expert(nn.Module):
    """A shared expert with weights, rows and intermediate results in FP8.

    A call launches three kernels on a GPU, does not synchronize and may be captured.

    Args:
        gate_up: float8_e4m3fn `[2 * intermediate, hidden]`, gate rows first; up alone,
            `[intermediate, hidden]`, with an `Ungated` activation.
        gate_up_scale: float32 `[rows / 128, hidden / 128]`, one per 128 x 128 block.
        down: float8_e4m3fn `[hidden, intermediate]`.
        down_scale: float32 `[hidden / 128, intermediate / 128]`, one per 128 x 128 block.
        gating: Activation of gate and up, or of up.
        dtype: Dtype of x and of the result.

    Raises:
        InvalidArgument: an argument is invalid.
    """

    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor
    _count: torch.Tensor

    def __init__(
        self,
        gate_up: torch.Tensor,
        gate_up_scale: torch.Tensor,
        down: torch.Tensor,
        down_scale: torch.Tensor,
        *,
        gating: Gating | Ungated = SWIGLU,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        check_gating(gating)
        dtype = check_choice("dtype", dtype, OUT_DTYPES)
        if not isinstance(gate_up, torch.Tensor):
            raise_not_tensor("gate_up", gate_up)
        device = gate_up.device
        for name, matrix, scale in (
            ("gate_up", gate_up, gate_up_scale),
            ("down", down, down_scale),
        ):
            size, fp8, single = ("rows", "columns"), (FP8,), (torch.float32,)
            kwargs: dict[str, Any] = {"device": device, "kept": True}
            check_tensor(name, matrix, shape=size, dtypes=fp8, aligned=16, **kwargs)
            rows, columns = matrix.shape
            if rows % FP8_BLOCK or columns % FP8_BLOCK:
                raise InvalidArgument(
                    f"{name} is {list(matrix.shape)}; blocks are {FP8_BLOCK} x {FP8_BLOCK}"
                )
            blocks = rows // FP8_BLOCK, columns // FP8_BLOCK
            check_tensor(f"{name}_scale", scale, shape=blocks, dtypes=single, aligned=1, **kwargs)
            self.register_buffer(name, matrix.unsqueeze(0))
            self.register_buffer(f"{name}_scale", scale.unsqueeze(0))
        if tuple(gate_up.shape) != (gating.num_projections * down.shape[1], down.shape[0]):
            raise InvalidArgument(
                f"gate_up is {list(gate_up.shape)} and down {list(down.shape)}; they must be "
                f"[{gating.num_projections} * intermediate, hidden] and [hidden, intermediate]"
            )
        self.register_buffer("_count", torch.tensor([ALL_ROWS], dtype=torch.int32, device=device))
        self._epilogue = build_epilogue(gating, quantise=True)
        self._is_gated = isinstance(gating, Gating)
        self._dtype = dtype
        if is_hopper(device):
            self._preload()

    @classmethod
    def from_expert(cls, expert: Expert) -> FP8Expert:
        """Quantise an expert without biases by the rule of `weft.reference.quantize`.

        Raises:
            InvalidArgument: the argument is invalid.
        """
        check_instance("expert", expert, Expert)
        if expert.gate_up_bias is not None or expert.down_bias is not None:
            raise InvalidArgument("this expert has biases; FP8Expert has none")
        gate_up, gate_up_scale = quantize_blocks(expert.gate_up.unsqueeze(0))
        down, down_scale = quantize_blocks(expert.down.unsqueeze(0))
        tensors = (gate_up[0], gate_up_scale[0], down[0], down_scale[0])
        return cls(*tensors, gating=expert.gating, dtype=expert.down.dtype)

    def _preload(self) -> None:
        """Load all kernels that a call may launch.

        Loading waits for running kernels, which may wait for peers, so a call must not load.
        """
        (_, n, k), (_, hidden, inner) = self.gate_up.shape, self.down.shape
        plans, shapes = [WgmmaPlan(block_m) for block_m in ONE_EXPERT_BLOCK_MS], []
        if n % CLUSTER_N == 0:
            fields = describe_epilogue(self._epilogue)
            shapes += [GemmShape(1, n, k, plan, **fields) for plan in plans]
        if hidden % CLUSTER_N == 0 and self._dtype in DTYPES_16BIT:
            out = DTYPES_16BIT[self._dtype]
            shapes += [GemmShape(1, hidden, inner, plan, "store", out) for plan in plans]
        with torch.cuda.device(self.gate_up.device):
            preload_kernels(shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[tokens, hidden]` for x `[tokens, hidden]`."""
        (_, n, k), (_, hidden, inner) = self.gate_up.shape, self.down.shape
        device = self.gate_up.device
        check_tensor("x", x, shape=(None, k), dtypes=OUT_DTYPES, device=device, aligned=16)
        rows, count = len(x), self._count
        q, scale = quantize_rows(x)
        act = torch.empty((1, rows, inner), dtype=FP8, device=device)
        blocks = (1, rows, inner // FP8_BLOCK)
        act_scale = torch.empty(blocks, dtype=torch.float32, device=device)
        grouped_gemm(
            q.unsqueeze(0),
            self.gate_up,
            counts=count,
            a_scale=scale.unsqueeze(0),
            b_scale=self.gate_up_scale,
            out=(act, act_scale),
            plan=fastest_plan(1, rows, n, k, FP8, gated=self._is_gated, out=FP8, device=device),
            epilogue=self._epilogue,
        )
        out = torch.empty((1, rows, hidden), dtype=self._dtype, device=device)
        grouped_gemm(
            act,
            self.down,
            counts=count,
            a_scale=act_scale,
            b_scale=self.down_scale,
            out=out,
            plan=fastest_plan(1, rows, hidden, inner, FP8, out=self._dtype, device=device),
        )
        return out[0]
