"""One call of the fused all-reduce: what was passed, checked, and which outputs are wanted."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from weft.errors import InvalidArgument
from weft.ops.check import check_alignment, check_tensor, check_tokens
from weft.ops.reduce_spec import FP8Group, FP8Static, MoEFinalize, Quant, Reduced, coding_of
from weft.ops.reduction import Reduction

Wanted = torch.Tensor | bool | None
GROUP = 128


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the caller said of each output: a tensor to write, True, False, or nothing."""

    out: Wanted = None
    residual: Wanted = None
    norm: Wanted = None
    quant: Wanted = None
    scale: Wanted = None


@dataclass(frozen=True, slots=True)
class Request:
    """A checked call. `coding` is the quant spec's name in the protocol."""

    tokens: int
    x: torch.Tensor | None
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    quant: Quant | None
    coding: str
    prologue: MoEFinalize | None
    reduced: Reduced

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
        reduced = Reduced(
            **{name: self._output(name, tokens, quant, wants[name]) for name in wants}
        )
        request = Request(tokens, x, residual, weight, quant, coding, prologue, reduced)
        _check_overlap(request)
        return request

    def _tokens(self, x: torch.Tensor | None, prologue: MoEFinalize | None) -> int:
        if (x is None) == (prologue is None):
            raise InvalidArgument(
                "pass either x or prologue=MoEFinalize(...): one of them makes this rank's rows"
            )
        if prologue is None:
            if not isinstance(x, torch.Tensor) or x.dim() != 2:
                raise InvalidArgument(
                    f"x is {_text(x)}; it must be a tensor [tokens, {self.reduction.hidden}]"
                )
            return int(x.shape[0])
        check_tensor(
            "index", prologue.index, shape=(None, None), dtypes=(torch.int32,), device=self.device
        )
        tokens, top_k = prologue.index.shape
        size = (None, self.reduction.hidden)
        check_tensor("rows", prologue.rows, shape=size, dtypes=(self.dtype,), device=self.device)
        check_alignment("rows", prologue.rows, 16)
        if prologue.scales is not None:
            kinds = (torch.float32, self.dtype)
            check_tensor(
                "scales", prologue.scales, shape=(tokens, top_k), dtypes=kinds, device=self.device
            )
        if prologue.shared is not None:
            self._check_rows("shared", prologue.shared, tokens)
        return int(tokens)

    def _check_rows(self, name: str, tensor: torch.Tensor, tokens: int) -> None:
        size = (tokens, self.reduction.hidden)
        check_tensor(name, tensor, shape=size, dtypes=(self.dtype,), device=self.device)
        check_alignment(name, tensor, 16)

    def _check_quant(self, quant: Quant | None, weight: torch.Tensor | None) -> None:
        if quant is None:
            return
        if weight is None:
            raise InvalidArgument(
                "quant without weight: it quantises the normed rows; pass weight (ones for a plain "
                "RMSNorm)"
            )
        if isinstance(quant, FP8Static):
            one = (torch.float32,)
            check_tensor("quant.scale", quant.scale, shape=(1,), dtypes=one, device=self.device)
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
        makes_scale = quant is not None and not isinstance(quant, FP8Static)
        implied = {
            "out": residual is None and weight is None,
            "residual": residual is not None,
            "norm": weight is not None and quant is None,
            "quant": quant is not None,
            "scale": makes_scale,
        }
        possible = {
            "out": (True, ""),
            "residual": (residual is not None, "residual"),
            "norm": (weight is not None, "weight"),
            "quant": (quant is not None, "quant"),
            "scale": (makes_scale, "a quant that makes scales"),
        }
        wants: dict[str, torch.Tensor | bool] = {}
        for field in fields(given):
            said = getattr(given, field.name)
            wants[field.name] = implied[field.name] if said is None else said
            may, needs = possible[field.name]
            if wants[field.name] is not False and not may:
                name = field.name if field.name == "out" else f"{field.name}_out"
                raise InvalidArgument(f"{name} without {needs}: there is nothing to write there")
        if (wants["quant"] is False) != (wants["scale"] is False) and makes_scale:
            raise InvalidArgument("quant_out and scale_out belong together: want both or neither")
        return wants

    def _output(
        self, name: str, tokens: int, quant: Quant | None, wanted: torch.Tensor | bool
    ) -> torch.Tensor | None:
        if wanted is False:
            return None
        if name == "scale":
            return self._scale(tokens, quant, wanted)
        kind = torch.float8_e4m3fn if name == "quant" else self.dtype
        size = (tokens, self.reduction.hidden)
        if wanted is True:
            return torch.empty(size, dtype=kind, device=self.device)
        label = name if name == "out" else f"{name}_out"
        check_tensor(label, wanted, shape=size, dtypes=(kind,), device=self.device)
        check_alignment(label, wanted, size[1] * kind.itemsize)
        return wanted

    def _scale(self, tokens: int, quant: Quant | None, wanted: torch.Tensor | bool) -> torch.Tensor:
        groups = self.reduction.hidden // GROUP if isinstance(quant, FP8Group) else 1
        if not (isinstance(quant, FP8Group) and quant.scale == "ue8m0"):
            size, kind = (tokens, groups), torch.float32
            if wanted is True:
                return torch.empty(size, dtype=kind, device=self.device)
            assert isinstance(wanted, torch.Tensor)
            check_tensor("scale_out", wanted, shape=size, dtypes=(kind,), device=self.device)
            return wanted
        columns, pitch = -(-groups // 4), -(-tokens // 4) * 4
        if wanted is True:  # zeros: nobody writes the padding behind the last token
            made = torch.zeros((columns, pitch), dtype=torch.int32, device=self.device)
            return made.t()[:tokens]
        assert isinstance(wanted, torch.Tensor)
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


def _check_overlap(request: Request) -> None:
    """Outputs may lie on x and residual exactly; any other overlap would read what it wrote."""
    reduced, prologue = request.reduced, request.prologue
    outputs = [(f.name, t) for f in fields(reduced) if (t := getattr(reduced, f.name)) is not None]
    exact = [("x", request.x), ("residual", request.residual)]
    never: list[tuple[str, torch.Tensor | None]] = [("weight", request.weight)]
    if prologue is not None:
        never += [("rows", prologue.rows), ("scales", prologue.scales), ("index", prologue.index)]
        exact.append(("shared", prologue.shared))
    spans = [(name, *_span(t), t.dtype) for name, t in outputs]
    for i, (name, start, end, dtype) in enumerate(spans):
        others = [(n, s, e, False) for n, s, e, _ in spans[:i]]
        for other, t in (*exact, *never):
            if t is not None:
                s, e = _span(t)
                same = (s, e) == (start, end) and t.dtype == dtype
                others.append((other, s, e, same and (other, t) in exact))
        for other, s, e, allowed in others:
            if start < e and s < end and not allowed:
                raise InvalidArgument(
                    f"output {name!r} overlaps {other!r} in memory; outputs may lie exactly on x "
                    "or residual, and nowhere else on another tensor of the call"
                )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first and the last address of a tensor, which may be strided."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _text(x: object) -> str:
    return f"{list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__


def scale_pitch(request: Request) -> int:
    """int32 words from one column of packed scales to the next."""
    scale = request.reduced.scale
    if scale is None or scale.dtype != torch.int32:
        return 0
    return scale.stride(1) if scale.shape[1] > 1 else math.ceil(request.tokens / 4) * 4
