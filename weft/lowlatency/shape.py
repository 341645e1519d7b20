"""LowShape: the sizes of a low-latency all-to-all, told to C++ as one literal, and its layout."""

from __future__ import annotations

import ctypes
from ctypes import c_uint16, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Annotated

from weft.arguments import one_of
from weft.errors import InvalidArgument
from weft.fields import Choice, Size, check_fields, hash_byte, literal
from weft.memory.header import HEADER_BYTES
from weft.runtime.args import Site
from weft.runtime.layout import LINE, Numbers, offset, up
from weft.shape import DTYPE_NAMES, FP8_BLOCK, ITEM_BYTES, MAX_RANKS, MAX_TOP_K

MAX_TOKENS, MAX_LOCAL, MAX_EXPERTS = 8192, 1024, 4096
CHUNK_TOKENS = 24  # chunk_tokens in lowlatency/layout.cuh
MAX_TABLE = 8192  # ranks x local experts: a CTA keeps a number for each in shared memory
GROUPS = (32, 64, 128)
SCALES = ("fp32_row", "fp32_col", "ue8m0")
RECIPES = ("weft", "deep_ep", "triton_dist")
REDUCES = ("receiver", "sender")


class RoutingRecord(ctypes.Structure):
    """Mirror of `weft::RoutingRecord` in lowlatency/layout.cuh."""

    _fields_ = (
        ("position", c_uint64),
        ("weights", c_uint64),
        ("source_tokens", c_uint64),
        ("expected", c_uint64),
        ("dst_addr", c_uint64),
    )


class LowLatencyDispatchArgs(ctypes.Structure):
    """Mirror of `weft::LowLatencyDispatchArgs`."""

    _fields_ = (
        ("site", Site),
        ("x", c_uint64),
        ("ids", c_uint64),
        ("weights", c_uint64),
        ("placement", c_uint64),
        ("rows", c_uint64),
        ("scales", c_uint64),
        ("counts", c_uint64),
        ("source", c_uint64),
        ("ranges", c_uint64),
        ("routing", RoutingRecord),
        ("traces", c_uint64),
        ("tokens", c_uint32),
        ("ids_bytes", c_uint32),
        ("own_experts", c_uint32),
        ("senders", c_uint32),
    )


class LowLatencyCombineArgs(ctypes.Structure):
    """Mirror of `weft::LowLatencyCombineArgs`."""

    _fields_ = (
        ("site", Site),
        ("y", c_uint64),
        ("ids", c_uint64),
        ("weights", c_uint64),
        ("placement", c_uint64),
        ("out", c_uint64),
        ("add", c_uint64),
        ("counts", c_uint64),
        ("routing", RoutingRecord),
        ("traces", c_uint64),
        ("tokens", c_uint32),
        ("ids_bytes", c_uint32),
        ("own_experts", c_uint32),
        ("senders", c_uint32),
        ("dispatch_id", c_uint32),
        ("reserved", c_uint32),
    )


class TraceRecord(ctypes.Structure):
    """Mirror of `weft::TraceRecord` in lowlatency/trace.cuh."""

    _fields_ = (
        ("epoch", c_uint64),
        ("start_ns", c_uint64),
        ("end_ns", c_uint64),
        ("granted", c_uint32),
        ("learned", c_uint32),
        ("ended", c_uint32),
        ("phase", c_uint16),
        ("role", c_uint16),
        ("team", c_uint32),
        ("units", c_uint32),
        ("waited", c_uint32 * MAX_RANKS),
    )


MAX_TRACES = 1024  # max_traces in lowlatency/trace.cuh


@dataclass(frozen=True, slots=True)
class LowShape:
    """Sizes of one low-latency all-to-all; `weft::LowLatencyShape` is the same struct.

    local: experts of the rank that has most.  group: columns that share a scale, 0 for rows that
    are not quantised.  combine_fp8: returned rows are FP8.  gemm_push: whoever makes a row stores
    it at its owner.  recipe: whose arithmetic quantises dispatched rows, weft's own or that of the
    library whose calls weft.compat serves.  The others as in `weft.LowLatencyAllToAll`.

    Raises InvalidArgument naming the size and its limits.
    """

    ranks: Annotated[int, Size("ranks", 1, MAX_RANKS)]
    tokens: Annotated[int, Size("max_tokens", 1, MAX_TOKENS)]
    top_k: Annotated[int, Size("top_k", 1, MAX_TOP_K)]
    experts: Annotated[int, Size("num_experts", 1, MAX_EXPERTS)]
    local: int
    hidden: Annotated[int, Size("hidden", 16, 1 << 16)]
    dtype: Annotated[str, Choice("dtype", DTYPE_NAMES.values(), "weft::DType")]
    group: int = 128
    scales: Annotated[str, Choice("scale", SCALES, "weft::Scales")] = "fp32_row"
    reduce: Annotated[str, Choice("reduce", REDUCES, "weft::Reduce")] = "receiver"
    combine_fp8: bool = False
    gemm_push: bool = False
    mapped: bool = False
    recipe: Annotated[str, Choice("recipe", RECIPES, "weft::Recipe")] = "weft"

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.local <= MAX_LOCAL:
            raise InvalidArgument(
                f"{self.local} experts on one rank; one may hold {MAX_LOCAL}: take more ranks, or "
                "spread num_experts evenly with expert_map"
            )
        if self.top_k > self.experts:
            raise InvalidArgument(
                f"top_k is {self.top_k}, but the layer has {self.experts} experts (num_experts)"
            )
        if self.ranks * self.local > MAX_TABLE:
            raise InvalidArgument(
                f"{self.local} experts on one of {self.ranks} ranks; ranks times that number may "
                f"be {MAX_TABLE} at most: spread the experts evenly"
            )
        if self.group:
            one_of("group_size", self.group, GROUPS)
        unit = max(self.group, FP8_BLOCK if self.combine_fp8 else 16)
        if self.hidden % unit:
            raise InvalidArgument(
                f"hidden is {self.hidden}; it must be a multiple of {unit} (of 16, of group_size, "
                f"of {FP8_BLOCK} with combine_dtype='fp8'): pad it to {up(self.hidden, unit)}"
            )

    @property
    def rows(self) -> int:
        """Rows that one expert can get."""
        return self.ranks * self.tokens

    @property
    def blocks(self) -> int:
        """Scales of a row."""
        return self.hidden // self.group if self.group else 0

    @property
    def sent_bytes(self) -> int:
        """Bytes of a row on its way out: numbers, scales, weights, each in whole 16 bytes."""
        numbers = self.hidden if self.group else self.hidden * ITEM_BYTES[self.dtype]
        weights = 4 * self.top_k if self.reduce == "sender" else 0
        return up(numbers, 16) + up(4 * self.blocks, 16) + up(weights, 16)

    @property
    def back_bytes(self) -> int:
        """Bytes of a row on its way back to its owner."""
        if self.combine_fp8:
            return self.hidden + up(4 * (self.hidden // FP8_BLOCK), 16)
        return self.hidden * ITEM_BYTES[self.dtype]

    @property
    def chunks(self) -> int:
        """Words in which a source tells of its choices of one expert."""
        return -(-self.tokens // CHUNK_TOKENS)

    @property
    def rows_bytes(self) -> tuple[int, int]:
        """Bytes of an inbox where dispatched rows lie, and where returned rows do."""
        back_rows = self.ranks if self.reduce == "sender" else self.top_k
        return self.rows * self.sent_bytes, self.tokens * back_rows * self.back_bytes

    @property
    def descriptor(self) -> int:
        """Eight bits of this shape's hash, as flags carry them."""
        return hash_byte(self, "low ")

    def literal(self) -> str:
        """The C++ initialiser."""
        return literal(self, "weft::LowLatencyShape")


@dataclass(frozen=True, slots=True)
class LowLayout:
    """Where the parts of a share lie, in bytes; flags stand before `tokens`.

    tokens: the first word that is all ones while it is blank; so is everything behind it.
    """

    share_bytes: int
    progress: int
    tokens: int
    token_masks: int
    choices: int
    rows: int
    back: int

    @classmethod
    def of(cls, shape: LowShape) -> LowLayout:
        """The layout of a shape; `LowLatencyShare` in lowlatency/layout.cuh is the same."""
        flags = up(8 * shape.ranks)
        tokens = HEADER_BYTES + LINE + 3 * flags
        token_masks = tokens + 2 * flags
        choices = token_masks + up(8 * shape.ranks * shape.chunks * shape.local)
        rows = choices + up(8 * shape.rows * shape.top_k)
        dispatched, returned = shape.rows_bytes
        share = rows + up(dispatched + returned)
        return cls(share, HEADER_BYTES, tokens, token_masks, choices, rows, rows + dispatched)

    def asserted(self) -> Numbers:
        """C++ expressions of these offsets, after the Shape literal S, and their values."""
        members = {
            "progress": self.progress,
            "inbox.tokens": self.tokens,
            "inbox.token_masks": self.token_masks,
            "inbox.choices": self.choices,
            "inbox.rows": self.rows,
        }
        share = "LowLatencyShare<S>"
        return [
            (f"sizeof(weft::{share})", self.share_bytes),
            (f"{offset(share, 'inbox.rows')} + S.sent_bytes()", self.back),
            *((offset(share, member), at) for member, at in members.items()),
        ]
