# SPDX-License-Identifier: Apache-2.0
"""One call of the fused all-reduce: what a caller asks for, its one check, and what a kernel reads.

An engine makes the same few calls for every token: other rows, other weights, equal in everything
else. `Fused.key` is what the check reads of a call except for where its tensors are; a call with a
known key is compared by addresses alone (`Prepared`), and any other goes to the check, which
refuses it in words. Nothing that is kept holds a tensor: memory that a caller gives up is free.
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
from weft.arguments import instance, one_of, real, refuse, shown
from weft.errors import InvalidArgument
from weft.heap.header import Site
from weft.runtime.check import (
    Apart,
    check_alignment,
    check_tensor,
    check_tokens,
    extent,
    overlap,
    refuse_tensor,
    tensors_key,
)
from weft.runtime.identity import CODINGS, reduce_call
from weft.shape import DTYPE_NAMES

GROUP_SIZES, GROUP_SCALES = (128,), ("fp32", "ue8m0")


@dataclass(frozen=True, slots=True, eq=False)
class FP8Static:
    """Quantise with one given scale: `q = e4m3(norm * (1 / scale))`, saturating at 448.

    Attributes:
        scale: float32 `[1]` on the device.
    """

    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class FP8Token:
    """Quantise with one computed scale for each row, float32 `[tokens, 1]`.

    `scale = max(amax * fl(1 / 448), 2^-9 / 448)` and `q = e4m3(norm / scale)`, as in
    flashinfer.comm and in torch on GPUs. A row that holds an Inf or a NaN has a NaN scale and NaN
    numbers.
    """


@dataclass(frozen=True, slots=True)
class FP8Group:
    """Quantise with one scale for each 128 columns, as dispatch does.

    Attributes:
        size: Columns that share a scale: 128.
        scale: "fp32": float32 `[tokens, hidden / 128]`. "ue8m0": powers of two from 2^-33 as bytes,
            four in an int32 `[tokens, ceil(hidden / 512)]` with strides `(1, tokens rounded up to
            4)`.
    """

    size: int = 128
    scale: str = "fp32"

    def __post_init__(self) -> None:
        one_of("size", self.size, GROUP_SIZES)
        one_of("scale", self.scale, GROUP_SCALES)


Quant = FP8Static | FP8Token | FP8Group


@dataclass(frozen=True, slots=True, eq=False)
class MoEFinalize:
    """Make this rank's rows as weighted sums of experts' rows on the way into the all-reduce.

    `x[t] = routed_scaling_factor * (sum over k of rows[index[t, k]] * scales[t, k]) + shared[t]`,
    in fp32, in the order of k, rounded once.

    Attributes:
        rows: `[n, hidden]`, the experts' results.
        index: int32 `[tokens, top_k]`, -1 for none. Others out of range are dropped and raised by
            `check()`.
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
    """Hold the outputs of one call; None for those that were not requested.

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
    """The name of a quant spec in the protocol. Raises InvalidArgument for what is none."""
    if quant is None:
        return "none"
    if isinstance(quant, FP8Static):
        return "static"
    if isinstance(quant, FP8Token):
        return "token"
    if isinstance(quant, FP8Group):
        return "group" if quant.scale == "fp32" else "group_ue8m0"
    raise InvalidArgument(
        f"quant is {shown(quant)}; pass FP8Static(scale), FP8Token(), FP8Group(128, scale=...) or "
        "None. NVFP4 needs a Blackwell GPU's conversion and is not offered"
    )


def implied_outputs(
    residual: torch.Tensor | None, weight: torch.Tensor | None, quant: Quant | None
) -> dict[str, bool]:
    """Which outputs a call has of which the caller said nothing."""
    return {
        "out": residual is None and weight is None,
        "residual_out": residual is not None,
        "norm_out": weight is not None and quant is None,
        "quant_out": quant is not None,
        "scale_out": quant is not None and not isinstance(quant, FP8Static),
    }


Requested = torch.Tensor | bool | None  # an output: a tensor to write, True, False, or by default
Maker = Callable[[], torch.Tensor]
GROUP = 128
OUTPUTS = ("out", "residual_out", "norm_out", "quant_out", "scale_out")
FIRST_OUTPUT, END_OUTPUT = ADDRESSES.index("out"), ADDRESSES.index("scale_out") + 1
# As callers know them: what a MoEFinalize or a quant spec holds is named with its place there.
PUBLIC = tuple(
    f"prologue.{name}"
    if name in ("rows", "index", "scales", "shared")
    else "quant.scale"
    if name == "scale"
    else name
    for name in ADDRESSES
)
# The inputs that an output may exactly replace, and those that it may not touch.
EXACT, NEVER = (
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


class Fused(NamedTuple):
    """One call: sum over ranks, then residual, RMSNorm, FP8. The tensors first, as in ADDRESSES."""

    x: torch.Tensor | None
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    out: Requested
    residual_out: Requested
    norm_out: Requested
    quant_out: Requested
    scale_out: Requested
    quant: Quant | None
    prologue: MoEFinalize | None
    eps: float
    weight_bias: float

    def tensors(self) -> list[Any]:
        """What the caller passed, in the order of ADDRESSES: tensors, or placeholders."""
        quant, prologue = self.quant, self.prologue
        scale = quant.scale if isinstance(quant, FP8Static) else None
        if prologue is None:
            return [*self[:8], scale, None, None, None, None]
        if not isinstance(prologue, MoEFinalize):
            return [*self[:8], scale, prologue, None, None, None]
        parts = (prologue.rows, prologue.index, prologue.scales, prologue.shared)
        return [*self[:8], scale, *parts]

    def key(self, tensors: Sequence[Any], backend: str, layer: int) -> tuple[Key | None, list[int]]:
        """Everything that the check reads of a call except for where it is, and the addresses.

        Of an address only its alignment counts; constants count by their bits, as 0.0 equals -0.0.
        The key is None where an argument is not what it should be, has no memory, or wants a
        gradient.
        """
        try:
            constants = _CONSTANTS.pack(self.eps, self.weight_bias)
            scheme = quant_scheme(self.quant)
            moe = self.prologue
            factor = None if moe is None else _FACTOR.pack(moe.routed_scaling_factor)
        except (TypeError, AttributeError, OverflowError, struct.error):
            return None, []  # the check, which comes next, says what is wrong with it
        key, addresses = tensors_key(tensors)
        return None if key is None else (backend, layer, scheme, constants, factor, key), addresses

    def checked(self, config: ReduceConfig, device: torch.device) -> Checked:
        """Check everything that the host can see, and make the outputs that were not given.

        Raises InvalidArgument and TokenOverflow.
        """
        return Check(config, _DTYPES[config.dtype], device).call(self)


@dataclass(frozen=True, slots=True)
class Checked:
    """A call that was checked.

    reduced: its outputs, those that it makes included.   made: indices in ADDRESSES of these, and
    what makes another.
    """

    call: Fused
    tokens: int
    scheme: str
    reduced: Reduced
    made: tuple[tuple[int, Maker], ...]

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """All tensors of the call, in the order of ADDRESSES."""
        r, found = self.reduced, self.call.tensors()
        found[FIRST_OUTPUT:END_OUTPUT] = (r.out, r.residual, r.norm, r.quant, r.scale)
        return found

    def prepared(
        self, backend: str, entry: str, site: Site, *, layer: int
    ) -> tuple[Prepared, list[int]]:
        """What every call with this key has in common, and the addresses of this one.

        layer: number of the lease that calls.

        Raises InvalidArgument where tensors overlap that must not, or constants are no float32.
        """
        tensors = self.tensors
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        apart = _apart(tensors, [index for index, _ in self.made])
        check_overlaps(addresses, apart)
        args = self._arguments(backend, site, layer)
        unused = [i for i in range(FIRST_OUTPUT, END_OUTPUT) if tensors[i] is None]
        return Prepared(entry, self.tokens, args, self.made, tuple(unused), apart), addresses

    def _arguments(self, backend: str, site: Site, layer: int) -> ReduceArgs:
        call, reduced = self.call, self.reduced
        prologue, weight = call.prologue, call.weight
        a = ReduceArgs(site=site, tokens=self.tokens, eps=call.eps, weight_bias=call.weight_bias)
        a.weight_is_fp32 = weight is not None and weight.dtype == torch.float32
        a.coding = CODINGS[self.scheme] if reduced.quant is not None else 0
        a.scale_stride = self._scale_stride()
        if prologue is not None:
            a.row_limit, a.top_k = prologue.rows.shape[0], prologue.index.shape[1]
            a.routed_scaling_factor = float(prologue.routed_scaling_factor)
            scales = prologue.scales
            a.scales_are_fp32 = scales is not None and scales.dtype == torch.float32
        a.call = reduce_call(
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

    def _scale_stride(self) -> int:
        """int32 words from one column of packed scales to the next."""
        scale = self.reduced.scale
        if scale is None or scale.dtype != torch.int32:
            return 0
        return scale.stride(1) if scale.shape[1] > 1 else math.ceil(self.tokens / 4) * 4


@dataclass(frozen=True, slots=True)
class Prepared:
    """One kind of call that was checked: its entry, and arguments that lack only addresses.

    made: outputs to be made.   unused: indices of those that nobody asked for.
    apart: outputs and the tensors that they must not overlap.
    """

    entry: str
    tokens: int
    args: ReduceArgs
    made: tuple[tuple[int, Maker], ...]
    unused: tuple[int, ...]
    apart: tuple[Apart, ...]

    def serves(self, addresses: Sequence[int]) -> bool:
        """Would the check accept the same call at these addresses?"""
        return overlap(addresses, self.apart) is None

    def outputs(self, tensors: list[Any], addresses: list[int]) -> Reduced:
        """Make the outputs that were not given, and put them into both lists.

        They need no check: no other tensor is in memory that was just allocated.
        """
        for index, maker in self.made:
            made = maker()
            tensors[index], addresses[index] = made, made.data_ptr()
        for index in self.unused:
            tensors[index] = None
        return Reduced(*tensors[FIRST_OUTPUT:END_OUTPUT])

    def arguments(self, addresses: Sequence[int]) -> ReduceArgs:
        """The arguments of a call at these addresses; the same struct for every call."""
        _BLOCK.pack_into(self.args, _START, *addresses)
        return self.args


@dataclass(frozen=True, slots=True)
class Check:
    """The one check of a call on an all-reduce of these sizes."""

    config: ReduceConfig
    dtype: torch.dtype
    device: torch.device

    def call(self, call: Fused) -> Checked:
        """Raises InvalidArgument and TokenOverflow for what the host can see of tensors."""
        real("eps", call.eps, least=0.0)
        real("weight_bias", call.weight_bias)
        scheme = quant_scheme(call.quant)
        tokens = self._tokens(call.x, call.prologue)
        check_tokens(tokens, self.config.tokens)
        if call.x is not None:
            self._check_rows("x", call.x, tokens)
        if call.residual is not None:
            made_by = "prologue.index" if call.x is None else "x"
            self._check_rows("residual", call.residual, tokens, rows_of=made_by)
        if call.weight is not None:
            kinds = self.dtype, torch.float32
            self._check("weight", call.weight, (self.config.hidden,), *kinds, aligned=16)
        self._check_quant(call.quant, call.weight)
        made: list[tuple[int, Maker]] = []
        outputs: list[torch.Tensor | None] = []
        for index, (name, said) in enumerate(self._requested(call).items(), FIRST_OUTPUT):
            if said is True:
                made.append((index, self._maker(name, tokens, call.quant)))
                outputs.append(made[-1][1]())
            else:
                outputs.append(self._output(name, tokens, call.quant, said))
        return Checked(call, tokens, scheme, Reduced(*outputs), tuple(made))

    def _tokens(self, x: torch.Tensor | None, prologue: MoEFinalize | None) -> int:
        if (x is None) == (prologue is None):
            raise InvalidArgument(
                f"x is {shown(x)} and prologue is {shown(prologue)}; pass one of them: it makes "
                "this rank's rows"
            )
        if prologue is None:
            if not isinstance(x, torch.Tensor):
                refuse_tensor("x", x)
            if x.is_nested or x.dim() != 2:
                found = "nested" if x.is_nested else list(x.shape)
                raise InvalidArgument(
                    f"x is {found}; it must be a dense tensor [tokens, {self.config.hidden}]"
                )
            return x.shape[0]
        instance("prologue", prologue, MoEFinalize)
        index, rows, scales = prologue.index, prologue.rows, prologue.scales
        self._check("prologue.index", index, (None, None), torch.int32)
        tokens, top_k = index.shape
        self._check_rows("prologue.rows", rows, None)
        if scales is not None:
            self._check("prologue.scales", scales, (tokens, top_k), torch.float32, self.dtype)
        factor = real("prologue.routed_scaling_factor", prologue.routed_scaling_factor)
        if abs(factor) > torch.finfo(torch.float32).max:
            refuse("prologue.routed_scaling_factor", factor, "a number that a float32 can hold")
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
            device=self.device,
            aligned=aligned,
            rows_of=rows_of,
        )

    def _check_rows(
        self, name: str, tensor: torch.Tensor, tokens: int | None, *, rows_of: str = ""
    ) -> None:
        size = (tokens, self.config.hidden)
        self._check(name, tensor, size, self.dtype, aligned=16, rows_of=rows_of)

    def _check_quant(self, quant: Quant | None, weight: torch.Tensor | None) -> None:
        if quant is None:
            return
        if weight is None:
            raise InvalidArgument(
                "quant without weight, which is None: it quantises the normed rows; pass weight "
                "(ones for a plain RMSNorm)"
            )
        if isinstance(quant, FP8Static):
            self._check("quant.scale", quant.scale, (1,), torch.float32)
        if isinstance(quant, FP8Group) and self.config.hidden % GROUP:
            raise InvalidArgument(
                f"hidden is {self.config.hidden}; FP8Group needs a multiple of {GROUP}: pad "
                f"hidden to {-(-self.config.hidden // GROUP) * GROUP}"
            )

    def _requested(self, call: Fused) -> dict[str, torch.Tensor | bool]:
        """Which outputs to write: those given or asked for, and those that the inputs imply."""
        implied = implied_outputs(call.residual, call.weight, call.quant)
        makes_scale = implied["scale_out"]
        possible = {
            "out": (True, ""),
            "residual_out": (call.residual is not None, "residual, which is None"),
            "norm_out": (call.weight is not None, "weight, which is None"),
            "quant_out": (call.quant is not None, "quant, which is None"),
            "scale_out": (makes_scale, f"a quant that makes scales; it is {shown(call.quant)}"),
        }
        found: dict[str, torch.Tensor | bool] = {}
        for name in OUTPUTS:
            said = getattr(call, name)
            if said is not None and not isinstance(said, bool | torch.Tensor):
                refuse_tensor(name, said)
            found[name] = implied[name] if said is None else said
            may, needs = possible[name]
            if found[name] is not False and not may:
                raise InvalidArgument(f"{name} without {needs}: there is nothing to write there")
        if (found["quant_out"] is False) != (found["scale_out"] is False) and makes_scale:
            raise InvalidArgument("quant_out and scale_out belong together: pass both or neither")
        return found

    def _output(
        self, name: str, tokens: int, quant: Quant | None, given: torch.Tensor | bool
    ) -> torch.Tensor | None:
        """An output that was given, checked; None for one that nobody asked for."""
        if given is False:
            return None
        assert given is not True
        if name == "scale_out":
            return self._scale(tokens, quant, given)
        kind = torch.float8_e4m3fn if name == "quant_out" else self.dtype
        hidden = self.config.hidden
        self._check(name, given, (tokens, hidden), kind, aligned=hidden * kind.itemsize)
        return given

    def _scale(self, tokens: int, quant: Quant | None, given: torch.Tensor) -> torch.Tensor:
        if not _packs(quant):
            self._check("scale_out", given, (tokens, self._groups(quant)), torch.float32)
            return given
        if not isinstance(given, torch.Tensor):
            refuse_tensor("scale_out", given)
        check_alignment("scale_out", given, given.itemsize)  # and that it is dense
        columns, pitch = -(-self._groups(quant) // 4), -(-tokens // 4) * 4
        right = given.dtype == torch.int32 and tuple(given.shape) == (tokens, columns)
        strided = (tokens <= 1 or given.stride(0) == 1) and (
            columns == 1 or given.stride(1) >= tokens
        )
        if not (right and strided and given.device == self.device):
            raise InvalidArgument(
                f"scale_out is {given.dtype} {list(given.shape)} with strides "
                f"{given.stride()} on {given.device}; it must be torch.int32 "
                f"[{tokens}, {columns}] with strides (1, {pitch}) on {self.device}"
            )
        return given

    def _maker(self, name: str, tokens: int, quant: Quant | None) -> Maker:
        """What makes an output that was not given; it holds no tensor."""
        size, kind = (tokens, self.config.hidden), self.dtype
        if name == "quant_out":
            kind = torch.float8_e4m3fn
        elif name == "scale_out" and _packs(quant):
            columns = -(-self._groups(quant) // 4)
            return functools.partial(_packed_scale, tokens, columns, self.device)
        elif name == "scale_out":
            size, kind = (tokens, self._groups(quant)), torch.float32
        return functools.partial(torch.empty, size, dtype=kind, device=self.device)

    def _groups(self, quant: Quant | None) -> int:
        return self.config.hidden // GROUP if isinstance(quant, FP8Group) else 1


def _packs(quant: Quant | None) -> bool:
    return isinstance(quant, FP8Group) and quant.scale == "ue8m0"


def _packed_scale(tokens: int, columns: int, device: torch.device) -> torch.Tensor:
    """Zeros: nobody writes the padding after the last token."""
    made = torch.zeros((columns, -(-tokens // 4) * 4), dtype=torch.int32, device=device)
    return made.t()[:tokens]


def check_overlaps(addresses: Sequence[int], apart: Iterable[Apart]) -> None:
    """Raise InvalidArgument, naming both tensors, for an output that overlaps another tensor.

    Outputs may be exactly x. Those other than `out`, which is written before residual is read, may
    be exactly residual.
    """
    pair = overlap(addresses, apart)
    if pair is not None:
        raise InvalidArgument(
            f"output {PUBLIC[pair[0]]!r} overlaps {PUBLIC[pair[1]]!r} in memory; outputs may be "
            "exactly x, those other than 'out' exactly residual, and no other tensor of the call"
        )


def _apart(tensors: Sequence[torch.Tensor | None], made: Sequence[int]) -> tuple[Apart, ...]:
    """Each given output with those before it and with the inputs; new memory overlaps nothing."""
    spans = {i: (_bytes(t), t.dtype) for i, t in enumerate(tensors) if t is not None}
    outputs = [i for i in range(FIRST_OUTPUT, END_OUTPUT) if i in spans and i not in made]
    apart = []
    for i, index in enumerate(outputs):
        others = []
        for other in (*outputs[:i], *EXACT, *NEVER):
            if other in spans:
                alike = other in EXACT and spans[other] == spans[index]
                alike = alike and (index, other) != OUT_AND_RESIDUAL
                others.append((other, spans[other][0], alike))
        apart.append((index, spans[index][0], tuple(others)))
    return tuple(apart)


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the end of the last element of a tensor, which may be strided."""
    start, end = extent(tensor)
    return end - start
