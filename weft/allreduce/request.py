"""One call of the fused all-reduce: what was passed, checked, and which outputs are wanted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from weft.allreduce.args import ADDRESSES
from weft.allreduce.reduction import Reduction
from weft.allreduce.spec import (
    FP8Group,
    FP8Static,
    MoEFinalize,
    Quant,
    Reduced,
    coding_of,
    implied_outputs,
)
from weft.arguments import instance, real, refuse, shown
from weft.errors import InvalidArgument
from weft.runtime.check import check_alignment, check_tensor, check_tokens, refuse_tensor, tracing

Wanted = torch.Tensor | bool | None
Maker = Callable[[], torch.Tensor]
Maybe = torch.Tensor | None
Fresh = tuple[int, Maker]  # the place of an output in ADDRESSES, and what makes one
Pair = tuple[
    int, int, int, int, bool
]  # place and bytes, twice; may they lie on each other exactly?
GROUP = 128
OUTPUTS = {
    name: ADDRESSES.index(name if name == "out" else f"{name}_out")
    for name in ("out", "residual", "norm", "quant", "scale")
}
# As callers know them: what a MoEFinalize or a quant spec holds is named with its place there.
PUBLIC = tuple(
    f"prologue.{name}"
    if name in ("rows", "index", "scales", "shared")
    else "quant.scale"
    if name == "scale"
    else name
    for name in ADDRESSES
)
EXACT, NEVER = (  # the inputs that an output may lie on exactly, and those that it may not touch
    tuple(ADDRESSES.index(name) for name in names)
    for names in (("x", "residual", "shared"), ("weight", "rows", "scales", "index"))
)


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the caller said of each output: a tensor to write, True, False, or nothing."""

    out: Wanted = None
    residual: Wanted = None
    norm: Wanted = None
    quant: Wanted = None
    scale: Wanted = None


Call = tuple[Maybe, Maybe, Maybe, Quant | None, MoEFinalize | None, Outputs]  # x, residual, ..


@dataclass(frozen=True, slots=True)
class Request:
    """A checked call.

    coding: the quant spec's name in the protocol.   fresh: the outputs that were made here.
    apart: pairs of the other tensors that were found not to overlap.
    """

    tokens: int
    x: torch.Tensor | None
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    quant: Quant | None
    coding: str
    prologue: MoEFinalize | None
    reduced: Reduced
    fresh: tuple[Fresh, ...] = ()
    apart: tuple[Pair, ...] = ()

    @property
    def places(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors of the call, in the order of ADDRESSES."""
        r, p = self.reduced, self.prologue
        outputs = (r.out, r.residual, r.norm, r.quant, r.scale)
        scale = self.quant.scale if isinstance(self.quant, FP8Static) else None
        parts = (None,) * 4 if p is None else (p.rows, p.index, p.scales, p.shared)
        return (self.x, self.residual, self.weight, *outputs, scale, *parts)

    @property
    def addresses(self) -> list[int]:
        """Where they lie; 0 for none."""
        return [0 if t is None else t.data_ptr() for t in self.places]

    @property
    def epilogue(self) -> str:
        """The class of work after the sum, as tables of measurements name it."""
        if self.weight is None:
            return "none"
        return {"none": "norm", "static": "fp8-static", "token": "fp8-token"}.get(
            self.coding, "fp8-group"
        )


@dataclass(frozen=True, slots=True)
class Checker:
    """Checks the calls of one all-reduce."""

    reduction: Reduction
    dtype: torch.dtype
    device: torch.device

    def request(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        quant: Quant | None,
        prologue: MoEFinalize | None,
        given: Outputs,
    ) -> Request:
        """Check everything the host can see, and make the outputs that were not given.

        Raises InvalidArgument and TokenOverflow.
        """
        request, fresh = self._described((x, residual, weight, quant, prologue, given))
        request = replace(request, apart=_pairs(request, fresh))
        _check_overlap(request)
        return request

    def outputs(self, call: Call) -> Reduced:
        """What a compiler asks for: the outputs of `request`, of tensors that lie nowhere."""
        with tracing():
            return self._described(call)[0].reduced

    def _described(self, call: Call) -> tuple[Request, dict[str, Maker]]:
        """A request that does not know yet what lies apart, and what made its fresh outputs."""
        x, residual, weight, quant, prologue, given = call
        coding = coding_of(quant)
        tokens = self._tokens(x, prologue)
        check_tokens(tokens, self.reduction.tokens)
        if x is not None:
            self._check_rows("x", x, tokens)
        if residual is not None:
            self._check_rows("residual", residual, tokens)
        if weight is not None:
            size, kinds = (self.reduction.hidden,), (self.dtype, torch.float32)
            check_tensor("weight", weight, shape=size, dtypes=kinds, device=self.device)
            check_alignment("weight", weight, 16)
        self._check_quant(quant, weight)
        wants = self._wants(residual, weight, quant, given)
        fresh = {
            name: self._maker(name, tokens, quant) for name, said in wants.items() if said is True
        }
        reduced = Reduced(
            **{
                name: fresh[name]() if name in fresh else self._output(name, tokens, quant, said)
                for name, said in wants.items()
            }
        )
        made = tuple((OUTPUTS[name], maker) for name, maker in fresh.items())
        known = (tokens, x, residual, weight, quant, coding, prologue, reduced, made)
        return Request(*known), fresh

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
                raise InvalidArgument(
                    f"x is {_text(x)}; it must be a dense tensor [tokens, {self.reduction.hidden}]"
                )
            return x.shape[0]
        instance("prologue", prologue, MoEFinalize)
        index, rows, scales = prologue.index, prologue.rows, prologue.scales
        counts, device = (torch.int32,), self.device
        check_tensor("prologue.index", index, shape=(None, None), dtypes=counts, device=device)
        check_alignment("prologue.index", index, index.itemsize)
        tokens, top_k = index.shape
        size = (None, self.reduction.hidden)
        check_tensor("prologue.rows", rows, shape=size, dtypes=(self.dtype,), device=device)
        check_alignment("prologue.rows", rows, 16)
        if scales is not None:
            kinds, each = (torch.float32, self.dtype), (tokens, top_k)
            check_tensor("prologue.scales", scales, shape=each, dtypes=kinds, device=device)
            check_alignment("prologue.scales", scales, scales.itemsize)
        factor = real("prologue.routed_scaling_factor", prologue.routed_scaling_factor)
        if abs(factor) > torch.finfo(torch.float32).max:
            refuse("prologue.routed_scaling_factor", factor, "a number that a float32 can hold")
        if prologue.shared is not None:
            self._check_rows("prologue.shared", prologue.shared, tokens)
        return tokens

    def _check_rows(self, name: str, tensor: torch.Tensor, tokens: int) -> None:
        size = (tokens, self.reduction.hidden)
        check_tensor(name, tensor, shape=size, dtypes=(self.dtype,), device=self.device)
        check_alignment(name, tensor, 16)

    def _check_quant(self, quant: Quant | None, weight: torch.Tensor | None) -> None:
        if quant is None:
            return
        if weight is None:
            raise InvalidArgument(
                "quant without weight, which is None: it quantises the normed rows; pass weight "
                "(ones for a plain RMSNorm)"
            )
        if isinstance(quant, FP8Static):
            one = (torch.float32,)
            check_tensor("quant.scale", quant.scale, shape=(1,), dtypes=one, device=self.device)
            check_alignment("quant.scale", quant.scale, quant.scale.itemsize)
        if isinstance(quant, FP8Group) and self.reduction.hidden % GROUP:
            raise InvalidArgument(
                f"hidden is {self.reduction.hidden}; FP8Group needs a multiple of {GROUP}: pad "
                f"hidden to {-(-self.reduction.hidden // GROUP) * GROUP}"
            )

    def _wants(
        self,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        quant: Quant | None,
        given: Outputs,
    ) -> dict[str, torch.Tensor | bool]:
        """Which outputs to write: those given or asked for, and those that the inputs imply."""
        implied = implied_outputs(residual, weight, quant)
        makes_scale = implied["scale"]
        possible = {
            "out": (True, ""),
            "residual": (residual is not None, "residual, which is None"),
            "norm": (weight is not None, "weight, which is None"),
            "quant": (quant is not None, "quant, which is None"),
            "scale": (makes_scale, f"a quant that makes scales; it is {shown(quant)}"),
        }
        wants: dict[str, torch.Tensor | bool] = {}
        for field in fields(given):
            said = getattr(given, field.name)
            name = field.name if field.name == "out" else f"{field.name}_out"
            if said is not None and not isinstance(said, bool | torch.Tensor):
                refuse_tensor(name, said)
            wants[field.name] = implied[field.name] if said is None else said
            may, needs = possible[field.name]
            if wants[field.name] is not False and not may:
                raise InvalidArgument(f"{name} without {needs}: there is nothing to write there")
        if (wants["quant"] is False) != (wants["scale"] is False) and makes_scale:
            raise InvalidArgument("quant_out and scale_out belong together: want both or neither")
        return wants

    def _output(
        self, name: str, tokens: int, quant: Quant | None, wanted: torch.Tensor | bool
    ) -> torch.Tensor | None:
        """An output that was given, checked; None for one that nobody wants."""
        if wanted is False:
            return None
        assert wanted is not True
        if name == "scale":
            return self._scale(tokens, quant, wanted)
        kind = torch.float8_e4m3fn if name == "quant" else self.dtype
        size = (tokens, self.reduction.hidden)
        label = name if name == "out" else f"{name}_out"
        check_tensor(label, wanted, shape=size, dtypes=(kind,), device=self.device)
        check_alignment(label, wanted, size[1] * kind.itemsize)
        return wanted

    def _scale(self, tokens: int, quant: Quant | None, wanted: torch.Tensor) -> torch.Tensor:
        if not _packs(quant):
            size, kinds = (tokens, self._groups(quant)), (torch.float32,)
            check_tensor("scale_out", wanted, shape=size, dtypes=kinds, device=self.device)
            check_alignment("scale_out", wanted, wanted.itemsize)
            return wanted
        if not isinstance(wanted, torch.Tensor):
            refuse_tensor("scale_out", wanted)
        check_alignment("scale_out", wanted, wanted.itemsize)  # and that it is dense
        columns, pitch = -(-self._groups(quant) // 4), -(-tokens // 4) * 4
        right = wanted.dtype == torch.int32 and tuple(wanted.shape) == (tokens, columns)
        lies = (tokens <= 1 or wanted.stride(0) == 1) and (
            columns == 1 or wanted.stride(1) >= tokens
        )
        if not (right and lies and wanted.device == self.device):
            raise InvalidArgument(
                f"scale_out is {wanted.dtype} {list(wanted.shape)} with strides "
                f"{wanted.stride()} on {wanted.device}; it must be torch.int32 "
                f"[{tokens}, {columns}] with strides (1, {pitch}) on {self.device}"
            )
        return wanted

    def _maker(self, name: str, tokens: int, quant: Quant | None) -> Maker:
        """What makes an output that was not given; it holds no tensor."""
        size, kind = (tokens, self.reduction.hidden), self.dtype
        if name == "quant":
            kind = torch.float8_e4m3fn
        elif name == "scale" and _packs(quant):
            columns = -(-self._groups(quant) // 4)
            return functools.partial(_packed_scale, tokens, columns, self.device)
        elif name == "scale":
            size, kind = (tokens, self._groups(quant)), torch.float32
        return functools.partial(torch.empty, size, dtype=kind, device=self.device)

    def _groups(self, quant: Quant | None) -> int:
        return self.reduction.hidden // GROUP if isinstance(quant, FP8Group) else 1


def _packs(quant: Quant | None) -> bool:
    return isinstance(quant, FP8Group) and quant.scale == "ue8m0"


def _packed_scale(tokens: int, columns: int, device: torch.device) -> torch.Tensor:
    """Zeros: nobody writes the padding behind the last token."""
    made = torch.zeros((columns, -(-tokens // 4) * 4), dtype=torch.int32, device=device)
    return made.t()[:tokens]


def apart(addresses: Sequence[int], pairs: Sequence[Pair]) -> Pair | None:
    """The first pair of tensors that overlap though they may not; None where all lie apart."""
    for pair in pairs:
        i, size, j, other, exact = pair
        a, b = addresses[i], addresses[j]
        if a < b + other and b < a + size and not (exact and a == b):
            return pair
    return None


def _check_overlap(request: Request) -> None:
    """Outputs may lie on x and residual exactly; any other overlap would read what it wrote."""
    found = apart(request.addresses, request.apart)
    if found is not None:
        raise InvalidArgument(
            f"output {PUBLIC[found[0]]!r} overlaps {PUBLIC[found[2]]!r} in memory; outputs "
            "may lie exactly on x or residual, and nowhere else on another tensor of the call"
        )


def _pairs(request: Request, fresh: Iterable[str]) -> tuple[Pair, ...]:
    """Each given output with those before it and with the inputs; fresh memory is apart."""
    spans = {i: (_extent(t), t.dtype) for i, t in enumerate(request.places) if t is not None}
    made = [OUTPUTS[name] for name in fresh]
    outputs = [place for place in OUTPUTS.values() if place in spans and place not in made]
    pairs = []
    for i, place in enumerate(outputs):
        size = spans[place][0]
        for other in (*outputs[:i], *EXACT, *NEVER):
            if other in spans:
                alike = other in EXACT and spans[other] == spans[place]
                pairs.append((place, size, other, spans[other][0], alike))
    return tuple(pairs)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element of a tensor, which may be strided."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _text(x: torch.Tensor) -> str:
    return "nested" if x.is_nested else f"{list(x.shape)}"
