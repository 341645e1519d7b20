# SPDX-License-Identifier: Apache-2.0
"""A layer of routed experts as an engine holds it: the same tensors for weft, or a refusal."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.errors import InvalidArgument, OutOfOrder
from weft.gemm.config import DTYPES_16BIT, MXFP4, is_hopper
from weft.gemm.mxfp4 import BLOCK
from weft.moe import ExpertWeights, MoEConfig, Routing
from weft.moe.models import SWIGLU, Gating
from weft.shape import FP8_BLOCK

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Layer:
    """What weft reads of an engine's layer, under one name for each engine's own.

    module: has w13_weight `[local, 2 * intermediate, hidden]`, the gate first, and w2_weight
        `[local, hidden, intermediate]`; in FP8 also their _scale_inv, float32, one for each block
        of 128 x 128. In MXFP4 both are uint8, two numbers a byte, with their _scale, uint8, one for
        each 32 columns; the engine may have rounded the intermediate size up.
    name: as errors say it.   num_experts: physical ones of all ranks (EPLB).
    scale: what the routed experts' sum is multiplied by, where the router's weights lack it.
    flag: what makes the engine keep weights in this order, for its user.
    interleaved: w13_weight has rows of gate and up in turn.
    bias: what the biases are called after w13_ and w2_, or "" for none.
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
    gating: Gating = SWIGLU
    interleaved: bool = False
    bias: str = ""

    @property
    def fp8(self) -> bool:
        """Do tokens travel as FP8?"""
        return self.mxfp4 or bool(self.module.w13_weight.dtype == torch.float8_e4m3fn)

    @property
    def mxfp4(self) -> bool:
        """Are the weights MXFP4?"""
        return bool(self.module.w13_weight.dtype == MXFP4)

    def config(self, *, shared: int = 0) -> MoEConfig:
        """Its sizes. `shared`: the intermediate size of the shared expert that weft runs, or 0."""
        whole = FP8_BLOCK if self.mxfp4 else 1
        return MoEConfig(
            hidden=-(-self.hidden // whole) * whole,
            intermediate=-(-self.intermediate // whole) * whole,
            routing=Routing(self.num_experts, self.top_k),
            gating=self.gating,
            shared=shared,
            biased=bool(self.bias),
            dtype=self.dtype,
        )

    @property
    def is_reordered(self) -> bool:
        """Whether weft serves the weights in another order or dtype than the engine loads them."""
        return self.mxfp4 or self.interleaved or bool(self.bias)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the module's parameters that weft reads, by name."""
        names = [f"{each}_weight" for each in ("w13", "w2")]
        for suffix in ("weight_scale", "weight_scale_inv", self.bias):
            names += [f"{each}_{suffix}" for each in ("w13", "w2") if suffix]
        return {name: getattr(self.module, name) for name in names if hasattr(self.module, name)}

    def take(self, *, packed: bool = True) -> ExpertWeights:
        """Return this rank's experts: the module's tensors, so that EPLB's writes are seen.

        Nothing is copied, except that MXFP4 is packed for weft and interleaved rows are put in
        weft's order. Then the module gets the new tensors and refuses to load others over them.

        packed: whether MXFP4 may be packed, or becomes FP8 in any case.
        """
        module, mxfp4 = self.module, self.mxfp4
        found: dict[str, torch.Tensor | None] = {}
        for name, field in (("w13", "gate_up"), ("w2", "down")):
            found[field] = getattr(module, f"{name}_weight").data
            scale = getattr(module, f"{name}_weight_scale" + ("" if mxfp4 else "_inv"), None)
            found[f"{field}_scale"] = None if scale is None else scale.data
            found[f"{field}_bias"] = None
            if self.bias:
                found[f"{field}_bias"] = getattr(module, f"{name}_{self.bias}").data.to(self.dtype)
        if mxfp4:
            weights = self._of_mxfp4(found, packed=packed)
        else:
            weights = ExpertWeights(**found)  # type: ignore[arg-type]
            if self.interleaved:
                for tensor in (weights.gate_up, weights.gate_up_bias):
                    for each in () if tensor is None else tensor:
                        each.copy_(torch.cat((each[::2], each[1::2])))
        if mxfp4 or self.interleaved or self.bias:
            for name, field in (("w13", "gate_up"), ("w2", "down")):
                self._put(f"{name}_weight", getattr(weights, field))
                if mxfp4:
                    self._put(f"{name}_weight_scale", getattr(weights, f"{field}_scale"))
                if self.bias:
                    self._put(f"{name}_{self.bias}", getattr(weights, f"{field}_bias"))
        return weights

    def _of_mxfp4(self, found: dict[str, Any], *, packed: bool) -> ExpertWeights:
        """Return packed weights where a grouped GEMM multiplies those, else FP8."""
        config, device = self.config(), self.module.w13_weight.device
        if not packed:
            why = "the layer was loaded as FP8 before"
        elif device.type == "cpu" or is_hopper(device):
            try:
                return ExpertWeights.from_mxfp4(config, interleaved=self.interleaved, **found)
            except InvalidArgument as error:
                why = str(error)
        else:
            why = f"{device} is not of compute capability 9.0"
        _log.warning(
            "the MXFP4 experts of %s become FP8, in twice the memory: %s. Numbers over 14 powers "
            "of two below the largest of 128 x 128 are rounded", self.name, why
        )  # fmt: skip
        return ExpertWeights.from_mxfp4(config, interleaved=self.interleaved, packed=False, **found)

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        """Let the module have a tensor in the place of what the engine loaded."""

        def refuse_to_load(*args: Any, **given: Any) -> None:
            raise OutOfOrder(
                f"{self.name}.{name} is in weft's order, and the engine loads weights in its own "
                "over it: start the server anew"
            )

        parameter = getattr(self.module, name)
        parameter.data = tensor
        parameter.weight_loader = refuse_to_load

    def mine(self) -> tuple[int, ...]:
        """The physical experts of this rank."""
        return tuple(range(self.rank * self.local, (self.rank + 1) * self.local))


def refusal(name: str, form: str, *wrong: str) -> InvalidArgument:
    """The error that names a layer and all that is wrong with it."""
    return InvalidArgument(
        f"weft cannot serve the experts of {name} in form {form!r}: {'; '.join(wrong)}"
    )


def check(layer: Layer, form: str, own: Iterable[str] = ()) -> None:
    """Raise InvalidArgument for a placement or tensors that weft does not take.

    form: "block", in which weft multiplies, or the engine's own experts do.   own: what else is
    wrong, which the engine's plug-in found.
    """
    wrong = list(own)
    if layer.local * layer.ranks != layer.num_experts:
        wrong.append(
            f"num_experts is {layer.num_experts}, num_local_experts {layer.local} on "
            f"{layer.ranks} ranks; served are equal parts"
        )
    if form == "block":
        wrong += _of_tensors(layer)
    if wrong:
        raise refusal(layer.name, form, *wrong)


def _of_tensors(layer: Layer) -> Iterator[str]:
    """What is wrong with dtypes, shapes, scales and biases for weft's own experts."""
    if layer.dtype not in DTYPES:
        yield f"params_dtype is {layer.dtype}, served are {', '.join(map(str, DTYPES))}"
    if layer.mxfp4:
        yield from _of_mxfp4(layer)
    else:
        yield from _of_matrices(layer)
    if layer.bias:
        inner = layer.module.w13_weight.shape[1] // 2
        for name, rows in (("w13", 2 * inner), ("w2", layer.hidden)):
            bias = getattr(layer.module, f"{name}_{layer.bias}")
            if tuple(bias.shape) != (layer.local, rows) or bias.dtype not in DTYPES:
                have = f"{list(bias.shape)} {bias.dtype}"
                yield f"{name}_{layer.bias} is {have}, served is {[layer.local, rows]}"


def _of_mxfp4(layer: Layer) -> Iterator[str]:
    local, hidden = layer.local, layer.hidden
    if layer.dtype not in DTYPES_16BIT:
        yield f"params_dtype is {layer.dtype}, served with MXFP4 are bfloat16 and float16"
    inner = layer.module.w13_weight.shape[1] // 2  # the engine's kernels may want whole blocks
    fits = layer.intermediate <= inner <= layer.config().intermediate
    if inner % BLOCK or hidden % BLOCK or not fits:
        yield (
            f"w13_weight is {list(layer.module.w13_weight.shape)} for intermediate "
            f"{layer.intermediate} and hidden {hidden}; served are multiples of {BLOCK}"
        )
    for name, rows, columns in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        for suffix, each in (("weight", 2), ("weight_scale", BLOCK)):
            tensor = getattr(layer.module, f"{name}_{suffix}")
            yield from _unlike(
                f"{name}_{suffix}", tensor, (local, rows, columns // each), torch.uint8
            )


def _of_matrices(layer: Layer) -> Iterator[str]:
    local, hidden, fp8 = layer.local, layer.hidden, layer.fp8
    fix = f": pass {layer.flag}" if layer.flag else ""
    shapes = {
        "w13_weight": (local, 2 * layer.intermediate, hidden),
        "w2_weight": (local, hidden, layer.intermediate),
    }
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
