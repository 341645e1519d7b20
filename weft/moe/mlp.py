"""What a rank's experts do with grouped rows: up, gate, down; by torch, or in own tiles."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from weft.errors import InvalidArgument
from weft.gemm.triton_launch import installed, is_installed
from weft.grouping.api import Layout
from weft.moe.experts import ExpertWeights
from weft.moe.models import MoEConfig
from weft.moe.products import RowsByExpert, choose, make
from weft.moe.tiled_mlp import TiledMlp
from weft.shape import FP8_BLOCK


class Mlp(Protocol):
    """The experts of one layer after the other, in buffers of their own.

    up, then down or push; all only enqueue.
    """

    layout: Layout

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Everything that was allocated."""

    def expect(self, rows: int) -> None:
        """A hint: about so many rows will come to each expert."""

    def up(self, weights: ExpertWeights, grouped: RowsByExpert, *, early: bool = True) -> None:
        """The first product and what stands between the two.

        early: it may take its place on the GPU while the kernel in front still runs.
        """

    def down(self, weights: ExpertWeights) -> torch.Tensor:
        """The second product: `[*rows, hidden]`."""

    def push(self, weights: ExpertWeights) -> None:
        """The second product, every row of it stored at its `home`. Tiled only."""

    def forget(self) -> None:
        """Let go of the rows of the last call, which may be a graph's to give away."""

    def close(self) -> None:
        """Let go of the buffers, and of what came with the last rows; nothing is called after."""


def choose_way(
    way: str, device: torch.device, config: MoEConfig, *, fp8: bool, quantize: str | None
) -> str:
    """The way that "auto" stands for here, or the given one.

    fp8: weights are FP8.   quantize: what comes over the wire.   "auto" is tiled for FP8, and on
    GPUs wherever it serves; else one of torch's. Raises InvalidArgument for a way that this device,
    dtype or size does not have.
    """
    lacks = _tiled_lacks(config, fp8, quantize)
    if way == "auto" and device.type == "cuda" and not lacks and is_installed():
        way = "tiled"
    if way == "tiled" or fp8:
        if lacks or way not in ("tiled", "auto"):
            raise InvalidArgument(f"gemm {way!r} {lacks or 'has no FP8 weights; use tiled'}")
        if device.type == "cuda":
            installed()  # refuses here, not in the middle of a round
        return "tiled"
    return choose(way, device)


def layout_for(way: str) -> Layout:
    """How `ExpertGroups` is to lay rows out for a chosen way."""
    return TiledMlp.layout if way == "tiled" else make(way).layout


def make_mlp(
    way: str,
    config: MoEConfig,
    rows: tuple[int, ...],
    experts: int,
    *,
    fp8: bool,
    quantize: str | None,
    most: int,
    programmatic: bool,
    device: torch.device,
    pushes: bool = False,
) -> Mlp:
    """The buffers of a chosen way.

    rows: `[max_rows]`, or `[experts, max_rows]` where masked.   most: what `expect` says at most.
    pushes: results are pushed only. Tiled only.
    """
    if way == "tiled":
        given: dict[str, Any] = {"programmatic": programmatic, "device": device, "pushes": pushes}
        return TiledMlp(config, rows, experts, fp8=fp8, most=most, **given)
    return TorchMlp(way, config, rows, quantize=quantize, device=device)


class TorchMlp:
    """Torch's products (products.py); FP8 rows are widened first."""

    def __init__(
        self,
        way: str,
        config: MoEConfig,
        rows: tuple[int, ...],
        *,
        quantize: str | None,
        device: torch.device,
    ) -> None:
        self._products = make(way)
        self.layout = self._products.layout
        self._gating, self._quantize = config.gating, quantize

        def room(columns: int, wanted: bool = True) -> torch.Tensor:
            size = (*rows, columns) if wanted else (0, columns)
            return torch.empty(size, dtype=config.dtype, device=device)

        hidden = config.hidden
        self._wide = room(hidden, quantize is not None)
        self._h = room(2 * config.intermediate)
        self._act = room(config.intermediate)
        self._y = room(hidden)
        powers = (*rows, hidden // 32) if quantize == "mxfp8" else (0,)
        self._scales = torch.empty(powers, dtype=torch.float32, device=device)
        self._used = 0

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        return (self._wide, self._scales, self._h, self._act, self._y)

    def expect(self, rows: int) -> None:
        """Torch chooses for itself."""

    def up(self, weights: ExpertWeights, grouped: RowsByExpert, *, early: bool = True) -> None:
        self._used = used = self._products.begin(grouped)
        x = self._widened(grouped.rows)[:used]
        h = self._h[:used]
        self._products.multiply(x, weights.gate_up, weights.gate_up_bias, h)
        self._gating.apply(h, out=self._act[:used])

    def down(self, weights: ExpertWeights) -> torch.Tensor:
        act, rows = self._act[: self._used], self._y[: self._used]
        self._products.multiply(act, weights.down, weights.down_bias, rows)
        return self._y

    def push(self, weights: ExpertWeights) -> None:
        raise InvalidArgument("torch's products store no rows at peers; use gemm='tiled'")

    def forget(self) -> None:
        """Nothing of the rows is kept: their offsets are the layer's own."""

    def close(self) -> None:
        self._wide, self._scales, self._h, self._act, self._y = (
            t.new_empty(0) for t in self.buffers
        )

    def _widened(self, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The rows in the layer's dtype: `round(q * scale)` where FP8 came over the wire."""
        if self._quantize is None:
            return rows[0]
        q, scales = rows
        if self._scales.numel():
            scales = self._scales.copy_(scales)
        wide = self._wide.copy_(q)  # exact: every e4m3 number is one of the wider type
        wide.view(*scales.shape, -1).mul_(scales.unsqueeze(-1))
        return wide


def _tiled_lacks(config: MoEConfig, fp8: bool, quantize: str | None) -> str:
    """Why weft.gemm will not do, or ""."""
    if fp8:
        if quantize != "fp8":
            return f"with FP8 weights takes FP8 rows; quantize is {quantize!r}: use 'fp8'"
        for name, size in (("hidden", config.hidden), ("intermediate", config.intermediate)):
            if size % FP8_BLOCK:
                return f"has scales by {FP8_BLOCK} columns; {name} is {size}"
        return ""
    if quantize is not None:
        return f"multiplies rows as they come; quantize={quantize!r} needs FP8 weights"
    if config.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies FP8, bfloat16 and float16; the layer has {config.dtype}"
    if config.hidden % 8 or config.intermediate % 8:
        return f"needs rows of a multiple of 8; {config.hidden} and {config.intermediate} are not"
    return ""
