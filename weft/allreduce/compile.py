# SPDX-License-Identifier: Apache-2.0
"""Custom operator for AllReduce.fused under torch.compile; see runtime/library.py."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from weft.allreduce.call import (
    OUTPUTS,
    CheckedCall,
    FP8Group,
    FP8Static,
    FP8Token,
    FusedCall,
    MoEFinalize,
    OutputRequest,
    Quant,
    Reduced,
    default_outputs,
    quant_scheme,
)
from weft.allreduce.config import ReduceConfig
from weft.errors import InvalidArgument
from weft.runtime.check import allow_fake_tensors
from weft.runtime.library import TracedOperator, detach, lookup

# A custom operator must not return its arguments, and always returns the same number of tensors. It
# returns an empty tensor for an output that was passed or not requested.
SCHEMA = (
    "(Tensor? x, Tensor? residual, Tensor? weight, Tensor(a!)? out, Tensor(b!)? residual_out, "
    "Tensor(c!)? norm_out, Tensor(d!)? quant_out, Tensor(e!)? scale_out, Tensor? quant_scale, "
    "Tensor? rows, Tensor? index, Tensor? scales, Tensor? shared, bool[] allocate, str scheme, "
    "float eps, float weight_bias, float routed_scaling_factor, str backend, Tensor(f!) order, "
    "int handle) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class TracedAllReduce(TracedOperator, Protocol):
    """Interface of an AllReduce that the custom operator uses."""

    @property
    def config(self) -> ReduceConfig: ...

    def run_fused(self, call: FusedCall, backend: str) -> Reduced: ...


def _allreduce(*args: Any) -> tuple[torch.Tensor, ...]:
    call, allocate, backend, order, owner = _parse_arguments(*args)
    return _collect_new_outputs(owner.run_fused(call, backend), allocate, order)


_operator = torch.library.custom_op(
    "weft::allreduce", _allreduce, mutates_args=(*OUTPUTS, "order"), schema=SCHEMA
)


@_operator.register_fake
def _(*args: Any) -> tuple[torch.Tensor, ...]:
    call, allocate, _, order, owner = _parse_arguments(*args)
    with allow_fake_tensors():
        reduced = CheckedCall(call, owner.config, owner.group.device).reduced
    return _collect_new_outputs(reduced, allocate, order)


def call_fused(owner: TracedAllReduce, call: FusedCall, backend: str) -> Reduced:
    """Run `AllReduce.fused` as a custom operator inside a compiled graph."""
    scheme, defaults = quant_scheme(call.quant), default_outputs(*call[1:3], call.quant)
    requested: dict[str, OutputRequest] = {name: getattr(call, name) for name in OUTPUTS}
    passed = [_check_passed_tensor(name, output) for name, output in requested.items()]
    allocate = [defaults[name] if out is None else out is True for name, out in requested.items()]
    x, residual, weight, *_, scale, rows, index, scales, shared = call.tensors()
    factor = 1.0 if call.prologue is None else call.prologue.routed_scaling_factor
    options = allocate, scheme, call.eps, call.weight_bias, factor, backend
    new = torch.ops.weft.allreduce(
        *map(detach, (x, residual, weight)),
        *passed,
        *map(detach, (scale, rows, index, scales, shared)),
        *options,
        owner.order_tensor,
        owner.library_handle,
    )
    return Reduced(
        *[n if is_new else p for n, is_new, p in zip(new, allocate, passed, strict=True)]
    )


def _parse_arguments(
    x: Any, residual: Any, weight: Any, *args: Any
) -> tuple[FusedCall, list[bool], str, torch.Tensor, TracedAllReduce]:
    """Convert the arguments of SCHEMA to a call, its backend, the order tensor and the owner."""
    outputs, quant_scale, parts, options = args[:5], args[5], args[6:10], args[10:]
    allocate, scheme, eps, weight_bias, factor, backend, order, handle = options
    out, residual_out, norm_out, quant_out, scale_out = (
        is_new if tensor is None else tensor
        for tensor, is_new in zip(outputs, allocate, strict=True)
    )
    rows, index, scales, shared = parts
    prologue = None if rows is None else MoEFinalize(rows, index, scales, shared, factor)
    quant = _build_quant(scheme, quant_scale)
    requested = (out, residual_out, norm_out, quant_out, scale_out)
    call = FusedCall(x, residual, weight, *requested, quant, prologue, eps, weight_bias)
    return call, allocate, backend, order, lookup(handle)


def _check_passed_tensor(name: str, output: OutputRequest) -> torch.Tensor | None:
    """Return the tensor of an output request, or None. Raises InvalidArgument for other types."""
    if isinstance(output, torch.Tensor):
        return output
    if output is not None and output is not True and output is not False:
        raise InvalidArgument(f"{name} is {output!r}; pass a tensor, True, False or None")
    return None


def _build_quant(scheme: str, scale: torch.Tensor | None) -> Quant | None:
    """Build the quant option for a scheme, the inverse of `quant_scheme`."""
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


def _collect_new_outputs(
    reduced: Reduced, allocate: list[bool], order: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    tensors = (reduced.out, reduced.residual, reduced.norm, reduced.quant, reduced.scale)
    return tuple(
        tensor if is_new and tensor is not None else order.new_empty(0)
        for tensor, is_new in zip(tensors, allocate, strict=True)
    )
