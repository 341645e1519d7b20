# SPDX-License-Identifier: Apache-2.0
"""Configuration of a low-latency all-to-all: checked arguments, its shape and its memory."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from ctypes import c_uint16, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Annotated

import torch

from weft.arguments import check_bools, check_choice, check_int
from weft.errors import InvalidArgument
from weft.fields import Choice, Size, check_fields, check_values, config_hash, to_cpp
from weft.group.wire import JSON
from weft.heap.header import (
    RING_TIMELINES,
    CallRecord,
    Site,
    header_bytes,
    layout_max_ranks,
    rank_words,
)
from weft.hosts.config import HostsConfig, HostSpan, build_host_placement
from weft.placement import Placement, build_placement
from weft.runtime.check import check_tensor, check_tokens, check_topk
from weft.runtime.layout import LINE, CppValues, Memory, build_size_function, cpp_offset, round_up
from weft.runtime.options import ExchangeSpec
from weft.shape import DTYPE_NAMES, FP8_BLOCK, ITEM_BYTES, MAX_RANKS, MAX_TOP_K, REDUCES

MAX_TOKENS, MAX_LOCAL_EXPERTS, MAX_EXPERTS = 8192, 1024, 4096
CHUNK_TOKENS = 24  # chunk_tokens in lowlatency/layout.cuh
MAX_COUNTERS = 8192  # ranks x local experts: a CTA has a counter for each in shared memory
GROUPS = (32, 64, 128)
SCALES = ("fp32_row", "fp32_col", "ue8m0")
RECIPES = ("weft", "deep_ep", "triton_dist", "quantised")
QUANTS = (None, "fp8")
COMBINES = ("push", "gemm_push")
COMBINE_DTYPES = (None, "fp8")
MAX_SLOTS = 2  # one result is received while the experts process the other


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
        ("call", CallRecord),
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


@functools.cache
def get_trace_record_type(ranks: int) -> type[ctypes.Structure]:
    """Return the mirror of `weft::TraceRecord` in lowlatency/trace.cuh for a number of ranks."""

    class TraceRecord(ctypes.Structure):
        _fields_ = (
            ("epoch", c_uint64),
            ("start_ns", c_uint64),
            ("end_ns", c_uint64),
            ("credited", c_uint32),
            ("learned", c_uint32),
            ("ended", c_uint32),
            ("phase", c_uint16),
            ("role", c_uint16),
            ("team", c_uint32),
            ("units", c_uint32),
            ("waited", c_uint32 * layout_max_ranks(ranks)),
        )

    return TraceRecord


MAX_TRACES = 1024  # max_traces in lowlatency/trace.cuh


def get_trace_shape(ranks: int) -> tuple[int, int, int]:
    """Return the shape in bytes of the records of profiled kernels: [rounds, teams, record]."""
    return RING_TIMELINES, MAX_TRACES, ctypes.sizeof(get_trace_record_type(ranks))


@dataclass(frozen=True, slots=True)
class LowLatencyShape:
    """Sizes of one low-latency all-to-all. Mirrors `weft::LowLatencyShape`.

    The other attributes are those of `weft.LowLatencyAllToAll`.

    Attributes:
        local: Maximum number of experts of one rank.
        group: Columns that share a scale; 0 if rows are not quantised.
        combine_fp8: Whether returned rows are FP8.
        gemm_push: Whether the kernel that computes a row stores it at its owner.
        mapped: Whether a table maps experts to ranks instead of contiguous blocks.
        recipe: Arithmetic by which dispatched rows are quantised: "weft", or that of a library
            which weft.compat replaces. "quantised": rows arrive quantised from another host.

    Raises:
        InvalidArgument: a size is out of range; names the size and its limits.
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
        if not 1 <= self.local <= MAX_LOCAL_EXPERTS:
            raise InvalidArgument(
                f"{self.local} experts on one rank exceed the limit of {MAX_LOCAL_EXPERTS}: use "
                "more ranks, or spread num_experts evenly with expert_map"
            )
        if self.top_k > self.experts:
            raise InvalidArgument(
                f"top_k is {self.top_k}, but the layer has {self.experts} experts (num_experts)"
            )
        if self.ranks * self.local > MAX_COUNTERS:
            raise InvalidArgument(
                f"{self.local} experts on one of {self.ranks} ranks; the product exceeds the limit "
                f"of {MAX_COUNTERS}: spread the experts evenly"
            )
        if self.group:
            check_choice("group_size", self.group, GROUPS)
        unit = max(self.group, FP8_BLOCK if self.combine_fp8 else 16)
        if self.hidden % unit:
            raise InvalidArgument(
                f"hidden is {self.hidden}; it must be a multiple of {unit} (of 16, of group_size, "
                f"of {FP8_BLOCK} with combine_dtype='fp8'): pad it to {round_up(self.hidden, unit)}"
            )

    @property
    def rows(self) -> int:
        """Maximum number of rows of one expert."""
        return self.ranks * self.tokens

    @property
    def blocks(self) -> int:
        """Number of scales of a row."""
        return self.hidden // self.group if self.group else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a dispatched row: values, then scales, each padded to 16 bytes."""
        values = self.hidden if self.group else self.hidden * ITEM_BYTES[self.dtype]
        return round_up(values, 16) + round_up(4 * self.blocks, 16)

    @property
    def sent_bytes(self) -> int:
        """Bytes of a dispatched row with its weights, if they are sent."""
        weights = 4 * self.top_k if self.reduce == "sender" else 0
        return self.row_bytes + round_up(weights, 16)

    @property
    def back_bytes(self) -> int:
        """Bytes of a row that is returned to its owner."""
        if self.combine_fp8:
            return self.hidden + round_up(4 * (self.hidden // FP8_BLOCK), 16)
        return self.hidden * ITEM_BYTES[self.dtype]

    @property
    def chunks(self) -> int:
        """Number of mask words that a source sends for each expert."""
        return -(-self.tokens // CHUNK_TOKENS)

    @property
    def inbox_bytes(self) -> tuple[int, int]:
        """Bytes of the inbox for dispatched rows, and for returned rows."""
        back_rows = self.ranks if self.reduce == "sender" else self.top_k
        return self.rows * self.sent_bytes, self.tokens * back_rows * self.back_bytes

    @property
    def descriptor(self) -> int:
        """24 bits of this shape's hash."""
        return config_hash(self, "low ")

    def to_cpp(self) -> str:
        """Return the C++ initialiser."""
        return to_cpp(self, "weft::LowLatencyShape")


@dataclass(frozen=True, slots=True)
class LowLatencyOffsets:
    """Byte offsets of the parts of a share.

    Flags come before `tokens`. From `tokens` on, every word is a sentinel (all ones) until it
    arrives.
    """

    share_bytes: int
    progress: int
    tokens: int
    token_masks: int
    choices: int
    rows: int
    back: int

    @classmethod
    def from_shape(cls, shape: LowLatencyShape) -> LowLatencyOffsets:
        """Return the offsets of a shape; mirrors `LowLatencyShare` in lowlatency/layout.cuh."""
        flags, progress = round_up(8 * shape.ranks), header_bytes(shape.ranks)
        tokens = progress + LINE + 3 * flags
        token_masks = tokens + 2 * flags
        choices = token_masks + round_up(8 * shape.ranks * shape.chunks * shape.local)
        rows = choices + round_up(8 * shape.rows * shape.top_k)
        dispatched, returned = shape.inbox_bytes
        share = rows + round_up(dispatched + returned)
        return cls(share, progress, tokens, token_masks, choices, rows, rows + dispatched)

    def get_expected_offsets(self) -> CppValues:
        """Return C++ expressions of these offsets, for a shape named S, and their values."""
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
            (f"{cpp_offset(share, 'inbox.rows')} + S.sent_bytes()", self.back),
            *((cpp_offset(share, member), offset) for member, offset in members.items()),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LowLatencySpec(ExchangeSpec):
    """Arguments of `LowLatencyAllToAll` that determine its config."""

    quantize: str | None = "fp8"
    combine: str | None = "push"
    group_size: int = 128
    scale: str = "fp32_row"
    reduce: str | None = None
    slots: int = 2
    profile: bool = False


@dataclass(frozen=True, slots=True)
class LowLatencyConfig(HostsConfig):
    """Checked arguments of a low-latency all-to-all, and the sizes that follow from them."""

    shape: LowLatencyShape
    offsets: LowLatencyOffsets
    dtype: torch.dtype
    placement: Placement
    max_tokens: int
    slots: int
    profile: bool
    span: HostSpan | None = None

    @classmethod
    def from_spec(
        cls,
        spec: LowLatencySpec,
        *,
        recipe: str = "weft",
        hosts: Sequence[Sequence[int]] = (),
        host: int = 0,
    ) -> LowLatencyConfig:
        """Check the arguments of `LowLatencyAllToAll` and build its config.

        `hosts` and `host` are as in `AllToAllConfig.from_spec`.

        Raises:
            InvalidArgument: names the argument, its value and the allowed values.
        """
        check_bools(profile=spec.profile)
        sizes = check_values(LowLatencyShape, **spec.sizes())
        ranks, num_experts = sizes["ranks"], sizes["experts"]
        slots = check_int("slots", spec.slots, 1, MAX_SLOTS)
        dtype = check_choice("dtype", spec.dtype, DTYPE_NAMES)
        quantize = check_choice("quantize", spec.quantize, QUANTS)
        combine = check_choice("combine", spec.combine, COMBINES)
        combine_dtype = check_choice("combine_dtype", spec.combine_dtype, COMBINE_DTYPES)
        reduce = _resolve_reduce(spec.reduce, combine)
        scale = check_choice("scale", spec.scale, SCALES)
        group_size = check_choice("group_size", spec.group_size, GROUPS)
        _check_gemm_push(combine, combine_dtype, reduce, slots)
        num_ranks = max(1, len(hosts)) * ranks
        placement = local = build_placement(spec.expert_map, num_experts, num_ranks)
        max_tokens = sizes["tokens"]
        multi_host = len(hosts) > 1
        if multi_host:
            local = build_host_placement(placement, tuple(hosts[host]))
            sizes |= {"tokens": len(hosts) * max_tokens, "experts": len(local.ranks)}
            recipe = "quantised"  # rows are quantised before they leave their host
        shape = LowLatencyShape(
            **sizes,
            local=max(len(local.experts_of(rank)) for rank in range(ranks)),
            dtype=DTYPE_NAMES[dtype],
            group=group_size if quantize else 0,
            scales=scale if quantize else "fp32_row",
            reduce=reduce,
            combine_fp8=combine_dtype == "fp8",
            gemm_push=combine == "gemm_push",
            mapped=local.explicit,
            recipe=recipe if quantize else "weft",
        )
        span = None
        if multi_host:
            span = HostSpan(
                ranks=tuple(map(tuple, hosts)),
                host=host,
                max_tokens=max_tokens,
                top_k=shape.top_k,
                hidden=shape.hidden,
                dtype=dtype,
                row_bytes=(shape.row_bytes,),
                stats=0,
                quantize=None,
                returns_fp8=shape.combine_fp8,
                placement=placement,
                num_results=slots,
                drops_repeats=True,
            )
        return cls(
            shape=shape,
            offsets=LowLatencyOffsets.from_shape(shape),
            dtype=dtype,
            placement=placement,
            max_tokens=max_tokens,
            slots=slots,
            profile=spec.profile,
            span=span,
        )

    @property
    def sends_weights(self) -> bool:
        """Whether dispatch sends the weights with the rows, and combine uses those."""
        return self.shape.reduce == "sender" or self.span is not None

    def manifest(self) -> dict[str, JSON]:
        """Return the arguments that the ranks compare at creation, by name."""
        return HostsConfig.manifest(self) | {"slots": self.slots}

    def check_dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        device: torch.device,
    ) -> int:
        """Check the tensors of a dispatch and return the number of tokens.

        Raises:
            InvalidArgument: a tensor has the wrong shape, dtype, device or stride, or topk_weights
                is None with reduce="sender".
            TokenOverflow: there are more tokens than `max_tokens`.
        """
        tokens = check_topk(topk_ids, topk_weights, self.shape.top_k, device)
        check_tokens(tokens, self.max_tokens)
        if topk_weights is None and self.shape.reduce == "sender":
            raise InvalidArgument(
                "topk_weights is None in dispatch, but with reduce='sender', the default, the "
                "experts' ranks weight the rows: pass topk_weights to dispatch, or construct "
                "LowLatencyAllToAll with reduce='receiver'"
            )
        size, dtypes = (tokens, self.shape.hidden), (self.dtype,)
        check_tensor(
            "x", x, shape=size, dtypes=dtypes, device=device, aligned=16, rows_of="topk_ids"
        )
        return tokens

    def get_result_shapes(
        self, num_local_experts: int
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each tensor of one result buffer, by name.

        Column-major scales have the shape of their memory.
        """
        s = self.shape
        padded, words = -(-s.rows // 4) * 4, -(-s.blocks // 4)
        scales = {
            "fp32_row": ((num_local_experts, s.rows, s.blocks), torch.float32),
            "fp32_col": ((num_local_experts, s.blocks, padded), torch.float32),
            "ue8m0": ((num_local_experts, words, padded), torch.int32),
        }
        entries = (s.ranks, s.tokens, s.top_k)
        return {
            "x": (
                (num_local_experts, s.rows, s.hidden),
                torch.float8_e4m3fn if s.group else self.dtype,
            ),
            "scales": scales[s.scales] if s.group else ((0,), torch.float32),
            "counts": ((num_local_experts,), torch.int32),
            "source": ((num_local_experts, s.rows), torch.int32),
            "ranges": ((num_local_experts, s.ranks, 2), torch.int32),
            "position": ((0,) if s.gemm_push else entries, torch.int32),
            "weights": (entries if s.reduce == "sender" else (0,), torch.float32),
            "source_tokens": ((s.ranks,), torch.int32),
            "expected": ((s.tokens, 1 + rank_words(s.ranks)), torch.int32),
            "dst_addr": ((num_local_experts, s.rows) if s.gemm_push else (0,), torch.int64),
        }

    def view_scales(self, scales: torch.Tensor) -> torch.Tensor | None:
        """Return the scales in the public layout; None without quantisation."""
        if not self.shape.group:
            return None
        return scales if self.shape.scales == "fp32_row" else scales.mT[:, : self.shape.rows]

    @property
    def memory(self) -> Memory:
        """Memory of the rank with the most experts."""
        s = self.shape
        slot = sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in self.get_result_shapes(s.local).values()
        )
        profile = math.prod(get_trace_shape(s.ranks)) if self.profile else 0
        return Memory(shared=self.share_bytes, ordinary=self.slots * slot + profile)


def _resolve_reduce(reduce: str | None, combine: str) -> str:
    """Return `reduce`, or its default for None. Raises InvalidArgument."""
    if reduce is None:
        return "receiver" if combine == "gemm_push" else "sender"
    return check_choice("reduce", reduce, REDUCES)


def _check_gemm_push(combine: str, combine_dtype: str | None, reduce: str, slots: int) -> None:
    """Raise InvalidArgument for options that combine="gemm_push" does not support."""
    if combine == "gemm_push" and (combine_dtype, reduce, slots) != (None, "receiver", 1):
        raise InvalidArgument(
            f"combine is 'gemm_push', combine_dtype {combine_dtype!r}, reduce {reduce!r}, slots "
            f"{slots!r}: the caller's kernel stores rows one by one, in dtype, and for one "
            "dispatch at a time: use reduce='receiver' and slots=1, and leave combine_dtype out"
        )


def _compute_memory(spec: LowLatencySpec) -> Memory:
    return LowLatencyConfig.from_spec(spec).memory


memory_bytes = build_size_function(
    LowLatencySpec,
    _compute_memory,
    """Return the memory that the rank with the most experts allocates.

    Accepts the constructor's sizes, and `ranks`. Allocates nothing.

    Raises:
        InvalidArgument: as the constructor.
    """,
)
