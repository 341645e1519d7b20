# SPDX-License-Identifier: Apache-2.0
"""Checks of an engine's layer of routed experts, and conversion of its tensors for weft."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.errors import InvalidArgument, OutOfOrder
from weft.gemm.config import DTYPES_16BIT, MXFP4, is_hopper
from weft.gemm.mxfp4 import BLOCK, quantize_mxfp4, unpack_mxfp4
from weft.moe import ExpertWeights, MoEConfig, Routing
from weft.moe.models import SWIGLU, Gating, Ungated
from weft.shape import FP8_BLOCK

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_log = logging.getLogger(__name__)


class ParameterFormat(NamedTuple):
    """Format in which the engine loads a parameter.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        loader: Its weight_loader, or None.
    """

    shape: torch.Size
    dtype: torch.dtype
    loader: Any


@dataclass(frozen=True, slots=True)
class Layer:
    """An engine's layer of routed experts, with the same attributes for every engine.

    Attributes:
        module: Module with w13_weight `[num_local_experts, 2 * intermediate, hidden]`, the gate
            first (without a gate `[num_local_experts, intermediate, hidden]`), and w2_weight
            `[num_local_experts, hidden, intermediate]`. FP8 weights also have _scale_inv, one
            float32 per block of 128 x 128. MXFP4 weights are uint8, two values per byte, with
            _scale or _scale_inv, one uint8 per 32 columns; the engine may have rounded the
            intermediate size up.
        name: Name of the layer in error messages.
        num_experts: Physical experts of all ranks (EPLB).
        num_local_experts: Physical experts of this rank.
        scale: Factor of the routed experts' sum. 1 if the routing weights include it.
        flag: Engine flag that selects this layout of the weights.
        interleaved: Whether the rows of w13_weight alternate between gate and up.
        bias: Suffix of the bias parameters after w13_ and w2_, or "" for none.
    """

    module: Any
    name: str
    num_experts: int
    num_local_experts: int
    ep_rank: int
    ep_size: int
    top_k: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    scale: float = 1.0
    flag: str = ""
    gating: Gating | Ungated = SWIGLU
    interleaved: bool = False
    bias: str = ""

    @property
    def uses_fp8_rows(self) -> bool:
        """Whether rows are sent as FP8."""
        return self.is_mxfp4 or bool(self.module.w13_weight.dtype == torch.float8_e4m3fn)

    @property
    def is_mxfp4(self) -> bool:
        """Whether the weights are MXFP4."""
        return bool(self.module.w13_weight.dtype == MXFP4)

    @property
    def scale_suffix(self) -> str:
        """Suffix of the parameters with the weights' scales, after w13_ and w2_."""
        is_inv = not self.is_mxfp4 or hasattr(self.module, "w13_weight_scale_inv")
        return "weight_scale_inv" if is_inv else "weight_scale"

    def build_config(self, *, shared: int = 0) -> MoEConfig:
        """Build the layer's config; `shared` is the shared expert's intermediate size, or 0."""
        block = FP8_BLOCK if self.is_mxfp4 else 1
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
        """Whether weft needs the weights in another order or dtype than the engine."""
        return self.is_mxfp4 or self.interleaved or bool(self.bias)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the module's parameters that weft uses, by name."""
        names = [f"{prefix}_weight" for prefix in ("w13", "w2")]
        for suffix in ("weight_scale", "weight_scale_inv", self.bias):
            names += [f"{prefix}_{suffix}" for prefix in ("w13", "w2") if suffix]
        return {name: getattr(self.module, name) for name in names if hasattr(self.module, name)}

    def local_expert_weights(self, *, packed: bool = True) -> ExpertWeights:
        """Return this rank's expert weights in the memory of the module, where EPLB writes.

        MXFP4 is repacked, and interleaved rows are reordered. The module then has the new tensors,
        and raises if the engine loads weights into them. `packed=False` converts MXFP4 to FP8 even
        if a kernel for packed weights exists.
        """
        module, mxfp4, scale_suffix = self.module, self.is_mxfp4, self.scale_suffix
        tensors: dict[str, torch.Tensor | None] = {}
        for name, field in (("w13", "gate_up"), ("w2", "down")):
            tensors[field] = getattr(module, f"{name}_weight").data
            scale = getattr(module, f"{name}_{scale_suffix}", None)
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
                    for rows in () if tensor is None else tensor:  # of one expert
                        rows.copy_(torch.cat((rows[::2], rows[1::2])))
        if mxfp4 or self.interleaved or self.bias:
            for name, field in (("w13", "gate_up"), ("w2", "down")):
                self._replace(f"{name}_weight", getattr(weights, field))
                if mxfp4:
                    self._replace(f"{name}_{scale_suffix}", getattr(weights, f"{field}_scale"))
                if self.bias:
                    self._replace(f"{name}_{self.bias}", getattr(weights, f"{field}_bias"))
        return weights

    def _convert_mxfp4(self, tensors: dict[str, Any], *, packed: bool) -> ExpertWeights:
        """Return packed weights if a grouped GEMM supports them, otherwise FP8."""
        config, device = self.build_config(), self.module.w13_weight.device
        if not packed:
            reason = "an earlier load converted this layer to FP8"
        elif device.type == "cpu" or is_hopper(device):
            try:
                return ExpertWeights.from_mxfp4(config, interleaved=self.interleaved, **tensors)
            except InvalidArgument as error:
                reason = str(error)
        else:
            reason = f"{device} is not of compute capability 9.0"
        _log.warning(
            "converting the MXFP4 experts of %s to FP8 (2x memory): %s. Values more than 14 powers "
            "of two below the largest value of their 128 x 128 block are rounded",
            self.name, reason,
        )  # fmt: skip
        return ExpertWeights.from_mxfp4(
            config, interleaved=self.interleaved, packed=False, **tensors
        )

    def restore(self, formats: Mapping[str, ParameterFormat]) -> None:
        """Give the engine's tensors of a reordered layer back to it, with equal values.

        Rows of weights that are not MXFP4 are put into the engine's order in place.

        Args:
            formats: Original format of each parameter that `local_expert_weights` replaced.
        """
        for name, (shape, dtype, loader) in formats.items():
            parameter = getattr(self.module, name)
            if name.endswith("_weight") and self.is_mxfp4:
                self._unpack_mxfp4(name.removesuffix("_weight"), formats)
            elif name.endswith("_weight"):
                for rows in parameter.data if self.interleaved else ():  # of one expert
                    rows.copy_(self._select_rows(name, rows, len(rows)))
            elif self.bias and name.endswith(self.bias):
                rows = [self._select_rows(name, rows, shape[1]) for rows in parameter.data]
                parameter.data = torch.stack(rows).to(dtype)
            if loader is None:
                del parameter.weight_loader
            else:
                parameter.weight_loader = loader

    def _select_rows(self, name: str, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Return the first `count` rows of one expert, without padding, in the engine's order."""
        if not name.startswith("w13"):
            return rows[:count]
        projections = self.gating.num_projections
        parts = [part[: count // projections] for part in rows.chunk(projections)]
        return torch.stack(parts, dim=1).flatten(0, 1) if self.interleaved else torch.cat(parts)

    def _unpack_mxfp4(self, prefix: str, formats: Mapping[str, ParameterFormat]) -> None:
        names = f"{prefix}_weight", f"{prefix}_{self.scale_suffix}"
        weight, scale = (getattr(self.module, name) for name in names)
        values, powers = (
            torch.empty(formats[name].shape, dtype=torch.uint8, device=weight.device)
            for name in names
        )
        _, num_rows, num_bytes = values.shape
        for expert in range(len(values)):  # one at a time, because fp32 copies are large
            one = slice(expert, expert + 1)
            matrix = unpack_mxfp4(weight.data[one], scale.data[one])[0]
            rows = self._select_rows(prefix, matrix, num_rows)[:, : 2 * num_bytes]
            pair = quantize_mxfp4(rows.contiguous().unsqueeze(0))
            values[expert], powers[expert] = pair[0][0], pair[1][0]
        weight.data, scale.data = values, powers

    def _replace(self, name: str, tensor: torch.Tensor) -> None:
        """Replace a parameter's tensor, and make later loads of the parameter raise."""
        parameter = getattr(self.module, name)
        parameter.data = tensor
        refuse_loads(parameter, f"{self.name}.{name}")

    def read_formats(self) -> dict[str, ParameterFormat]:
        """Return the format of each parameter that `local_expert_weights` will replace, by name."""
        suffixes = {self.bias} - {""}
        suffixes |= {"weight"} if self.is_reordered else set()
        suffixes |= {self.scale_suffix} if self.is_mxfp4 else set()
        return {
            name: ParameterFormat(
                parameter.shape, parameter.dtype, getattr(parameter, "weight_loader", None)
            )
            for name, parameter in self.parameters().items()
            if name.partition("_")[2] in suffixes
        }

    def local_expert_ids(self) -> tuple[int, ...]:
        """Return the ids of this rank's physical experts."""
        first = self.ep_rank * self.num_local_experts
        return tuple(range(first, first + self.num_local_experts))


@dataclass(frozen=True, slots=True)
class _LoadRefusal:
    """A weight_loader that raises OutOfOrder."""

    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise OutOfOrder(
            f"{self.name} is in weft's row order or format, but this load is in the engine's: "
            "update weights by a method that prepares the layers (SGLang 0.5.23: "
            "update_weights_from_disk or begin_weight_update; vLLM: reload_weights), or restart "
            "the server"
        )


def refuse_loads(parameter: nn.Parameter, name: str) -> None:
    """Make later loads of a converted parameter raise OutOfOrder. Public within weft."""
    parameter.weight_loader = _LoadRefusal(name)  # type: ignore[attr-defined]


def check_loadable(parameter: nn.Parameter) -> None:
    """Raise OutOfOrder for a parameter of `refuse_loads`. Public within weft.

    For loads that copy into the parameter without its weight_loader.
    """
    loader = getattr(parameter, "weight_loader", None)
    if isinstance(loader, _LoadRefusal):
        loader()


def check_exportable(parameter: nn.Parameter) -> None:
    """Raise OutOfOrder for a parameter of `refuse_loads`, which others must not read."""
    loader = getattr(parameter, "weight_loader", None)
    if isinstance(loader, _LoadRefusal):
        raise OutOfOrder(
            f"{loader.name} is in weft's row order or format, which cannot be undone: save or send "
            "the weights from a server without weft"
        )


def build_layer_error(name: str, form: str, *reasons: str) -> InvalidArgument:
    """Build an error that lists everything in a layer that weft does not support."""
    return InvalidArgument(
        f"weft does not support the experts of {name} in form {form!r}: {'; '.join(reasons)}"
    )


def check_weights(layer: Layer, form: str, reasons: Iterable[str] = ()) -> None:
    """Raise InvalidArgument for an expert placement or tensors that weft does not support.

    Args:
        layer: The engine's layer.
        form: "block" if weft runs the experts; otherwise the engine does.
        reasons: Reasons of the engine's plug-in why the layer is not supported.
    """
    unsupported = list(reasons)
    if layer.num_local_experts * layer.ep_size != layer.num_experts:
        unsupported.append(
            f"num_experts is {layer.num_experts}, num_local_experts {layer.num_local_experts} on "
            f"{layer.ep_size} ranks; weft needs equal numbers on all ranks"
        )
    if form == "block":
        unsupported += _check_tensors(layer)
    if unsupported:
        raise build_layer_error(layer.name, form, *unsupported)


def _check_tensors(layer: Layer) -> Iterator[str]:
    """Yield each dtype, shape, scale and bias of the layer that weft does not support."""
    if layer.dtype not in DTYPES:
        yield f"params_dtype is {layer.dtype}; weft supports {', '.join(map(str, DTYPES))}"
    if layer.is_mxfp4:
        yield from _check_mxfp4(layer)
    else:
        yield from _check_matrices(layer)
    if layer.bias:
        for name, rows in (("w13", layer.module.w13_weight.shape[1]), ("w2", layer.hidden)):
            bias = getattr(layer.module, f"{name}_{layer.bias}")
            if tuple(bias.shape) != (layer.num_local_experts, rows) or bias.dtype not in DTYPES:
                actual = f"{list(bias.shape)} {bias.dtype}"
                shape = [layer.num_local_experts, rows]
                yield f"{name}_{layer.bias} is {actual}; weft supports {shape}"


def _check_mxfp4(layer: Layer) -> Iterator[str]:
    num_local_experts, hidden = layer.num_local_experts, layer.hidden
    if layer.dtype not in DTYPES_16BIT:
        yield f"params_dtype is {layer.dtype}; weft supports bfloat16 and float16 for MXFP4"
    # Some of the engine's kernels need an intermediate size of whole blocks.
    up_rows = layer.module.w13_weight.shape[1]
    inner = up_rows // layer.gating.num_projections
    fits = layer.intermediate <= inner <= layer.build_config().intermediate
    if inner % BLOCK or hidden % BLOCK or not fits:
        yield (
            f"w13_weight is {list(layer.module.w13_weight.shape)} for intermediate "
            f"{layer.intermediate} and hidden {hidden}; weft supports multiples of {BLOCK}"
        )
    for name, rows, columns in (("w13", up_rows, hidden), ("w2", hidden, inner)):
        for suffix, values_per_byte in (("weight", 2), (layer.scale_suffix, BLOCK)):
            tensor = getattr(layer.module, f"{name}_{suffix}")
            yield from _check_tensor(
                f"{name}_{suffix}",
                tensor,
                (num_local_experts, rows, columns // values_per_byte),
                torch.uint8,
            )


def _check_matrices(layer: Layer) -> Iterator[str]:
    num_local_experts, hidden, fp8 = layer.num_local_experts, layer.hidden, layer.uses_fp8_rows
    fix = f": pass {layer.flag}" if layer.flag else ""
    up_rows = layer.gating.num_projections * layer.intermediate
    shapes = {
        "w13_weight": (num_local_experts, up_rows, hidden),
        "w2_weight": (num_local_experts, hidden, layer.intermediate),
    }
    dtype = torch.float8_e4m3fn if fp8 else layer.dtype
    for name, shape in shapes.items():
        tensor = getattr(layer.module, name)
        yield from _check_tensor(name, tensor, shape, dtype)
        scale = getattr(layer.module, f"{name}_scale_inv", None)
        if not fp8:
            if scale is not None or hasattr(layer.module, f"{name}_scale"):
                yield (
                    f"{name} is {tensor.dtype} with scales; weft supports scales only for "
                    "float8_e4m3fn"
                )
            continue
        if shape[1] % FP8_BLOCK or shape[2] % FP8_BLOCK:
            yield f"{name} is {list(shape)}; in FP8, weft supports multiples of {FP8_BLOCK}"
        elif scale is None:
            yield (
                f"{name} is FP8 without {name}_scale_inv; weft supports a float32 scale per block "
                f"of {FP8_BLOCK} x {FP8_BLOCK}, not one per tensor or channel"
            )
        elif getattr(scale, "format_ue8m0", False):
            yield f"{name}_scale_inv has format_ue8m0; weft supports float32 scales{fix}"
        else:
            blocks = (num_local_experts, shape[1] // FP8_BLOCK, shape[2] // FP8_BLOCK)
            yield from _check_tensor(f"{name}_scale_inv", scale, blocks, torch.float32)


def _check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[str]:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        order = "" if tensor.is_contiguous() else ", not contiguous"
        actual = f"{list(tensor.shape)} {tensor.dtype}{order}"
        yield f"{name} is {actual}; weft supports {list(shape)} {dtype}, contiguous"
