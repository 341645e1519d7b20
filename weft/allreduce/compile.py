# SPDX-License-Identifier: Apache-2.0
"""AllReduce.fused as an operator of torch.library (runtime/library.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weft.allreduce.call import (
    OUTPUTS,
    FP8Group,
    FP8Static,
    FP8Token,
    Fused,
    MoEFinalize,
    Quant,
    Reduced,
    Requested,
    implied_outputs,
    quant_scheme,
)
from weft.errors import InvalidArgument
from weft.runtime.check import tracing
from weft.runtime.library import find, plain

if TYPE_CHECKING:
    from weft.allreduce.operator import AllReduce

# What is returned for an output that was given, or that nobody asked for, is empty: an operator may
# not return what it was passed, and returns as many tensors in every call.
SCHEMA = (
    "(Tensor? x, Tensor? residual, Tensor? weight, Tensor(a!)? out, Tensor(b!)? residual_out, "
    "Tensor(c!)? norm_out, Tensor(d!)? quant_out, Tensor(e!)? scale_out, Tensor? quant_scale, "
    "Tensor? rows, Tensor? index, Tensor? scales, Tensor? shared, bool[] make, str scheme, "
    "float eps, float weight_bias, float routed_scaling_factor, str backend, Tensor(f!) order, "
    "int handle) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _allreduce(*given: Any) -> tuple[torch.Tensor, ...]:
    call, make, backend, order, owner = _call_of(*given)
    return _returned(owner._fused(call, backend), make, order)


_operator = torch.library.custom_op(
    "weft::allreduce", _allreduce, mutates_args=(*OUTPUTS, "order"), schema=SCHEMA
)


@_operator.register_fake
def _(*given: Any) -> tuple[torch.Tensor, ...]:
    call, make, _, order, owner = _call_of(*given)
    with tracing():
        found = call.checked(owner.config, owner.group.device).reduced
    return _returned(found, make, order)


def fused(owner: AllReduce, call: Fused, backend: str) -> Reduced:
    """`fused` inside a compiled graph."""
    scheme, implied = quant_scheme(call.quant), implied_outputs(*call[1:3], call.quant)
    said = {name: getattr(call, name) for name in OUTPUTS}
    given = [_tensor(name, each) for name, each in said.items()]
    make = [implied[name] if each is None else each is True for name, each in said.items()]
    x, residual, weight, *_, scale, rows, index, scales, shared = call.tensors()
    factor = 1.0 if call.prologue is None else call.prologue.routed_scaling_factor
    made = torch.ops.weft.allreduce(
        *map(plain, (x, residual, weight)),
        *given,
        *map(plain, (scale, rows, index, scales, shared)),
        *(make, scheme, call.eps, call.weight_bias, factor, backend, owner._order, owner._handle),
    )
    return Reduced(
        *[new if makes else old for new, makes, old in zip(made, make, given, strict=True)]
    )


def _call_of(
    x: Any, residual: Any, weight: Any, *more: Any
) -> tuple[Fused, list[bool], str, torch.Tensor, AllReduce]:
    """The call of SCHEMA's arguments: every output was decided while tracing."""
    outputs, quant_scale, parts, rest = more[:5], more[5], more[6:10], more[10:]
    make, scheme, eps, weight_bias, factor, backend, order, handle = rest
    wanted: list[Requested] = [
        makes if tensor is None else tensor for tensor, makes in zip(outputs, make, strict=True)
    ]
    rows, index, scales, shared = parts
    prologue = None if rows is None else MoEFinalize(rows, index, scales, shared, factor)
    quant = _quant(scheme, quant_scale)
    out, residual_out, norm_out, quant_out, scale_out = wanted
    given = (out, residual_out, norm_out, quant_out, scale_out)
    call = Fused(x, residual, weight, *given, quant, prologue, eps, weight_bias)
    return call, make, backend, order, find(handle)


def _tensor(name: str, said: Requested) -> torch.Tensor | None:
    """The tensor of an output that was given. Raises InvalidArgument for what is no answer."""
    if isinstance(said, torch.Tensor):
        return said
    if said is not None and said is not True and said is not False:
        raise InvalidArgument(f"{name} is {said!r}; pass a tensor, True, False or None")
    return None


def _quant(scheme: str, scale: torch.Tensor | None) -> Quant | None:
    """The spec that `quant_scheme` named."""
    if scheme == "static":
        assert scale is not None
        return FP8Static(scale)
    specs: dict[str, Quant | None] = {
        "none": None,
        "token": FP8Token(),
        "group": FP8Group(),
        "group_ue8m0": FP8Group(scale="ue8m0"),
    }
    return specs[scheme]


def _returned(found: Reduced, make: list[bool], order: torch.Tensor) -> tuple[torch.Tensor, ...]:
    tensors = (found.out, found.residual, found.norm, found.quant, found.scale)
    return tuple(
        tensor if makes and tensor is not None else order.new_empty(0)
        for tensor, makes in zip(tensors, make, strict=True)
    )
