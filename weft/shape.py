# SPDX-License-Identifier: Apache-2.0
"""Sizes that specialise the all-to-all kernels; equal on every rank, compiled as constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch

from weft.errors import InvalidArgument
from weft.fields import Array, Choice, Size, check_fields, config_hash, to_cpp

MAX_PLANES = 8
MAX_RANKS = 72  # of one NVLink domain (GB200 NVL72)
NARROW_RANKS = 32  # a set of at most this many ranks fits one 32-bit word
MAX_TOP_K = 32
MAILBOX_BYTES = 4096  # size of the page of host memory that the kernels of a rank can write
FP8_BLOCK = 128  # number of columns per scale
COMBINES = ("pull", "push", "push_fp8", "gemm_push")  # weft::Combine
REDUCES = ("receiver", "sender")  # weft::Reduce
QUANTS = ("none", "fp8", "mxfp8")
MAX_ROW_BYTES = 1 << 24

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one all-to-all. Mirrors `weft::Shape` in alltoall/layout.cuh.

    Attributes:
        ranks: Number of expert-parallel ranks, 1..72.
        tokens: Maximum number of tokens of one rank in one call.
        top_k: Experts per token, 1..32.
        experts: Number of experts of the layer, over all ranks.
        hidden: Elements of a combine row.
        dtype: Type of a combine row: "bf16", "fp16" or "fp32".
        row_bytes: Bytes of one token's row in each of the 1..8 payload tensors.
        combine: How rows are returned: "pull", "push", "push_fp8" or "gemm_push".
        quant: Quantization of the first payload by dispatch: "none", "fp8" or "mxfp8".
        mapped: Whether a table maps experts to ranks instead of contiguous blocks.
        stats: Number of statistics per rank, sent to all ranks with its tokens, 0..2^20.
        reduce: Rounding of the sum with gemm_push: "sender" or "receiver".

    Raises:
        InvalidArgument: a size is out of range; names the size and its limits.
    """

    ranks: Annotated[int, Size("ranks", 1, MAX_RANKS)]
    tokens: Annotated[int, Size("max_tokens", 1, 1 << 20)]
    top_k: Annotated[int, Size("top_k", 1, MAX_TOP_K)]
    experts: Annotated[int, Size("num_experts", 1, 1 << 16)]
    hidden: Annotated[int, Size("hidden", 1, 1 << 20)]
    dtype: Annotated[str, Choice("dtype", DTYPE_NAMES.values(), "weft::DType")]
    row_bytes: Annotated[tuple[int, ...], Array("payloads", length="planes")]
    combine: Annotated[str, Choice("combine", COMBINES, "weft::Combine")] = "pull"
    quant: Annotated[str, Choice("quantize", QUANTS, "weft::Quant")] = "none"
    mapped: bool = False
    stats: Annotated[int, Size("stats", 0, 1 << 20)] = 0
    reduce: Annotated[str, Choice("reduce", REDUCES, "weft::Reduce")] = "sender"

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.combine == "push_fp8" or self.quant != "none") and self.hidden % FP8_BLOCK:
            raise InvalidArgument(
                f"hidden is {self.hidden}; FP8 rows consist of blocks of {FP8_BLOCK} columns: "
                f"pad hidden to {-(-self.hidden // FP8_BLOCK) * FP8_BLOCK}"
            )
        if self.out_bytes % 16:
            per_vector = 16 // self.element_bytes
            padded = -(-self.hidden // per_vector) * per_vector
            raise InvalidArgument(
                f"a combine row of {self.hidden} x {self.dtype} has {self.out_bytes} bytes; "
                f"rows must be multiples of 16 bytes: pad hidden to {padded}"
            )
        if not 1 <= len(self.row_bytes) <= MAX_PLANES:
            raise InvalidArgument(
                f"{len(self.row_bytes)} payload tensors; one dispatch supports 1..{MAX_PLANES}"
            )
        for plane, row in enumerate(self.row_bytes):
            if not 1 <= row <= MAX_ROW_BYTES:
                raise InvalidArgument(
                    f"payloads[{plane}] has rows of {row} bytes; the limit is 1..{MAX_ROW_BYTES}"
                )

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of a combine row."""
        return ITEM_BYTES[self.dtype]

    @property
    def out_bytes(self) -> int:
        """Bytes of one combine row."""
        return self.hidden * self.element_bytes

    @property
    def returned_bytes(self) -> int:
        """Bytes of the owner's slot for one pushed row; 0 if rows are pulled."""
        if self.combine == "pull":
            return 0
        if self.combine != "push_fp8":
            return self.out_bytes
        return -(-(self.hidden + self.hidden // FP8_BLOCK * 4) // 128) * 128

    @property
    def returned_rows(self) -> int:
        """Number of the owner's slots for pushed rows: one per rank, or one per choice."""
        return self.tokens * (self.top_k if self.combine == "gemm_push" else self.ranks)

    @property
    def padded_top_k(self) -> int:
        """Value of top_k padded to a multiple of 4 (16-byte vectors)."""
        return -(-self.top_k // 4) * 4

    @property
    def descriptor(self) -> int:
        """First 24 bits of this Shape's hash."""
        return config_hash(self)

    def to_cpp(self) -> str:
        """Return the C++ initialiser of this Shape."""
        return to_cpp(self, "weft::Shape")
