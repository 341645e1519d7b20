# SPDX-License-Identifier: Apache-2.0
"""Config of an all-reduce: checked arguments and the layout of a share."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Annotated

import torch

from weft.arguments import check_choice, check_int
from weft.errors import InvalidArgument
from weft.fields import Choice, Size, check_fields, config_hash, to_cpp, values_by_argument
from weft.group.wire import JSON
from weft.heap.header import CallRecord, Site, header_bytes
from weft.runtime.layout import CppValues, build_share_bytes_function, cpp_offset, round_up
from weft.shape import DTYPE_NAMES, ITEM_BYTES, MAX_RANKS

MAX_TOKENS = (1 << 20) - 1  # a call word has 20 bits for the tokens
MAX_VECTORS = 4096  # 16-byte words of a row: eight CTAs of 512 threads
# Maximum tokens of the one-shot backend, by number of ranks. For more tokens, two-shot transfers
# fewer bytes or, on two ranks, the same number faster. One-shot is faster up to about 7 tokens of
# 7168 on 8 ranks, 24 on 4 and 270 on 2 (512 of 4096); more slots allow measurements.
ONESHOT_TOKENS = {2: 512, 3: 64, 4: 64}
DEFAULT_ONESHOT_TOKENS = 32  # for other numbers of ranks
EPILOGUES_AT = ("owner", "receiver")
MISSING = ("error", "drop")


class ReduceArgs(ctypes.Structure):
    """Mirror of `weft::ReduceArgs` in allreduce/layout.cuh."""

    _fields_ = (
        ("site", Site),
        ("x", c_uint64),
        ("residual", c_uint64),
        ("weight", c_uint64),
        ("out", c_uint64),
        ("residual_out", c_uint64),
        ("norm_out", c_uint64),
        ("quant_out", c_uint64),
        ("scale_out", c_uint64),
        ("scale", c_uint64),
        ("rows", c_uint64),
        ("index", c_uint64),
        ("scales", c_uint64),
        ("shared", c_uint64),
        ("call", CallRecord),
        ("row_limit", c_uint32),
        ("top_k", c_uint32),
        ("tokens", c_uint32),
        ("eps", c_float),
        ("weight_bias", c_float),
        ("weight_is_fp32", c_uint32),
        ("scales_are_fp32", c_uint32),
        ("coding", c_uint32),
        ("scale_stride", c_uint32),
        ("pushers", c_uint32),
        ("routed_scaling_factor", c_float),
    )


# Names of the tensors of a call, in the order of their adjacent addresses in ReduceArgs.
ADDRESSES = (
    *("x", "residual", "weight"),
    *("out", "residual_out", "norm_out", "quant_out", "scale_out"),
    *("scale", "rows", "index", "scales", "shared"),
)


@dataclass(frozen=True, slots=True)
class ReduceConfig:
    """Sizes of one all-reduce. Mirrors `weft::Reduction` in allreduce/layout.cuh.

    Attributes:
        ranks: Number of ranks, 1..72.
        tokens: Maximum number of tokens of a call.
        direct: Maximum number of tokens of a call with the one-shot backend.
        hidden: Elements of a row.
        dtype: Type of a row.
        epilogue_at: Rank that adds the residual and computes a row's statistics in two-shot: the
            "owner", which sums the row, or each "receiver".
        missing: Behaviour of a call after a rank has exited: "error" or "drop".

    Raises:
        InvalidArgument: a size is out of range.
    """

    ranks: int
    tokens: Annotated[int, Size("max_tokens", 1, MAX_TOKENS)]
    direct: int
    hidden: Annotated[int, Size("hidden", 8, 8 * MAX_VECTORS)]
    dtype: Annotated[str, Choice("dtype", DTYPE_NAMES.values(), "weft::DType")]
    epilogue_at: Annotated[str, Choice("epilogue_at", EPILOGUES_AT, "weft::EpilogueAt")] = "owner"
    missing: Annotated[str, Choice("missing", MISSING, "weft::Missing")] = "error"

    @classmethod
    def from_args(
        cls,
        *,
        ranks: int,
        max_tokens: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        epilogue_at: str = "owner",
        missing: str = "error",
    ) -> ReduceConfig:
        """Check the arguments of `AllReduce` and build its config."""
        dtype, ranks = (
            check_choice("dtype", dtype, DTYPE_NAMES),
            check_int("ranks", ranks, 1, 1 << 16),
        )
        max_tokens = check_int("max_tokens", max_tokens, 1, MAX_TOKENS)
        direct = min(max_tokens, ONESHOT_TOKENS.get(ranks, DEFAULT_ONESHOT_TOKENS))
        if check_choice("missing", missing, MISSING) == "drop" or ranks == 1:
            direct = max_tokens  # oneshot is the only backend
        return cls(ranks, max_tokens, direct, hidden, DTYPE_NAMES[dtype], epilogue_at, missing)

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.ranks <= MAX_RANKS:
            raise InvalidArgument(
                f"an all-reduce of {self.ranks} ranks; it supports 1 to {MAX_RANKS} ranks of one "
                "NVLink domain"
            )
        if self.hidden % 8:
            raise InvalidArgument(
                f"hidden is {self.hidden}; it must be a multiple of 8: pad rows to "
                f"{round_up(self.hidden, 8)}"
            )
        if self.vectors > MAX_VECTORS:
            raise InvalidArgument(
                f"a row of {self.hidden} x {self.dtype} has {self.row_bytes} bytes, which exceeds "
                f"the limit of {16 * MAX_VECTORS}"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.hidden * self.element_bytes

    @property
    def vectors(self) -> int:
        """16-byte words of one row."""
        return self.row_bytes // 16

    @property
    def owned(self) -> int:
        """Maximum number of tokens that one rank sums in two-shot."""
        return -(-self.tokens // self.ranks)

    @property
    def inbox_offset(self) -> int:
        """Byte offset of the memory that peers write, which begins with the call words."""
        return header_bytes(self.ranks)

    @property
    def rows_offset(self) -> int:
        """Byte offset of the slots for rows, which are initially filled with sentinels."""
        return self.inbox_offset + 2 * round_up(8 * self.ranks, 64)

    @property
    def trailers_offset(self) -> int:
        """Byte offset of the slots for row statistics."""
        if self.ranks == 1:  # layout.cuh has one unused slot of each kind
            return self.rows_offset + sum(round_up(count * self.row_bytes) for count in (2, 2, 1))
        row = (self.ranks - 1) * self.row_bytes
        sizes = (2 * self.direct, 2 * self.owned, self.owned)
        return self.rows_offset + sum(round_up(count * row) for count in sizes)

    @property
    def descriptor(self) -> int:
        """24 bits of this config's hash."""
        return config_hash(self, "reduce ")

    @property
    def share_bytes(self) -> int:
        """Bytes of symmetric memory of one rank."""
        return self.trailers_offset + round_up(16 * max(1, (self.ranks - 1) * self.owned))

    def get_expected_offsets(self) -> CppValues:
        """Return C++ expressions of the offsets for a Reduction named R, and their values."""
        share = "ReductionShare<R>"
        return [
            (f"sizeof(weft::{share})", self.share_bytes),
            (cpp_offset(share, "inbox"), self.inbox_offset),
            (cpp_offset(share, "inbox.direct"), self.rows_offset),
            (cpp_offset(share, "inbox.trailer"), self.trailers_offset),
        ]

    def manifest(self) -> dict[str, JSON]:
        """Return the arguments that the ranks compare at creation, by name."""
        return values_by_argument(self)

    def to_cpp(self) -> str:
        """Return the C++ initialiser."""
        return to_cpp(self, "weft::Reduction")


memory_bytes = build_share_bytes_function(ReduceConfig.from_args, lambda config: config)
