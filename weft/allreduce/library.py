"""AllReduce.fused as an operation of torch's library (library.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.allreduce.request import Outputs, Wanted
from weft.allreduce.spec import (
    FP8Group,
    FP8Static,
    FP8Token,
    MoEFinalize,
    Quant,
    Reduced,
    coding_of,
    implied_outputs,
)
from weft.errors import InvalidArgument
from weft.runtime.library import find, plain

if TYPE_CHECKING:
    from weft.allreduce.api import AllReduce

Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
NAMES = ("out", "residual_out", "norm_out", "quant_out", "scale_out")


# What is returned for an output that was given, or that nobody wants, is empty: an op may not
# return what it was passed, and returns as many tensors in every call.
@torch.library.custom_op("weft::allreduce", mutates_args=(*NAMES, "order"))
def _allreduce(
    x: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    quant_scale: torch.Tensor | None,
    rows: torch.Tensor | None,
    index: torch.Tensor | None,
    scales: torch.Tensor | None,
    shared: torch.Tensor | None,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    make: list[bool],
    coding: str,
    eps: float,
    weight_bias: float,
    routed_scaling_factor: float,
    backend: str,
    order: torch.Tensor,
    handle: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    owner: AllReduce = find(handle)
    given = (out, residual_out, norm_out, quant_out, scale_out)
    found = owner.fused(
        x,
        residual=residual,
        weight=weight,
        eps=eps,
        weight_bias=weight_bias,
        quant=_quant(coding, quant_scale),
        prologue=_prologue(rows, index, scales, shared, routed_scaling_factor),
        backend=backend,
        **dict(zip(NAMES, _wanted(given, make), strict=True)),
    )
    return _returned(found, make, order)


@_allreduce.register_fake
def _(
    x: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    quant_scale: torch.Tensor | None,
    rows: torch.Tensor | None,
    index: torch.Tensor | None,
    scales: torch.Tensor | None,
    shared: torch.Tensor | None,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    make: list[bool],
    coding: str,
    eps: float,
    weight_bias: float,
    routed_scaling_factor: float,
    backend: str,
    order: torch.Tensor,
    handle: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    owner: AllReduce = find(handle)
    given = (out, residual_out, norm_out, quant_out, scale_out)
    quant = _quant(coding, quant_scale)
    prologue = _prologue(rows, index, scales, shared, routed_scaling_factor)
    wanted = Outputs(*_wanted(given, make))
    found = owner._checker.outputs((x, residual, weight, quant, prologue, wanted))
    return _returned(found, make, order)


def traced_fused(
    owner: AllReduce,
    inputs: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    outputs: tuple[Wanted, Wanted, Wanted, Wanted, Wanted],
    quant: Quant | None,
    prologue: MoEFinalize | None,
    eps: float,
    weight_bias: float,
    backend: str,
) -> Reduced:
    """`fused` inside a compiled graph."""
    coding, implied = coding_of(quant), implied_outputs(inputs[1], inputs[2], quant)
    scale = quant.scale if isinstance(quant, FP8Static) else None
    parts: tuple[torch.Tensor | None, ...] = (None,) * 4
    factor = 1.0
    if prologue is not None:
        parts = (prologue.rows, prologue.index, prologue.scales, prologue.shared)
        factor = prologue.routed_scaling_factor
    given = [_given(name, said) for name, said in zip(NAMES, outputs, strict=True)]
    make = [
        implies if said is None else said is True
        for said, implies in zip(outputs, implied.values(), strict=True)
    ]
    tensors = [plain(tensor) for tensor in (*inputs, scale, *parts)]
    options = (make, coding, eps, weight_bias, factor, backend)
    made = torch.ops.weft.allreduce(*tensors, *given, *options, owner._order, owner._handle)
    return Reduced(
        *[
            fresh if makes else tensor
            for fresh, makes, tensor in zip(made, make, given, strict=True)
        ]
    )


def _given(name: str, said: Wanted) -> torch.Tensor | None:
    """The tensor of an output that was given. Raises InvalidArgument for what is no answer."""
    if isinstance(said, torch.Tensor):
        return said
    if said is not None and said is not True and said is not False:
        raise InvalidArgument(f"{name} is {said!r}; pass a tensor, True, False or None")
    return None


def _wanted(given: tuple[torch.Tensor | None, ...], make: list[bool]) -> list[Wanted]:
    """What `fused` is given for each output: every one was decided when the graph was traced."""
    return [makes if tensor is None else tensor for tensor, makes in zip(given, make, strict=True)]


def _quant(coding: str, scale: torch.Tensor | None) -> Quant | None:
    """The spec that `coding_of` named."""
    if coding == "static":
        assert scale is not None
        return FP8Static(scale)
    specs: dict[str, Quant | None] = {
        "none": None,
        "token": FP8Token(),
        "group": FP8Group(),
        "group_ue8m0": FP8Group(scale="ue8m0"),
    }
    return specs[coding]


def _prologue(
    rows: torch.Tensor | None,
    index: torch.Tensor | None,
    scales: torch.Tensor | None,
    shared: torch.Tensor | None,
    routed_scaling_factor: float,
) -> MoEFinalize | None:
    if rows is None or index is None:
        return None
    return MoEFinalize(rows, index, scales, shared, routed_scaling_factor)


def _returned(found: Reduced, make: list[bool], order: torch.Tensor) -> Five:
    tensors = (found.out, found.residual, found.norm, found.quant, found.scale)
    out, residual, norm, quant, scale = (
        tensor if makes and tensor is not None else order.new_empty(0)
        for tensor, makes in zip(tensors, make, strict=True)
    )
    return out, residual, norm, quant, scale
