# SPDX-License-Identifier: Apache-2.0
"""Calls of the fused all-reduce: options, checks and kernel arguments.

`Prepared` is what calls with equal keys share, see weft.runtime.prepared.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from weft.allreduce.config import ADDRESSES, ReduceArgs, ReduceConfig
from weft.arguments import check_choice, check_float, check_instance, format_value, raise_invalid
from weft.errors import InvalidArgument
from weft.heap.header import Site
from weft.runtime.check import (
    OverlapRule,
    build_tensors_key,
    check_alignment,
    check_tensor,
    check_tokens,
    find_overlap,
    get_memory_range,
    raise_not_tensor,
)
from weft.runtime.identity import CODINGS, make_allreduce_record
from weft.shape import DTYPE_NAMES

GROUP_SIZES, GROUP_SCALES = (128,), ("fp32", "ue8m0")


@dataclass(frozen=True, slots=True, eq=False)
class FP8Static:
    """Quantise with a static scale: `q = e4m3(norm * (1 / scale))`, saturating at 448.

    Attributes:
        scale: float32 `[1]` on the device.
    """

    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class FP8Token:
    """Quantise with a dynamic scale per row, float32 `[tokens, 1]`.

    `scale = max(amax * fl(1 / 448), 2^-9 / 448)` and `q = e4m3(norm / scale)`, as in
    flashinfer.comm and in torch on GPUs. A row with an Inf or a NaN has a NaN scale and NaN values.
    """


@dataclass(frozen=True, slots=True)
class FP8Group:
    """Quantise with a scale per 128 columns, in the same formats as dispatch.

    Attributes:
        size: Columns per scale: 128.
        scale: "fp32": float32 `[tokens, hidden / 128]`. "ue8m0": powers of two from 2^-33 as bytes,
            four in an int32 `[tokens, ceil(hidden / 512)]` with strides `(1, tokens rounded up to
            4)`.
    """

    size: int = 128
    scale: str = "fp32"

    def __post_init__(self) -> None:
        check_choice("size", self.size, GROUP_SIZES)
        check_choice("scale", self.scale, GROUP_SCALES)


Quant = FP8Static | FP8Token | FP8Group


@dataclass(frozen=True, slots=True, eq=False)
class MoEFinalize:
    """Prologue of an all-reduce that computes this rank's rows as weighted sums of expert results.

    `x[t] = routed_scaling_factor * (sum over k of rows[index[t, k]] * scales[t, k]) + shared[t]`,
    in fp32, in the order of k, rounded once.

    Attributes:
        rows: `[n, hidden]`, results of the experts.
        index: int32 `[tokens, top_k]`, -1 for none. Other out-of-range entries are dropped and
            raised by `check()`.
        scales: `[tokens, top_k]`, float32 or the rows' dtype. None means 1.
        shared: `[tokens, hidden]`, such as a shared expert's result, or None.
        routed_scaling_factor: Factor of the routed sum.
    """

    rows: torch.Tensor
    index: torch.Tensor
    scales: torch.Tensor | None = None
    shared: torch.Tensor | None = None
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """Outputs of one call; None for those that were not requested.

    Attributes:
        out: `[tokens, hidden]`, the rounded sum.
        residual: `[tokens, hidden]`, the sum plus the residual, rounded.
        norm: `[tokens, hidden]`, RMSNorm of `residual`.
        quant: float8_e4m3fn `[tokens, hidden]` of `norm`.
        scale: Scales of `quant`, in the layout of the quant option.
    """

    out: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    quant: torch.Tensor | None = None
    scale: torch.Tensor | None = None


def quant_scheme(quant: Quant | None) -> str:
    """Return the name in CODINGS of a quant option. Raises InvalidArgument for another type."""
    if quant is None:
        return "none"
    if isinstance(quant, FP8Static):
        return "static"
    if isinstance(quant, FP8Token):
        return "token"
    if isinstance(quant, FP8Group):
        return "group" if quant.scale == "fp32" else "group_ue8m0"
    raise InvalidArgument(
        f"quant is {format_value(quant)}; pass FP8Static(scale), FP8Token(), FP8Group(128, "
        "scale=...) or None. NVFP4 needs conversions of Blackwell GPUs and is not supported"
    )


def default_outputs(
    residual: torch.Tensor | None, weight: torch.Tensor | None, quant: Quant | None
) -> dict[str, bool]:
    """Return whether a call writes each output by default."""
    return {
        "out": residual is None and weight is None,
        "residual_out": residual is not None,
        "norm_out": weight is not None and quant is None,
        "quant_out": quant is not None,
        "scale_out": quant is not None and not isinstance(quant, FP8Static),
    }


# A tensor to write, True to allocate one, False for no output, or None for the default.
OutputRequest = torch.Tensor | bool | None
OutputAllocator = Callable[[], torch.Tensor]
GROUP = 128
OUTPUTS = ("out", "residual_out", "norm_out", "quant_out", "scale_out")
FIRST_OUTPUT, END_OUTPUT = ADDRESSES.index("out"), ADDRESSES.index("scale_out") + 1
# Names of ADDRESSES in errors, qualified for fields of a MoEFinalize or of a quant option.
PUBLIC_NAMES = tuple(
    f"prologue.{name}"
    if name in ("rows", "index", "scales", "shared")
    else "quant.scale"
    if name == "scale"
    else name
    for name in ADDRESSES
)
# Inputs that an output may alias exactly, and inputs that it must not overlap.
MAY_ALIAS, MUST_NOT_OVERLAP = (
    tuple(ADDRESSES.index(name) for name in names)
    for names in (("x", "residual", "shared"), ("weight", "rows", "scales", "index", "scale"))
)
OUT_AND_RESIDUAL = FIRST_OUTPUT, ADDRESSES.index("residual")
_CONSTANTS = struct.Struct("<ff")  # eps, weight_bias
_FACTOR = struct.Struct("<f")
_BLOCK = struct.Struct(f"={len(ADDRESSES)}Q")
_START = ReduceArgs.x.offset
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

Key = tuple[object, ...]


class FusedCall(NamedTuple):
    """Arguments of one call; tensors are in the order of ADDRESSES."""

    x: torch.Tensor | None
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    out: OutputRequest
    residual_out: OutputRequest
    norm_out: OutputRequest
    quant_out: OutputRequest
    scale_out: OutputRequest
    quant: Quant | None
    prologue: MoEFinalize | None
    eps: float
    weight_bias: float

    def tensors(self) -> list[Any]:
        """Return the argument for each of ADDRESSES: a tensor, a bool or None."""
        quant, prologue = self.quant, self.prologue
        scale = quant.scale if isinstance(quant, FP8Static) else None
        if prologue is None:
            return [*self[:8], scale, None, None, None, None]
        if not isinstance(prologue, MoEFinalize):
            return [*self[:8], scale, prologue, None, None, None]
        parts = (prologue.rows, prologue.index, prologue.scales, prologue.shared)
        return [*self[:8], scale, *parts]

    def key(self, tensors: Sequence[Any], backend: str, layer: int) -> tuple[Key | None, list[int]]:
        """Return a cache key of all properties that the full check reads, and the addresses.

        The key contains only the alignment of an address. Constants are compared by their bits,
        because 0.0 equals -0.0. The key is None if an argument has a wrong type, has no memory, or
        requires a gradient.
        """
        try:
            constants = _CONSTANTS.pack(self.eps, self.weight_bias)
            scheme = quant_scheme(self.quant)
            moe = self.prologue
            factor = None if moe is None else _FACTOR.pack(moe.routed_scaling_factor)
        except (TypeError, AttributeError, OverflowError, struct.error):
            return None, []  # the full check raises the error
        key, addresses = build_tensors_key(tensors)
        return None if key is None else (backend, layer, scheme, constants, factor, key), addresses


class CheckedCall:
    """A call that passed the full check. The constructor allocates outputs that were not passed.

    Attributes:
        call: The call.
        tokens: Number of tokens.
        scheme: Name of the quant option in CODINGS.
        reduced: All outputs, including newly allocated ones.
        allocators: Index in ADDRESSES of each newly allocated output, and a function that allocates
            another.

    Raises:
        InvalidArgument: an argument is invalid.
        TokenOverflow: there are more tokens than `max_tokens`.
    """

    def __init__(self, call: FusedCall, config: ReduceConfig, device: torch.device) -> None:
        self.call, self._config, self._device = call, config, device
        self._dtype = _DTYPES[config.dtype]
        check_float("eps", call.eps, minimum=0.0)
        check_float("weight_bias", call.weight_bias)
        self.scheme = quant_scheme(call.quant)
        self.tokens = tokens = self._count_tokens(call.x, call.prologue)
        check_tokens(tokens, config.tokens)
        if call.x is not None:
            self._check_rows("x", call.x, tokens)
        if call.residual is not None:
            source = "prologue.index" if call.x is None else "x"
            self._check_rows("residual", call.residual, tokens, rows_of=source)
        if call.weight is not None:
            dtypes = self._dtype, torch.float32
            self._check("weight", call.weight, (config.hidden,), *dtypes, aligned=16)
        self._check_quant(call.quant, call.weight)
        allocators: list[tuple[int, OutputAllocator]] = []
        outputs: list[torch.Tensor | None] = []
        for index, (name, output) in enumerate(self._select_outputs(call).items(), FIRST_OUTPUT):
            if output is True:
                allocate = self._output_allocator(name, tokens, call.quant)
                allocators.append((index, allocate))
                outputs.append(allocate())
            else:
                outputs.append(self._check_output(name, tokens, call.quant, output))
        self.reduced, self.allocators = Reduced(*outputs), tuple(allocators)

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """Tensors of the call in the order of ADDRESSES."""
        r, tensors = self.reduced, self.call.tensors()
        tensors[FIRST_OUTPUT:END_OUTPUT] = (r.out, r.residual, r.norm, r.quant, r.scale)
        return tensors

    def prepare(
        self, backend: str, entry: str, site: Site, *, layer: int
    ) -> tuple[PreparedCall, list[int]]:
        """Build the state that calls with equal keys share.

        Args:
            backend: Name of the backend.
            entry: Name of the kernel's entry.
            site: Memory of this rank.
            layer: Number of the calling lease.

        Returns:
            The state, and the addresses of this call.

        Raises:
            InvalidArgument: an output overlaps another tensor, or a constant does not fit a
                float32.
        """
        tensors = self.tensors
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        rules = _overlap_rules(tensors, [index for index, _ in self.allocators])
        _check_overlaps(addresses, rules)
        args = self._build_arguments(backend, site, layer)
        unused = [i for i in range(FIRST_OUTPUT, END_OUTPUT) if tensors[i] is None]
        return PreparedCall(
            entry, self.tokens, args, self.allocators, tuple(unused), rules
        ), addresses

    def _build_arguments(self, backend: str, site: Site, layer: int) -> ReduceArgs:
        call, reduced = self.call, self.reduced
        prologue, weight = call.prologue, call.weight
        a = ReduceArgs(site=site, tokens=self.tokens, eps=call.eps, weight_bias=call.weight_bias)
        a.weight_is_fp32 = weight is not None and weight.dtype == torch.float32
        a.coding = CODINGS[self.scheme] if reduced.quant is not None else 0
        a.scale_stride = self._get_scale_stride()
        if prologue is not None:
            a.row_limit, a.top_k = prologue.rows.shape[0], prologue.index.shape[1]
            a.routed_scaling_factor = float(prologue.routed_scaling_factor)
            scales = prologue.scales
            a.scales_are_fp32 = scales is not None and scales.dtype == torch.float32
        a.call = make_allreduce_record(
            site.descriptor,
            layer,
            self.tokens,
            backend,
            parts=(call.residual is not None, weight is not None, reduced.out is not None),
            coding=a.coding,
            eps=call.eps,
            weight_bias=call.weight_bias,
        )
        return a

    def _get_scale_stride(self) -> int:
        """Return the distance between columns of packed scales in int32 words, or 0."""
        scale = self.reduced.scale
        if scale is None or scale.dtype != torch.int32:
            return 0
        return scale.stride(1) if scale.shape[1] > 1 else math.ceil(self.tokens / 4) * 4

    def _count_tokens(self, x: torch.Tensor | None, prologue: MoEFinalize | None) -> int:
        if (x is None) == (prologue is None):
            raise InvalidArgument(
                f"x is {format_value(x)} and prologue is {format_value(prologue)}; pass exactly "
                "one of them"
            )
        if prologue is None:
            if not isinstance(x, torch.Tensor):
                raise_not_tensor("x", x)
            if x.is_nested or x.dim() != 2:
                shape = "nested" if x.is_nested else list(x.shape)
                raise InvalidArgument(
                    f"x is {shape}; it must be a dense tensor [tokens, {self._config.hidden}]"
                )
            return x.shape[0]
        check_instance("prologue", prologue, MoEFinalize)
        index, rows, scales = prologue.index, prologue.rows, prologue.scales
        self._check("prologue.index", index, (None, None), torch.int32)
        tokens, top_k = index.shape
        self._check_rows("prologue.rows", rows, None)
        if scales is not None:
            self._check("prologue.scales", scales, (tokens, top_k), torch.float32, self._dtype)
        factor = check_float("prologue.routed_scaling_factor", prologue.routed_scaling_factor)
        if abs(factor) > torch.finfo(torch.float32).max:
            raise_invalid(
                "prologue.routed_scaling_factor", factor, "a number that a float32 can hold"
            )
        if prologue.shared is not None:
            self._check_rows("prologue.shared", prologue.shared, tokens, rows_of="prologue.index")
        return tokens

    def _check(
        self,
        name: str,
        tensor: torch.Tensor,
        size: Sequence[int | None],
        *dtypes: torch.dtype,
        aligned: int = 1,
        rows_of: str = "",
    ) -> None:
        check_tensor(
            name,
            tensor,
            shape=size,
            dtypes=dtypes,
            device=self._device,
            aligned=aligned,
            rows_of=rows_of,
        )

    def _check_rows(
        self, name: str, tensor: torch.Tensor, tokens: int | None, *, rows_of: str = ""
    ) -> None:
        size = (tokens, self._config.hidden)
        self._check(name, tensor, size, self._dtype, aligned=16, rows_of=rows_of)

    def _check_quant(self, quant: Quant | None, weight: torch.Tensor | None) -> None:
        if quant is None:
            return
        if weight is None:
            raise InvalidArgument(
                "weight is None, but quant quantises the normed rows: pass weight (ones for an "
                "RMSNorm without weight)"
            )
        if isinstance(quant, FP8Static):
            self._check("quant.scale", quant.scale, (1,), torch.float32)
        if isinstance(quant, FP8Group) and self._config.hidden % GROUP:
            raise InvalidArgument(
                f"hidden is {self._config.hidden}; FP8Group needs a multiple of {GROUP}: pad "
                f"hidden to {-(-self._config.hidden // GROUP) * GROUP}"
            )

    def _select_outputs(self, call: FusedCall) -> dict[str, torch.Tensor | bool]:
        """Resolve the request for each output to a tensor, True or False."""
        defaults = default_outputs(call.residual, call.weight, call.quant)
        has_scale = defaults["scale_out"]
        requirements = {
            "out": (True, ""),
            "residual_out": (call.residual is not None, "residual, which is None"),
            "norm_out": (call.weight is not None, "weight, which is None"),
            "quant_out": (call.quant is not None, "quant, which is None"),
            "scale_out": (
                has_scale,
                f"a quant with dynamic scales; it is {format_value(call.quant)}",
            ),
        }
        requested: dict[str, torch.Tensor | bool] = {}
        for name in OUTPUTS:
            output = getattr(call, name)
            if output is not None and not isinstance(output, bool | torch.Tensor):
                raise_not_tensor(name, output)
            requested[name] = defaults[name] if output is None else output
            is_available, requirement = requirements[name]
            if requested[name] is not False and not is_available:
                raise InvalidArgument(f"{name} needs {requirement}")
        if (requested["quant_out"] is False) != (requested["scale_out"] is False) and has_scale:
            raise InvalidArgument("pass both quant_out and scale_out, or neither")
        return requested

    def _check_output(
        self, name: str, tokens: int, quant: Quant | None, output: torch.Tensor | bool
    ) -> torch.Tensor | None:
        """Check and return an output that the caller passed; None if it was not requested."""
        if output is False:
            return None
        assert output is not True
        if name == "scale_out":
            return self._check_scale_output(tokens, quant, output)
        dtype = torch.float8_e4m3fn if name == "quant_out" else self._dtype
        hidden = self._config.hidden
        self._check(name, output, (tokens, hidden), dtype, aligned=hidden * dtype.itemsize)
        return output

    def _check_scale_output(
        self, tokens: int, quant: Quant | None, scale: torch.Tensor
    ) -> torch.Tensor:
        if not _is_packed(quant):
            self._check("scale_out", scale, (tokens, self._num_groups(quant)), torch.float32)
            return scale
        if not isinstance(scale, torch.Tensor):
            raise_not_tensor("scale_out", scale)
        check_alignment("scale_out", scale, scale.itemsize)  # also raises for sparse tensors
        columns, pitch = -(-self._num_groups(quant) // 4), -(-tokens // 4) * 4
        has_shape = scale.dtype == torch.int32 and tuple(scale.shape) == (tokens, columns)
        has_strides = (tokens <= 1 or scale.stride(0) == 1) and (
            columns == 1 or scale.stride(1) >= tokens
        )
        if not (has_shape and has_strides and scale.device == self._device):
            raise InvalidArgument(
                f"scale_out is {scale.dtype} {list(scale.shape)} with strides "
                f"{scale.stride()} on {scale.device}; it must be torch.int32 "
                f"[{tokens}, {columns}] with strides (1, {pitch}) on {self._device}"
            )
        return scale

    def _output_allocator(self, name: str, tokens: int, quant: Quant | None) -> OutputAllocator:
        """Return a function that allocates an output."""
        size, dtype = (tokens, self._config.hidden), self._dtype
        if name == "quant_out":
            dtype = torch.float8_e4m3fn
        elif name == "scale_out" and _is_packed(quant):
            columns = -(-self._num_groups(quant) // 4)
            return functools.partial(_allocate_packed_scale, tokens, columns, self._device)
        elif name == "scale_out":
            size, dtype = (tokens, self._num_groups(quant)), torch.float32
        return functools.partial(torch.empty, size, dtype=dtype, device=self._device)

    def _num_groups(self, quant: Quant | None) -> int:
        return self._config.hidden // GROUP if isinstance(quant, FP8Group) else 1


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """State that checked calls with equal keys share.

    Attributes:
        entry: Name of the kernel's entry.
        tokens: Number of tokens.
        args: Kernel arguments; `fill_addresses` sets the addresses.
        allocators: See `CheckedCall`.
        unused: Indices of outputs that were not requested.
        overlap_rules: Outputs and the tensors that they must not overlap.
    """

    entry: str
    tokens: int
    args: ReduceArgs
    allocators: tuple[tuple[int, OutputAllocator], ...]
    unused: tuple[int, ...]
    overlap_rules: tuple[OverlapRule, ...]

    def allocate_missing_outputs(self, tensors: list[Any], addresses: list[int]) -> Reduced:
        """Allocate requested outputs that were not passed, and return all outputs.

        Sets their entries in `tensors` and `addresses`. They need no check, because newly allocated
        memory overlaps no other tensor.
        """
        for index, allocate in self.allocators:
            output = allocate()
            tensors[index], addresses[index] = output, output.data_ptr()
        for index in self.unused:
            tensors[index] = None
        return Reduced(*tensors[FIRST_OUTPUT:END_OUTPUT])

    def fill_addresses(self, addresses: Sequence[int]) -> ReduceArgs:
        """Write the addresses into the kernel arguments and return them; calls share the struct."""
        _BLOCK.pack_into(self.args, _START, *addresses)
        return self.args


def _is_packed(quant: Quant | None) -> bool:
    return isinstance(quant, FP8Group) and quant.scale == "ue8m0"


def _allocate_packed_scale(tokens: int, columns: int, device: torch.device) -> torch.Tensor:
    """Allocate packed scales; zeros, because kernels do not write the padding after the tokens."""
    scales = torch.zeros((columns, -(-tokens // 4) * 4), dtype=torch.int32, device=device)
    return scales.t()[:tokens]


def _check_overlaps(addresses: Sequence[int], rules: Iterable[OverlapRule]) -> None:
    """Raise InvalidArgument for an output that overlaps another tensor.

    Outputs may alias x exactly. All outputs except `out`, which is written before residual is read,
    may alias residual exactly.
    """
    pair = find_overlap(addresses, rules)
    if pair is not None:
        raise InvalidArgument(
            f"output {PUBLIC_NAMES[pair[0]]!r} overlaps {PUBLIC_NAMES[pair[1]]!r} in memory; pass "
            "a separate tensor. Outputs may be exactly x, and outputs other than 'out' exactly "
            "residual"
        )


def _overlap_rules(
    tensors: Sequence[torch.Tensor | None], new: Sequence[int]
) -> tuple[OverlapRule, ...]:
    """Return rules that passed outputs overlap neither inputs nor each other.

    `new` are the indices of newly allocated outputs, which cannot overlap other tensors.
    """
    spans = {i: (_span_bytes(t), t.dtype) for i, t in enumerate(tensors) if t is not None}
    outputs = [i for i in range(FIRST_OUTPUT, END_OUTPUT) if i in spans and i not in new]
    rules: list[OverlapRule] = []
    for i, index in enumerate(outputs):
        others = []
        for other in (*outputs[:i], *MAY_ALIAS, *MUST_NOT_OVERLAP):
            if other in spans:
                may_alias = other in MAY_ALIAS and spans[other] == spans[index]
                may_alias = may_alias and (index, other) != OUT_AND_RESIDUAL
                others.append((other, spans[other][0], may_alias))
        rules.append((index, spans[index][0], tuple(others)))
    return tuple(rules)


def _span_bytes(tensor: torch.Tensor) -> int:
    start, end = get_memory_range(tensor)
    return end - start
