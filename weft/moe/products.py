"""The experts' matrix products over grouped rows: three ways, each with its own layout.

"grouped": `torch.nn.functional.grouped_mm` over rows packed expert after expert. Row counts stay on
the device. "padded": one batched product over a block of rows for each expert, full or not; for any
dtype, and captured too. "loop": one product for each expert that has rows; it reads the counts on
the host, so it waits for the device and cannot be captured.
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch
from torch.nn import functional

from weft.arguments import one_of
from weft.errors import InvalidArgument
from weft.ops.grouping import Layout

Way = Literal["auto", "tiled", "grouped", "padded", "loop"]  # "tiled" is not made here
FAST = (9, 10)  # compute capabilities, major, whose grouped_mm leaves the offsets on the device


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
    align: int
    allocates: bool  # its products are new tensors, `out` is not used

    def begin(self, grouped: RowsByExpert) -> int:
        """Look at a round's groups; return how many leading rows (or blocks) the products fill."""

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """`x[row] @ weight[e].T + bias[e]` for the rows of each expert e; others are undefined."""


def choose(way: str, device: torch.device, dtype: torch.dtype, columns: int) -> str:
    """The way "auto" stands for here, or the given one.

    columns: intermediate columns of an expert.   Raises InvalidArgument for a way that this device,
    dtype or size does not have.
    """
    one_of("gemm", way, get_args(Way))
    lacks = _grouped_lacks(device, dtype, columns)
    if way == "grouped" and lacks:
        raise InvalidArgument(f"gemm 'grouped' {lacks}; use gemm='padded' or 'loop'")
    if way != "auto":
        return way
    if device.type == "cpu":
        return "loop"
    return "padded" if lacks else "grouped"


def make(way: str, rows: int, experts: int, widest: int, like: torch.Tensor) -> Products:
    """The products of a chosen way.

    rows: of the whole buffer.   widest: columns of the widest bias, 0 for none.
    like: a tensor of the right dtype and device.
    """
    if way == "grouped":
        return GroupedProducts(rows, experts, widest, like)
    return PaddedProducts() if way == "padded" else LoopedProducts()


def layout_of(way: str) -> tuple[Layout, int]:
    """What `ExpertGroups` needs to know of a chosen way: layout and align."""
    if way == "grouped":
        return GroupedProducts.layout, GroupedProducts.align
    kind = PaddedProducts if way == "padded" else LoopedProducts
    return kind.layout, kind.align


class GroupedProducts:
    """`grouped_mm`; biases are picked row by row, for it takes none."""

    layout: Layout = "contiguous"
    align = 16
    allocates = True

    def __init__(self, rows: int, experts: int, widest: int, like: torch.Tensor) -> None:
        device = like.device
        self._last = experts - 1
        self._places = torch.arange(rows if widest else 0, dtype=torch.int32, device=device)
        self._owner = torch.empty_like(self._places)
        self._bias = torch.empty(rows * widest, dtype=like.dtype, device=device)
        self._ends = self._places

    def begin(self, grouped: RowsByExpert) -> int:
        """Remember where the experts' rows end and, for biases, whose each row is."""
        self._ends = grouped.offsets[1:]
        if self._bias.numel():
            torch.searchsorted(
                self._ends, self._places, right=True, out_int32=True, out=self._owner
            )
            self._owner.clamp_(max=self._last)  # rows behind the last group
        return len(grouped.x)

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """One kernel for all experts, and one more for a bias."""
        y: torch.Tensor = functional.grouped_mm(x, weight.transpose(1, 2), offs=self._ends)
        if bias is None:
            return y
        picked = self._bias[: y.numel()].view(y.shape)
        torch.index_select(bias, 0, self._owner, out=picked)
        return y.add_(picked)


class PaddedProducts:
    """`bmm` over blocks of equal size."""

    layout: Layout = "masked"
    align = 1
    allocates = False

    def begin(self, grouped: RowsByExpert) -> int:
        """All blocks."""
        return len(grouped.x)

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """One kernel for all experts."""
        if bias is None:
            return torch.bmm(x, weight.transpose(1, 2), out=out)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2), out=out)


class LoopedProducts:
    """One product for each expert, of exactly its rows."""

    layout: Layout = "contiguous"
    align = 1
    allocates = False

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
    ) -> torch.Tensor:
        """As many kernels as experts have rows."""
        for expert, rows in self._rows:
            matrix = weight[expert].T
            if bias is None:
                torch.mm(x[rows], matrix, out=out[rows])
            else:
                torch.addmm(bias[expert], x[rows], matrix, out=out[rows])
        return out


def _grouped_lacks(device: torch.device, dtype: torch.dtype, columns: int) -> str:
    """Why grouped_mm will not do, or ""."""
    if not hasattr(functional, "grouped_mm"):
        return f"needs torch.nn.functional.grouped_mm; torch {torch.__version__} has none"
    if columns * dtype.itemsize % 16:
        return f"needs intermediate rows of a multiple of 16 bytes; {columns} x {dtype} are not"
    if device.type != "cuda":
        return ""
    if dtype != torch.bfloat16:
        return f"keeps row counts on a GPU in bfloat16 only; the layer has {dtype}"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in FAST:
        return f"reads row counts on the host where compute capability is {major}.{minor}"
    return ""
