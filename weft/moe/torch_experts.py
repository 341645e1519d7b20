# SPDX-License-Identifier: Apache-2.0
"""A rank's experts by torch's own matrix products, for any dtype and device; FP8 is widened first.

On a GPU one batched product covers a block of rows for each expert, full or not, so it waits for
nothing and can be captured. On a CPU each expert that has rows has a product of exactly these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.errors import InvalidArgument
from weft.grouping.config import Layout
from weft.moe.experts import ExpertWeights
from weft.moe.models import MoEConfig


class RowsByExpert(NamedTuple):
    """Rows as experts take them: packed, or in a block for each expert.

    rows: numbers `[*rows, hidden]`, and scales where they are FP8.
    offsets: int32 `[local_experts + 1]`: where each expert's rows begin, counted through.
    counts: int32 `[local_experts]`.
    dst_addr: int64, one for each row, or None: where `push` stores it at the token's owner.
    abort_flag: int32 `[1]` where owners poll the rows themselves: not 0, and none may be stored.
    """

    rows: tuple[torch.Tensor, ...]
    offsets: torch.Tensor
    counts: torch.Tensor
    dst_addr: torch.Tensor | None = None
    abort_flag: torch.Tensor | None = None


def torch_layout(device: torch.device) -> Layout:
    """How rows are arranged: packed on a CPU, in a block for each expert on a GPU."""
    return "contiguous" if device.type == "cpu" else "masked"


class TorchExperts:
    """The experts of one layer after the other, in buffers of their own, by torch's products.

    up, then down or push; all only enqueue. Rows that come as FP8 are widened to the layer's dtype.

    rows: `[max_rows]` where they are packed, or `[experts, max_rows]`.
    """

    def __init__(
        self,
        config: MoEConfig,
        rows: tuple[int, ...],
        *,
        quantize: str | None,
        device: torch.device,
    ) -> None:
        self._gating, self._quantize, self._packed = config.gating, quantize, len(rows) == 1

        def room(columns: int, wanted: bool = True) -> torch.Tensor:
            size = (*rows, columns) if wanted else (0, columns)
            return torch.empty(size, dtype=config.dtype, device=device)

        hidden, inner = config.hidden, config.intermediate
        powers = (*rows, hidden // 32) if quantize == "mxfp8" else (0,)
        self._scales = torch.empty(powers, dtype=torch.float32, device=device)
        self._wide = room(hidden, quantize is not None)
        self._h, self._act, self._y = room(2 * inner), room(inner), room(hidden)
        self._used = 0
        self._spans: list[tuple[int, slice]] = []  # rows of each expert that has any, where packed

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Everything that was allocated."""
        return (self._wide, self._scales, self._h, self._act, self._y)

    def prepare(self, weights: ExpertWeights) -> None:
        """Get ready for calls with weights of such a dtype; torch needs nothing."""

    def up(
        self, weights: ExpertWeights, rows: RowsByExpert, *, tokens: int, early: bool = True
    ) -> None:
        """The gate and up projections, and the gating.

        tokens: a hint: each rank has about as many.   early: the kernel may take its place on the
        GPU while the one in front still runs.
        """
        self._used = used = self._begin(rows)
        x = self._widened(rows.rows)[:used]
        h = self._h[:used]
        self._multiply(x, weights.gate_up, weights.gate_up_bias, h)
        self._gating.apply(h, out=self._act[:used])

    def down(self, weights: ExpertWeights) -> torch.Tensor:
        """The down projection: `[*rows, hidden]`."""
        act, y = self._act[: self._used], self._y[: self._used]
        self._multiply(act, weights.down, weights.down_bias, y)
        return self._y

    def push(self, weights: ExpertWeights) -> None:
        """The down projection, every row of it stored at its `dst_addr`. weft.gemm only."""
        raise InvalidArgument("torch's products store no rows at peers; use gemm='grouped'")

    def forget(self) -> None:
        """Let go of the rows of the last call, which may be a graph's to give away."""

    def _begin(self, rows: RowsByExpert) -> int:
        """How many leading rows, or blocks, the products fill; reads the counts of a CPU rank."""
        if not self._packed:
            return len(rows.rows[0])
        starts, counts = rows.offsets.tolist(), rows.counts.tolist()
        self._spans = [
            (expert, slice(start, start + count))
            for expert, (start, count) in enumerate(zip(starts, counts, strict=False))
            if count
        ]
        return int(starts[-1])

    def _multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """`out[row] = x[row] @ weight[e].T + bias[e]` for each expert e; others are undefined."""
        if not self._packed:
            if bias is None:
                torch.bmm(x, weight.transpose(1, 2), out=out)
            else:
                torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2), out=out)
            return
        for expert, span in self._spans:
            matrix = weight[expert].T
            if bias is None:
                torch.mm(x[span], matrix, out=out[span])
            else:
                torch.addmm(bias[expert], x[span], matrix, out=out[span])

    def _widened(self, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The rows in the layer's dtype: `round(q * scale)` where FP8 came over the wire."""
        if self._quantize is None:
            return rows[0]
        q, scales = rows
        if self._scales.numel():
            scales = self._scales.copy_(scales)
        wide = self._wide.copy_(q)  # exact: every e4m3 number is one of the wider type
        columns = wide.shape[-1] // scales.shape[-1]  # that share a scale
        wide.view(*scales.shape, columns).mul_(scales.unsqueeze(-1))
        return wide
