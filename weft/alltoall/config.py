# SPDX-License-Identifier: Apache-2.0
"""Configuration of an all-to-all: checked arguments, the Shape and the offsets of its share."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_uint32, c_uint64
from dataclasses import dataclass, replace

import torch

from weft.arguments import (
    check_choice,
    check_instance,
    check_int,
    check_ints,
    format_value,
    raise_invalid,
)
from weft.errors import InvalidArgument
from weft.fields import check_values
from weft.group.wire import JSON
from weft.heap.header import CallRecord, Site, header_bytes, rank_words
from weft.hosts.config import HostsConfig, HostSpan
from weft.placement import Placement, build_placement
from weft.runtime.check import check_tensor, check_tokens, check_topk
from weft.runtime.layout import LINE, CppValues, build_share_bytes_function, cpp_offset, round_up
from weft.runtime.options import ExchangeSpec
from weft.shape import DTYPE_NAMES, MAX_PLANES, MAX_ROW_BYTES, Shape


@dataclass(frozen=True, slots=True)
class Payload:
    """Row shape and dtype of one payload tensor.

    `Payload((7168,), torch.float8_e4m3fn)` describes a tensor `[tokens, 7168]`.

    Attributes:
        shape: Shape after the token axis.
        dtype: Dtype of the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


SCALES = {
    "fp8": lambda hidden: Payload((hidden // 128,), torch.float32),
    "mxfp8": lambda hidden: Payload((hidden // 32,), torch.float8_e8m0fnu),
}
COMBINES = ("pull", "push", "gemm_push")
COMBINE_DTYPES = (None, "fp8")
QUANTIZED_DTYPES = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)


class DispatchArgs(ctypes.Structure):
    """Arguments of the dispatch entry."""

    _fields_ = (
        ("site", Site),
        ("payload", c_uint64 * MAX_PLANES),
        ("ids", c_uint64),
        ("weights", c_uint64),
        ("placement", c_uint64),
        ("num_tokens", c_uint64),
        ("tokens", c_uint32),
        ("ids_bytes", c_uint32),
        ("stats", c_uint64),
        ("source_rows", c_uint32),
        ("reserved", c_uint32),
        ("call", CallRecord),
    )


class CombineArgs(ctypes.Structure):
    """Arguments of the combine entry."""

    _fields_ = (
        ("site", Site),
        ("out", c_uint64),
        ("add", c_uint64),
        ("tokens", c_uint32),
        ("pushers", c_uint32),
        ("strips", c_uint32),
        ("source_rows", c_uint32),
    )


@dataclass(frozen=True, slots=True)
class Offsets:
    """Byte offsets of the parts of one rank's share; mirrors `Share<S>` in alltoall/layout.cuh.

    In order: header, inbox (flags, counts, durations, routes, payload planes, returned rows,
    stats), outbox, destinations, saved routing.
    """

    share_bytes: int
    counts: int
    route: int
    route_bytes: int
    planes: tuple[int, ...]
    pitches: tuple[int, ...]
    stats: int  # 0 where the Shape has none
    returned: int  # 0 where rows are pulled
    outbox: int
    destinations: int

    @classmethod
    def from_shape(cls, shape: Shape) -> Offsets:
        """Return the offsets of a Shape."""
        slots, uses_gemm_push = shape.ranks * shape.tokens, shape.combine == "gemm_push"
        counts = header_bytes(shape.ranks) + 2 * round_up(8 * shape.ranks)
        route = counts + 2 * round_up(4 * shape.ranks)
        route_bytes = 8 * shape.padded_top_k
        offset = route + round_up(slots * route_bytes)
        planes, pitches = [], []
        for size in shape.row_bytes:
            pitch = round_up(size, 16)
            planes.append(offset)
            pitches.append(pitch)
            offset += round_up(slots * pitch)
        # An empty aligned C++ struct takes one line: the end of the recursion over planes together
        # with unused returned rows, unused statistics, and the outbox of gemm_push. At the end of
        # the share it takes a byte.
        offset += LINE
        returned = round_up(shape.returned_rows * shape.returned_bytes)
        stats = offset + (returned or LINE)
        outbox = offset + returned + LINE
        if shape.stats:
            outbox = stats + round_up(4 * shape.ranks * shape.stats)
        destinations = outbox + (LINE if uses_gemm_push else round_up(slots * shape.out_bytes))
        end = destinations + 4 * rank_words(shape.ranks) * shape.tokens
        share_bytes = round_up(end + 1)
        if uses_gemm_push:
            share_bytes = round_up(round_up(end) + 8 * shape.tokens * shape.padded_top_k)
        return cls(
            share_bytes=share_bytes,
            counts=counts,
            route=route,
            route_bytes=route_bytes,
            planes=tuple(planes),
            pitches=tuple(pitches),
            stats=stats if shape.stats else 0,
            returned=offset if returned else 0,
            outbox=outbox,
            destinations=destinations,
        )

    def get_expected_offsets(self) -> CppValues:
        """Return C++ expressions of these offsets, for a Shape named S, and their values."""
        members = {
            "inbox.counts": self.counts,
            "inbox.route": self.route,
            "outbox": self.outbox,
            "destinations": self.destinations,
            "inbox.stats": self.stats,
            "inbox.returned": self.returned,
        }
        for plane, offset in enumerate(self.planes):
            members["inbox.payload" + ".rest" * plane + ".first"] = offset
        return [
            ("sizeof(weft::Share<S>)", self.share_bytes),
            ("sizeof(weft::Route<S>)", self.route_bytes),
            *((cpp_offset("Share<S>", m), offset) for m, offset in members.items() if offset),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllSpec(ExchangeSpec):
    """Arguments of `AllToAll` that determine its config."""

    payloads: Sequence[Payload] | None = None
    stats: int = 0
    reduce: str = "sender"


@dataclass(frozen=True, slots=True)
class AllToAllConfig(HostsConfig):
    """Checked arguments of an all-to-all, and the sizes that follow from them.

    Attributes:
        shape: Sizes that are compiled into the kernels.
        offsets: Byte offsets of the parts of a share.
        dtype: Dtype of combine rows.
        inputs: Payloads that callers pass.
        payloads: Payloads that are delivered; differ from `inputs` if dispatch quantises.
        planes: Plane of each input. A quantised first input is delivered as two planes, values and
            scales.
        placement: Rank of each expert.
        max_tokens: Maximum number of tokens of one rank in one call.
        stats: Number of statistics that each rank passes to a dispatch.
        span: Hosts of the group, if there are several.
    """

    shape: Shape
    offsets: Offsets
    dtype: torch.dtype
    inputs: tuple[Payload, ...]
    payloads: tuple[Payload, ...]
    planes: tuple[int, ...]
    placement: Placement
    max_tokens: int
    stats: int
    span: HostSpan | None = None

    @classmethod
    def from_spec(
        cls, spec: AllToAllSpec, *, hosts: Sequence[Sequence[int]] = (), host: int = 0
    ) -> AllToAllConfig:
        """Check the arguments of `AllToAll` and build its config.

        With several hosts, `hosts` are the ranks of each (`Group.host_ranks`), and the Shape
        describes the part on host `host`.

        Raises:
            InvalidArgument: names the argument, its value and the allowed values.
        """
        sizes = check_values(Shape, **spec.sizes(), stats=spec.stats)
        ranks, num_experts, hidden = sizes["ranks"], sizes["experts"], sizes["hidden"]
        dtype = check_choice("dtype", spec.dtype, DTYPE_NAMES)
        quantize = check_choice("quantize", spec.quantize, (None, *SCALES))
        mode = _get_combine_mode(spec.combine, spec.combine_dtype)
        payloads = spec.payloads
        inputs = (Payload((hidden,), dtype),) if payloads is None else check_payloads(payloads)
        delivered = _build_delivered_payloads(inputs, hidden, dtype, quantize)
        shape = Shape(
            **sizes,
            dtype=DTYPE_NAMES[dtype],
            row_bytes=tuple(p.row_bytes for p in delivered),
            combine=mode,
            quant=quantize or "none",
            mapped=spec.expert_map is not None,
            reduce=spec.reduce,
        )
        if shape.reduce == "receiver" and mode != "gemm_push":
            raise InvalidArgument(
                f"reduce is 'receiver' with combine={spec.combine!r}, where each rank adds its own "
                "experts' rows: use combine='gemm_push', or leave reduce out"
            )
        if shape.top_k > num_experts:
            raise InvalidArgument(
                f"top_k is {spec.top_k}, but the layer has {num_experts} experts (num_experts)"
            )
        placement = build_placement(spec.expert_map, num_experts, max(1, len(hosts)) * ranks)
        scales = len(delivered) - len(inputs)
        planes = tuple(i + scales if i else 0 for i in range(len(inputs)))
        span = None
        if len(hosts) > 1:
            span = HostSpan(
                ranks=tuple(map(tuple, hosts)),
                host=host,
                max_tokens=shape.tokens,
                top_k=shape.top_k,
                hidden=hidden,
                dtype=dtype,
                row_bytes=shape.row_bytes,
                stats=shape.stats,
                quantize=quantize,
                returns_fp8=mode == "push_fp8",
                placement=placement,
            )
            shape, planes = _build_host_shape(shape, span), tuple(range(len(delivered)))
        return cls(
            shape=shape,
            offsets=Offsets.from_shape(shape),
            dtype=dtype,
            inputs=inputs,
            payloads=delivered,
            planes=planes,
            placement=placement,
            max_tokens=sizes["tokens"],
            stats=sizes["stats"],
            span=span,
        )

    @property
    def quantized(self) -> bool:
        """Whether dispatch quantises the first payload."""
        return len(self.payloads) > len(self.inputs)

    def manifest(self) -> dict[str, JSON]:
        """Return the arguments that the ranks compare at creation, by name."""
        manifest = HostsConfig.manifest(self)
        manifest["payloads"] = [f"{list(p.shape)} {p.dtype}" for p in self.payloads]
        if self.span is not None:
            manifest |= {"quantize": self.span.quantize, "stats": self.stats}
        return manifest

    def check_dispatch(
        self,
        tensors: Sequence[torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
        stats: torch.Tensor | None,
        device: torch.device,
    ) -> int:
        """Check the tensors of a dispatch and return the number of tokens.

        Raises:
            InvalidArgument: a tensor has the wrong shape, dtype, device or stride.
            TokenOverflow: there are more tokens than `max_tokens`.
        """
        tokens = check_topk(topk_ids, topk_weights, self.shape.top_k, device)
        check_tokens(tokens, self.max_tokens)
        if len(tensors) != len(self.inputs):
            raise InvalidArgument(
                f"x has {len(tensors)} payload tensors; this all-to-all was built for "
                f"{len(self.inputs)}: pass one for each declared Payload"
            )
        for plane, (tensor, payload) in enumerate(zip(tensors, self.inputs, strict=True)):
            name = "x" if len(tensors) == 1 else f"x[{plane}]"
            check_tensor(
                name,
                tensor,
                shape=(tokens, *payload.shape),
                dtypes=(payload.dtype,),
                device=device,
                aligned=payload.row_bytes,
                rows_of="topk_ids",
            )
        int32 = (torch.int32,)
        if num_tokens is not None:
            check_tensor(
                "num_tokens", num_tokens, shape=(1,), dtypes=int32, device=device, aligned=1
            )
        if stats is not None or self.stats:
            self._check_stats(stats, device)
        return tokens

    def check_rows(self, rows: int | None, tokens: int) -> int:
        """Return the number of slots for each source. Raises InvalidArgument."""
        if rows is None:
            return self.max_tokens
        rows = check_int("rows", rows, 1, self.max_tokens)
        if rows < tokens:
            raise InvalidArgument(
                f"rows is {rows}, but this rank sends {tokens} tokens: pass the largest token "
                "count of any rank, equal on all ranks"
            )
        return rows

    def _check_stats(self, stats: torch.Tensor | None, device: torch.device) -> None:
        """Raise InvalidArgument if `stats` does not match the statistics of this all-to-all."""
        size = self.stats
        if stats is None and size:
            raise InvalidArgument(
                f"stats is None in an all-to-all built with stats={size}; pass int32 [{size}] in "
                "every call, zeros if there is nothing to report"
            )
        if stats is not None and not size:
            text = list(stats.shape) if isinstance(stats, torch.Tensor) else format_value(stats)
            raise InvalidArgument(
                f"stats is {text} in an all-to-all built with stats=0; leave it out, or build the "
                "all-to-all with the number of statistics that each rank sends"
            )
        if stats is not None:
            int32 = (torch.int32,)
            check_tensor("stats", stats, shape=(size,), dtypes=int32, device=device, aligned=1)


def _build_host_shape(shape: Shape, span: HostSpan) -> Shape:
    """Return the Shape of one host's part, with its experts and the rows of all hosts' ranks.

    Rows are quantised before they reach the host, and each rank forwards the token counts that it
    received together with the statistics.
    """
    local, hosts = span.local_placement, span.hosts
    return replace(
        shape,
        tokens=hosts * shape.tokens,
        experts=len(local.ranks),
        quant="none",
        mapped=local.explicit,
        stats=hosts * (1 + shape.stats),
    )


def _get_combine_mode(combine: str | None, combine_dtype: str | None) -> str:
    """Return `Shape.combine` for the public arguments.

    Raises:
        InvalidArgument: a value is unknown, or FP8 rows are not pushed.
    """
    check_choice("combine", combine, (None, *COMBINES))
    check_choice("combine_dtype", combine_dtype, COMBINE_DTYPES)
    if combine_dtype is None:
        return combine or "pull"
    if combine not in (None, "push"):
        raise InvalidArgument(
            f"combine_dtype is {combine_dtype!r} with combine={combine!r}, but only pushed rows "
            "can be FP8: use combine='push', or leave it out"
        )
    return "push_fp8"


memory_bytes = build_share_bytes_function(AllToAllSpec, AllToAllConfig.from_spec)


def check_payloads(payloads: Sequence[Payload]) -> tuple[Payload, ...]:
    """Check a caller's payloads and return them as a tuple.

    Raises:
        InvalidArgument: names the invalid payload.
    """
    if not isinstance(payloads, list | tuple):
        raise_invalid("payloads", payloads, "a list of weft.Payload, or None for only x")
    if not 1 <= len(payloads) <= MAX_PLANES:
        raise InvalidArgument(
            f"payloads has {len(payloads)} payload tensors; a dispatch supports 1..{MAX_PLANES}"
        )
    checked_payloads = []
    for plane, payload in enumerate(payloads):
        name = f"payloads[{plane}]"
        check_instance(
            name, payload, Payload, "Payload((7168,), torch.bfloat16) has rows of 7168 numbers"
        )
        dtype = check_instance(f"{name}.dtype", payload.dtype, torch.dtype)
        shape = check_instance(
            f"{name}.shape", payload.shape, tuple, "the shape of a row, without the token axis"
        )
        if dtype in QUANTIZED_DTYPES:
            raise_invalid(f"{name}.dtype", dtype, "a dtype without separate scales")
        checked_payloads.append(
            Payload(check_ints(f"{name}.shape", shape, 1, MAX_ROW_BYTES), dtype)
        )
    return tuple(checked_payloads)


def _build_delivered_payloads(
    inputs: tuple[Payload, ...], hidden: int, dtype: torch.dtype, quantize: str | None
) -> tuple[Payload, ...]:
    """Return the delivered payloads: a quantised first one becomes FP8 values and scales."""
    if quantize is None:
        return inputs
    if inputs[0] != Payload((hidden,), dtype):
        raise InvalidArgument(
            f"quantize={quantize!r} with a first payload of {list(inputs[0].shape)} "
            f"{inputs[0].dtype}; it must be [{hidden}] {dtype}, like the rows of combine"
        )
    values = Payload((hidden,), torch.float8_e4m3fn)
    return (values, SCALES[quantize](hidden), *inputs[1:])
