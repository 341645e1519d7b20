# SPDX-License-Identifier: Apache-2.0
"""Shape: the sizes that specialise a kernel. Equal on every rank; told to C++ as one literal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch

from weft.errors import InvalidArgument
from weft.fields import Array, Choice, Size, check_fields, config_hash, literal

MAX_PLANES = 8
MAX_RANKS = 72  # of one NVLink domain (GB200 NVL72)
NARROW_RANKS = 32  # up to so many, a set of ranks is one word of a kernel
MAX_TOP_K = 32
FP8_BLOCK = 128  # columns that share a scale
COMBINES = ("pull", "push", "push_fp8", "gemm_push")  # weft::Combine
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
    """Sizes of one all-to-all. `weft::Shape` in alltoall/layout.cuh is the same struct.

    ranks: ranks of the group (ep_size), 1..72.   tokens: most tokens of one rank in one call.
    top_k: experts per token, 1..32.              experts: experts of the whole layer.
    hidden, dtype: elements and type of a combine row ("bf16", "fp16", "fp32").
    row_bytes: bytes of one token's row, for each payload tensor (1..8 of them).
    combine: how rows are returned: "pull", "push", "push_fp8" or "gemm_push".
    quant: what dispatch makes of the first payload: "none", "fp8" or "mxfp8".
    mapped: experts are where a table says instead of in contiguous blocks.
    stats: numbers that each rank tells all ranks with its tokens, 0..2^20.

    Raises InvalidArgument naming the size and its limits.
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

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.combine == "push_fp8" or self.quant != "none") and self.hidden % FP8_BLOCK:
            raise InvalidArgument(
                f"hidden is {self.hidden}; FP8 rows are made of blocks of {FP8_BLOCK} columns: "
                f"pad hidden to {-(-self.hidden // FP8_BLOCK) * FP8_BLOCK}"
            )
        if self.out_bytes % 16:
            raise InvalidArgument(
                f"a combine row of {self.hidden} x {self.dtype} has {self.out_bytes} bytes; "
                f"rows must be multiples of 16 bytes: pad hidden to {self._padded_hidden()}"
            )
        if not 1 <= len(self.row_bytes) <= MAX_PLANES:
            raise InvalidArgument(
                f"{len(self.row_bytes)} payload tensors; one dispatch carries 1..{MAX_PLANES}"
            )
        for plane, row in enumerate(self.row_bytes):
            if not 1 <= row <= MAX_ROW_BYTES:
                raise InvalidArgument(
                    f"payloads[{plane}] has rows of {row} bytes; they may have 1..{MAX_ROW_BYTES}"
                )

    def _padded_hidden(self) -> int:
        per_vector = 16 // self.element_bytes
        return -(-self.hidden // per_vector) * per_vector

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
        """Bytes of a row's place where rows are pushed to their owner; 0 where they are pulled."""
        if self.combine == "pull":
            return 0
        if self.combine != "push_fp8":
            return self.out_bytes
        return -(-(self.hidden + self.hidden // FP8_BLOCK * 4) // 128) * 128

    @property
    def returned_rows(self) -> int:
        """Rows that have a place of their own at their owner: of each rank, or of each choice."""
        return self.tokens * (self.top_k if self.combine == "gemm_push" else self.ranks)

    @property
    def slots(self) -> int:
        """top_k padded to whole 16-byte vectors."""
        return -(-self.top_k // 4) * 4

    @property
    def descriptor(self) -> int:
        """24 bits of this Shape's hash."""
        return config_hash(self)

    def literal(self) -> str:
        """The C++ initialiser of this Shape."""
        return literal(self, "weft::Shape")
