"""A layer of routed experts as an engine holds it: the same tensors for weft, or a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import InvalidArgument
from weft.moe import ExpertWeights, MoEConfig, Routing
from weft.shape import FP8_BLOCK

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Layer:
    """What weft reads of an engine's layer, under one name for each engine's own.

    module: has w13_weight `[local, 2 * intermediate, hidden]`, the gate first, and w2_weight
        `[local, hidden, intermediate]`; in FP8 also their _scale_inv, float32, one for each block
        of 128 x 128.
    name: as errors say it.   num_experts: physical ones of all ranks (EPLB).
    scale: what the routed experts' sum is multiplied by, where the router's weights lack it.
    flag: what makes the engine keep weights in this order, for its user.
    """

    module: Any
    name: str
    num_experts: int
    local: int
    rank: int
    ranks: int
    top_k: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    scale: float = 1.0
    flag: str = ""

    @property
    def fp8(self) -> bool:
        """Are the weights FP8 with a scale for each block?"""
        return bool(self.module.w13_weight.dtype == torch.float8_e4m3fn)

    def config(self, *, shared: int = 0) -> MoEConfig:
        """Its sizes. `shared`: the intermediate size of the shared expert that weft runs, or 0."""
        return MoEConfig(
            hidden=self.hidden,
            intermediate=self.intermediate,
            routing=Routing(self.num_experts, self.top_k),
            shared=shared,
            dtype=self.dtype,
        )

    def experts(self) -> ExpertWeights:
        """This rank's experts: no copy, so what EPLB or an update writes in place is seen."""
        scales = (getattr(self.module, f"{name}_weight_scale_inv", None) for name in ("w13", "w2"))
        gate_up_scale, down_scale = (None if scale is None else scale.data for scale in scales)
        return ExpertWeights(
            self.module.w13_weight.data,
            self.module.w2_weight.data,
            gate_up_scale=gate_up_scale,
            down_scale=down_scale,
        )

    def mine(self) -> tuple[int, ...]:
        """The physical experts of this rank."""
        return tuple(range(self.rank * self.local, (self.rank + 1) * self.local))


def refuse(layer: Layer, form: str, wrong: Iterator[str]) -> None:
    """Raise InvalidArgument with all that is wrong, if anything is."""
    if texts := list(wrong):
        raise InvalidArgument(
            f"weft cannot serve the experts of {layer.name} in form {form!r}: {'; '.join(texts)}"
        )


def of_placement(layer: Layer) -> Iterator[str]:
    """What is wrong where ranks have unequal parts."""
    if layer.local * layer.ranks != layer.num_experts:
        yield (
            f"num_experts is {layer.num_experts}, num_local_experts {layer.local} on "
            f"{layer.ranks} ranks; served are equal parts"
        )


def of_tensors(layer: Layer) -> Iterator[str]:
    """What is wrong with dtypes, shapes and scales for weft's own experts."""
    local, hidden, fp8 = layer.local, layer.hidden, layer.fp8
    fix = f": pass {layer.flag}" if layer.flag else ""
    shapes = {
        "w13_weight": (local, 2 * layer.intermediate, hidden),
        "w2_weight": (local, hidden, layer.intermediate),
    }
    if layer.dtype not in DTYPES:
        yield f"params_dtype is {layer.dtype}, served are {', '.join(map(str, DTYPES))}"
    wanted = torch.float8_e4m3fn if fp8 else layer.dtype
    for name, shape in shapes.items():
        tensor = getattr(layer.module, name)
        yield from _unlike(name, tensor, shape, wanted)
        scale = getattr(layer.module, f"{name}_scale_inv", None)
        if not fp8:
            if scale is not None or hasattr(layer.module, f"{name}_scale"):
                yield f"{name} is {tensor.dtype} with scales; served with scales is float8_e4m3fn"
            continue
        if shape[1] % FP8_BLOCK or shape[2] % FP8_BLOCK:
            yield f"{name} is {list(shape)}, served in FP8 are multiples of {FP8_BLOCK}"
        elif scale is None:
            yield (
                f"{name} is FP8 and there is no {name}_scale_inv; served is a float32 scale for "
                f"each block of {FP8_BLOCK} x {FP8_BLOCK}, not one for a tensor or a channel"
            )
        elif getattr(scale, "format_ue8m0", False):
            yield f"{name}_scale_inv has format_ue8m0, served are float32 scales{fix}"
        else:
            blocks = (local, shape[1] // FP8_BLOCK, shape[2] // FP8_BLOCK)
            yield from _unlike(f"{name}_scale_inv", scale, blocks, torch.float32)


def _unlike(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[str]:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        order = "" if tensor.is_contiguous() else ", not contiguous"
        have = f"{list(tensor.shape)} {tensor.dtype}{order}"
        yield f"{name} is {have}, served is {list(shape)} {dtype}, contiguous"
