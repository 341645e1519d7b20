# SPDX-License-Identifier: Apache-2.0
"""An engine's layer of routed experts: its checks, and its tensors as weft's expert weights."""

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
    """An engine's MoE layer under common names.

    Attributes:
        module: Has w13_weight `[local, 2 * intermediate, hidden]`, the gate first, and w2_weight
            `[local, hidden, intermediate]`. FP8 weights also have _scale_inv, one float32 per block
            of 128 x 128. MXFP4 weights are uint8, two numbers a byte, with _scale, one uint8 per 32
            columns; the engine may have rounded the intermediate size up.
        name: Name in error messages.
        num_experts: Physical experts of all ranks (EPLB).
        local: Physical experts of this rank.
        scale: Factor of the routed experts' sum, unless the routing weights already include it.
        flag: Engine flag that keeps the weights in this layout.
        interleaved: Whether the rows of w13_weight alternate between gate and up.
        bias: Suffix of the bias parameters after w13_ and w2_, or "" for none.
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
        """Whether tokens are sent as FP8."""
        return self.mxfp4 or bool(self.module.w13_weight.dtype == torch.float8_e4m3fn)

    @property
    def mxfp4(self) -> bool:
        """Whether the weights are MXFP4."""
        return bool(self.module.w13_weight.dtype == MXFP4)

    def config(self, *, shared: int = 0) -> MoEConfig:
        """Return the layer's sizes; `shared` is the shared expert's intermediate size, or 0."""
        block = FP8_BLOCK if self.mxfp4 else 1
        return MoEConfig(
            hidden=-(-self.hidden // block) * block,
            intermediate=-(-self.intermediate // block) * block,
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

    def local_expert_weights(self, *, packed: bool = True) -> ExpertWeights:
        """Return this rank's experts, sharing memory with the module because EPLB writes there.

        MXFP4 is repacked for weft, and interleaved rows are reordered. The module then holds the
        new tensors and raises if the engine loads weights over them.

        `packed=False` converts MXFP4 to FP8 even where a packed kernel exists.
        """
        module, mxfp4 = self.module, self.mxfp4
        tensors: dict[str, torch.Tensor | None] = {}
        for name, field in (("w13", "gate_up"), ("w2", "down")):
            tensors[field] = getattr(module, f"{name}_weight").data
            scale = getattr(module, f"{name}_weight_scale" + ("" if mxfp4 else "_inv"), None)
            tensors[f"{field}_scale"] = None if scale is None else scale.data
            tensors[f"{field}_bias"] = None
            if self.bias:
                tensors[f"{field}_bias"] = getattr(module, f"{name}_{self.bias}").data.to(
                    self.dtype
                )
        if mxfp4:
            weights = self._convert_mxfp4(tensors, packed=packed)
        else:
            weights = ExpertWeights(**tensors)  # type: ignore[arg-type]
            if self.interleaved:
                for tensor in (weights.gate_up, weights.gate_up_bias):
                    for each in () if tensor is None else tensor:
                        each.copy_(torch.cat((each[::2], each[1::2])))
        if mxfp4 or self.interleaved or self.bias:
            for name, field in (("w13", "gate_up"), ("w2", "down")):
                self._replace(f"{name}_weight", getattr(weights, field))
                if mxfp4:
                    self._replace(f"{name}_weight_scale", getattr(weights, f"{field}_scale"))
                if self.bias:
                    self._replace(f"{name}_{self.bias}", getattr(weights, f"{field}_bias"))
        return weights

    def _convert_mxfp4(self, tensors: dict[str, Any], *, packed: bool) -> ExpertWeights:
        """Return packed weights where a grouped GEMM supports them, otherwise FP8."""
        config, device = self.config(), self.module.w13_weight.device
        if not packed:
            why = "the layer was loaded as FP8 before"
        elif device.type == "cpu" or is_hopper(device):
            try:
                return ExpertWeights.from_mxfp4(config, interleaved=self.interleaved, **tensors)
            except InvalidArgument as error:
                why = str(error)
        else:
            why = f"{device} is not of compute capability 9.0"
        _log.warning(
            "the MXFP4 experts of %s become FP8, in twice the memory: %s. Values more than 14 "
            "powers "
            "of two below the largest of 128 x 128 are rounded", self.name, why
        )  # fmt: skip
        return ExpertWeights.from_mxfp4(
            config, interleaved=self.interleaved, packed=False, **tensors
        )

    def _replace(self, name: str, tensor: torch.Tensor) -> None:
        """Replace a parameter's tensor, and refuse later loads of that parameter."""

        def refuse_to_load(*args: Any, **kwargs: Any) -> None:
            raise OutOfOrder(
                f"{self.name}.{name} is in weft's order, and the engine loads its own order over "
                "it: restart the server"
            )

        parameter = getattr(self.module, name)
        parameter.data = tensor
        parameter.weight_loader = refuse_to_load

    def local_expert_ids(self) -> tuple[int, ...]:
        """Return the physical experts of this rank."""
        return tuple(range(self.rank * self.local, (self.rank + 1) * self.local))


def layer_error(name: str, form: str, *wrong: str) -> InvalidArgument:
    """Return an error that lists all problems of a layer."""
    return InvalidArgument(
        f"weft cannot serve the experts of {name} in form {form!r}: {'; '.join(wrong)}"
    )


def check_weights(layer: Layer, form: str, problems: Iterable[str] = ()) -> None:
    """Raise InvalidArgument for a placement or for tensors that weft does not support.

    Args:
        layer: The engine's layer.
        form: "block" if weft runs the experts; otherwise the engine does.
        problems: Problems that the engine's plug-in found.
    """
    wrong = list(problems)
    if layer.local * layer.ranks != layer.num_experts:
        wrong.append(
            f"num_experts is {layer.num_experts}, num_local_experts {layer.local} on "
            f"{layer.ranks} ranks; weft serves equal parts"
        )
    if form == "block":
        wrong += _check_tensors(layer)
    if wrong:
        raise layer_error(layer.name, form, *wrong)


def _check_tensors(layer: Layer) -> Iterator[str]:
    """Yield what weft does not support in the layer's dtypes, shapes, scales and biases."""
    if layer.dtype not in DTYPES:
        yield f"params_dtype is {layer.dtype}; weft serves {', '.join(map(str, DTYPES))}"
    if layer.mxfp4:
        yield from _check_mxfp4(layer)
    else:
        yield from _check_matrices(layer)
    if layer.bias:
        inner = layer.module.w13_weight.shape[1] // 2
        for name, rows in (("w13", 2 * inner), ("w2", layer.hidden)):
            bias = getattr(layer.module, f"{name}_{layer.bias}")
            if tuple(bias.shape) != (layer.local, rows) or bias.dtype not in DTYPES:
                have = f"{list(bias.shape)} {bias.dtype}"
                yield f"{name}_{layer.bias} is {have}; weft serves {[layer.local, rows]}"


def _check_mxfp4(layer: Layer) -> Iterator[str]:
    local, hidden = layer.local, layer.hidden
    if layer.dtype not in DTYPES_16BIT:
        yield f"params_dtype is {layer.dtype}; weft serves MXFP4 with bfloat16 and float16"
    inner = layer.module.w13_weight.shape[1] // 2  # some of the engine's kernels need whole blocks
    fits = layer.intermediate <= inner <= layer.config().intermediate
    if inner % BLOCK or hidden % BLOCK or not fits:
        yield (
            f"w13_weight is {list(layer.module.w13_weight.shape)} for intermediate "
            f"{layer.intermediate} and hidden {hidden}; weft serves multiples of {BLOCK}"
        )
    for name, rows, columns in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        for suffix, each in (("weight", 2), ("weight_scale", BLOCK)):
            tensor = getattr(layer.module, f"{name}_{suffix}")
            yield from _compare(
                f"{name}_{suffix}", tensor, (local, rows, columns // each), torch.uint8
            )


def _check_matrices(layer: Layer) -> Iterator[str]:
    local, hidden, fp8 = layer.local, layer.hidden, layer.fp8
    fix = f": pass {layer.flag}" if layer.flag else ""
    shapes = {
        "w13_weight": (local, 2 * layer.intermediate, hidden),
        "w2_weight": (local, hidden, layer.intermediate),
    }
    dtype = torch.float8_e4m3fn if fp8 else layer.dtype
    for name, shape in shapes.items():
        tensor = getattr(layer.module, name)
        yield from _compare(name, tensor, shape, dtype)
        scale = getattr(layer.module, f"{name}_scale_inv", None)
        if not fp8:
            if scale is not None or hasattr(layer.module, f"{name}_scale"):
                yield f"{name} is {tensor.dtype} with scales; weft serves scales with float8_e4m3fn"
            continue
        if shape[1] % FP8_BLOCK or shape[2] % FP8_BLOCK:
            yield f"{name} is {list(shape)}; in FP8, weft serves multiples of {FP8_BLOCK}"
        elif scale is None:
            yield (
                f"{name} is FP8 without {name}_scale_inv; weft serves a float32 scale per block of "
                f"{FP8_BLOCK} x {FP8_BLOCK}, not one per tensor or channel"
            )
        elif getattr(scale, "format_ue8m0", False):
            yield f"{name}_scale_inv has format_ue8m0; weft serves float32 scales{fix}"
        else:
            blocks = (local, shape[1] // FP8_BLOCK, shape[2] // FP8_BLOCK)
            yield from _compare(f"{name}_scale_inv", scale, blocks, torch.float32)


def _compare(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[str]:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        order = "" if tensor.is_contiguous() else ", not contiguous"
        have = f"{list(tensor.shape)} {tensor.dtype}{order}"
        yield f"{name} is {have}; weft serves {list(shape)} {dtype}, contiguous"
