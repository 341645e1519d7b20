# SPDX-License-Identifier: Apache-2.0
"""Config and kernel arguments of grouping."""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_uint64
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from weft.alltoall.config import AllToAllConfig
from weft.arguments import check_choice, check_int, raise_invalid
from weft.errors import InvalidArgument
from weft.fields import Choice, to_cpp
from weft.heap.header import Site
from weft.shape import MAX_PLANES, Shape

Layout = Literal["contiguous", "masked"]
MAX_GROUPS = 1024
MAX_ALIGN = 1 << 16
MAX_ROWS = 2**31 - 1  # rows are counted in int32
TILE = 128  # tokens that one CTA counts


class GroupArgs(ctypes.Structure):
    """Mirror of `weft::GroupArgs` in grouping/layout.cuh."""

    _fields_ = (
        ("site", Site),
        ("rows", c_uint64 * MAX_PLANES),
        ("slot", c_uint64),
        ("weight", c_uint64),
        ("offsets", c_uint64),
        ("counts", c_uint64),
        ("position", c_uint64),
        ("within", c_uint64),
        ("before", c_uint64),
        ("arrived", c_uint64),
        ("y", c_uint64),
        ("dst_addr", c_uint64),
        ("source_rows", c_uint32),
        ("row_limit", c_uint32),
    )


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """Sizes of the groups, besides the Shape. Mirrors `weft::Grouping` in grouping/layout.cuh.

    Attributes:
        packing: "contiguous" or "masked".
        groups: Number of local experts, at least 1.
        rows: Rows of all groups together (contiguous), or rows of each group (masked).
        align: Alignment of the first row of each group.
        tile: Tokens that one CTA counts.
    """

    packing: Annotated[str, Choice("packing", get_args(Layout), "weft::Packing")]
    groups: int
    rows: int
    align: int
    tile: int = TILE

    @property
    def total(self) -> int:
        """Rows of the whole buffer."""
        return self.rows if self.packing == "contiguous" else self.groups * self.rows

    def tiles(self, shape: Shape) -> int:
        """Return the number of tiles of all sources, which is the grid of the counting kernel."""
        return shape.ranks * -(-shape.tokens // TILE)

    def to_cpp(self) -> str:
        """Return the C++ initialiser."""
        return to_cpp(self, "weft::Grouping")


def build_group_config(
    config: AllToAllConfig, experts: int, max_rows: int | None, align: int, layout: Layout
) -> GroupConfig:
    """Check the arguments of `ExpertGroups` and build its config.

    Args:
        config: Config of the all-to-all.
        experts: Number of local experts.
        max_rows: See `ExpertGroups`; None for the worst case.
        align: See `ExpertGroups`.
        layout: See `ExpertGroups`.

    Raises:
        InvalidArgument: a value is out of range.
    """
    shape = config.shape
    check_choice("layout", layout, get_args(Layout))
    align = check_int("align", align, 1, MAX_ALIGN)
    if experts > MAX_GROUPS:
        raise InvalidArgument(
            f"{experts} local experts exceed the limit of {MAX_GROUPS} of grouping"
        )
    if max_rows is None:
        tokens = shape.ranks * shape.tokens
        if layout == "masked":
            max_rows = -(-tokens // align) * align
        else:
            entries = tokens * min(shape.top_k, experts)
            max_rows = (entries + min(experts, entries) * (align - 1)) // align * align
            max_rows = max(max_rows, align)  # a rank without experts also allocates a buffer
    max_rows = check_int("max_rows", max_rows, 1, MAX_ROWS)
    if max_rows % align:
        raise_invalid("max_rows", max_rows, f"a positive multiple of align, {align}")
    total = max_rows * (max(experts, 1) if layout == "masked" else 1)
    if total > MAX_ROWS:
        raise InvalidArgument(
            f"{layout} layout of {experts} experts with max_rows={max_rows} has {total} rows, "
            f"which exceeds the limit of {MAX_ROWS}: pass a smaller max_rows"
        )
    return GroupConfig(layout, max(experts, 1), max_rows, align)
