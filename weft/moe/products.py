"""The experts' matrix products by torch: two ways, each with its own layout, for any dtype.

"padded": one batched product over a block of rows for each expert, full or not; captured too.
"loop": one product for each expert that has rows; it reads the counts on the host, so it waits for
the device and cannot be captured.
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch

from weft.arguments import one_of
from weft.grouping.api import Layout

Way = Literal["auto", "tiled", "padded", "loop"]  # "tiled" is not made here


class RowsByExpert(Protocol):
    """What products need to know of rows: a `Grouped`, or an expert-major dispatch's blocks."""

    @property
    def rows(self) -> tuple[torch.Tensor, ...]:
        """Numbers `[*rows, hidden]`, and scales where they are FP8."""

    @property
    def x(self) -> torch.Tensor:
        """The first of `rows`."""

    @property
    def offsets(self) -> torch.Tensor:
        """int32 `[local_experts + 1]`: where each expert's rows begin, counted through."""

    @property
    def counts(self) -> torch.Tensor:
        """int32 `[local_experts]`."""

    @property
    def home(self) -> torch.Tensor | None:
        """int64, one for each row, or None: addresses for `push`."""

    @property
    def broken(self) -> torch.Tensor | None:
        """int32 `[1]` where owners poll the rows themselves: not 0, and none may go home."""


class Products(Protocol):
    """One way to multiply; `begin` once a round, then as many products as it takes."""

    layout: Layout

    def begin(self, grouped: RowsByExpert) -> int:
        """Look at a round's groups; return how many leading rows (or blocks) the products fill."""

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """`out[row] = x[row] @ weight[e].T + bias[e]` for each expert e; others are undefined."""


def choose(way: str, device: torch.device) -> str:
    """The way "auto" stands for here, or the given one. Raises InvalidArgument for another word."""
    one_of("gemm", way, get_args(Way))
    if way != "auto":
        return way
    return "loop" if device.type == "cpu" else "padded"


def make(way: str) -> Products:
    """The products of a chosen way."""
    return PaddedProducts() if way == "padded" else LoopedProducts()


class PaddedProducts:
    """`bmm` over blocks of equal size."""

    layout: Layout = "masked"

    def begin(self, grouped: RowsByExpert) -> int:
        """All blocks."""
        return len(grouped.x)

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """One kernel for all experts."""
        if bias is None:
            torch.bmm(x, weight.transpose(1, 2), out=out)
        else:
            torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2), out=out)


class LoopedProducts:
    """One product for each expert, of exactly its rows."""

    layout: Layout = "contiguous"

    def __init__(self) -> None:
        self._rows: list[tuple[int, slice]] = []

    def begin(self, grouped: RowsByExpert) -> int:
        """Read the counts on the host."""
        starts, counts = grouped.offsets.tolist(), grouped.counts.tolist()
        self._rows = [
            (expert, slice(start, start + count))
            for expert, (start, count) in enumerate(zip(starts, counts, strict=False))
            if count
        ]
        return int(starts[-1])

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """As many kernels as experts have rows."""
        for expert, rows in self._rows:
            matrix = weight[expert].T
            if bias is None:
                torch.mm(x[rows], matrix, out=out[rows])
            else:
                torch.addmm(bias[expert], x[rows], matrix, out=out[rows])
