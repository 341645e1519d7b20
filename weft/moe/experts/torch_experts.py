# SPDX-License-Identifier: Apache-2.0
"""A rank's experts on torch's matrix products, for any dtype and device.

FP8 rows are dequantized first. On a GPU, one batched product covers a fixed-size block of rows per
expert, so it does not synchronize and can be captured. On a CPU, each expert with rows has its own
product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.errors import InvalidArgument
from weft.grouping.config import Layout
from weft.heap.local import Allocate
from weft.moe.experts.weights import ExpertWeights
from weft.moe.models import MoEConfig


class RowsByExpert(NamedTuple):
    """Input rows of the experts, packed or in one block per expert.

    Attributes:
        rows: Values `[*rows, hidden]`, and scales if they are FP8.
        offsets: int32 `[local_experts + 1]`: index of each expert's first row over all blocks.
        counts: int32 `[local_experts]`: number of rows of each expert.
        dst_addr: int64, one per row: the address at the token's owner where `run_push` stores it,
            or None.
        abort_flag: int32 `[1]` if owners poll for the rows: while it is not 0, `run_push` must
            store nothing.
    """

    rows: tuple[torch.Tensor, ...]
    offsets: torch.Tensor
    counts: torch.Tensor
    dst_addr: torch.Tensor | None = None
    abort_flag: torch.Tensor | None = None


def select_torch_layout(device: torch.device) -> Layout:
    """Return the layout of rows: packed on a CPU, one block per expert on a GPU."""
    return "contiguous" if device.type == "cpu" else "masked"


class TorchExperts:
    """Experts on torch's matrix products, with buffers that layers of one workspace share.

    On a GPU, `run` and `run_push` only enqueue kernels. FP8 rows are converted to the layer's
    dtype.

    Args:
        rows: `[max_rows]` for packed rows, or `[experts, max_rows]`.
        quantize: Format of the received rows, or None for the layer's dtype.
        allocate: Allocates the buffers.
    """

    def __init__(
        self,
        config: MoEConfig,
        rows: tuple[int, ...],
        *,
        quantize: str | None,
        allocate: Allocate,
    ) -> None:
        self._gating, self._quantize, self._packed = config.gating, quantize, len(rows) == 1

        hidden, inner, dtype = config.hidden, config.intermediate, config.dtype
        powers = (*rows, hidden // 32) if quantize == "mxfp8" else (0,)
        quantized_rows = rows if quantize is not None else (0,) * len(rows)
        self._scales, self._dequantized, self._h, self._act, self._y = allocate(
            [
                (powers, torch.float32),
                ((*quantized_rows, hidden), dtype),
                ((*rows, config.gate_up_rows), dtype),
                ((*rows, inner), dtype),
                ((*rows, hidden), dtype),
            ]
        )
        self._spans: list[tuple[int, slice]] = []  # packed rows of each expert with rows

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """All buffers."""
        return (self._dequantized, self._scales, self._h, self._act, self._y)

    def load_kernels(self, weights: ExpertWeights) -> None:
        """Do nothing: torch loads its own kernels."""

    def run(
        self, weights: ExpertWeights, rows: RowsByExpert, *, tokens: int, early: bool = True
    ) -> torch.Tensor:
        """Run the experts and return `[*rows, hidden]`, which the next call overwrites.

        Args:
            tokens: Approximate number of tokens per rank, a hint for the choice of plan.
            early: Whether the first kernel may start while the previous one still runs.
        """
        num_used = self._read_spans(rows)
        x = self._dequantize(rows.rows)[:num_used]
        h = self._h[:num_used]
        self._multiply(x, weights.gate_up, weights.gate_up_bias, h)
        act, y = self._act[:num_used], self._y[:num_used]
        self._gating.apply(h, out=act)
        self._multiply(act, weights.down, weights.down_bias, y)
        return self._y

    def run_push(
        self, weights: ExpertWeights, rows: RowsByExpert, *, tokens: int, early: bool = True
    ) -> None:
        """Run the experts and store each row at its `dst_addr`. `GroupedExperts` only."""
        raise InvalidArgument("gemm='torch' cannot store rows at peers; use gemm='grouped'")

    def _read_spans(self, rows: RowsByExpert) -> int:
        """Return the number of leading rows, or blocks, in use; set `_spans` for packed rows."""
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
        """Set `out[row] = x[row] @ weight[e].T + bias[e]` for the rows of each expert e."""
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

    def _dequantize(self, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the rows in the layer's dtype: `round(q * scale)` for FP8 rows."""
        if self._quantize is None:
            return rows[0]
        q, scales = rows
        if self._scales.numel():
            scales = self._scales.copy_(scales)
        # Exact: the wider dtype represents every e4m3 value.
        dequantized = self._dequantized.copy_(q)
        columns = dequantized.shape[-1] // scales.shape[-1]
        dequantized.view(*scales.shape, columns).mul_(scales.unsqueeze(-1))
        return dequantized
