# SPDX-License-Identifier: Apache-2.0
"""A rank's expert weights, stacked for grouped GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path

import torch

from weft.arguments import check_bools, check_instance, check_int, check_ints, raise_invalid
from weft.errors import InvalidArgument
from weft.gemm.config import DTYPES_16BIT, FP8, MXFP4
from weft.gemm.mxfp4 import (
    BLOCK,
    SCALE_DTYPES,
    UNIT_BYTES,
    UNIT_K,
    UNIT_N,
    dequantize_mxfp4,
    pack_matrix,
    pack_mxfp4,
    quantize_mxfp4,
)
from weft.group.hosts import resolve_device
from weft.moe.experts.checkpoint import MAX_LAYER, Part, open_layer
from weft.moe.experts.modules import Expert
from weft.moe.experts.quantize import (
    convert_mxfp4_to_fp8,
    convert_to_fp8,
    expand_scales,
    quantize_blocks,
)
from weft.moe.models import MoEConfig
from weft.runtime.ambient import disable_autocast
from weft.runtime.check import check_tensor
from weft.shape import FP8_BLOCK


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of all experts of a rank, in local order.

    MXFP4 weights are packed by `weft.gemm.pack_mxfp4`: uint8 `[local_experts, rows / 64,
    columns / 128, 4352]`, with scales `[local_experts, rows]`.

    Attributes:
        gate_up: `[local_experts, 2 * intermediate, hidden]`, gate rows first; up alone,
            `[local_experts, intermediate, hidden]`, if the experts are `Ungated`.
        down: `[local_experts, hidden, intermediate]`.
        gate_up_bias: `[local_experts, rows of gate_up]` of the layer's dtype, or None.
        down_bias: `[local_experts, hidden]` of the layer's dtype, or None.
        gate_up_scale: For float8_e4m3fn weights, the scale of each block, float32
            `[local_experts, rows / 128, columns / 128]`.
        down_scale: For float8_e4m3fn weights, the scale of each block, float32
            `[local_experts, rows / 128, columns / 128]`.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that are present, each `[local_experts, ...]`."""
        fields = (getattr(self, field.name) for field in dataclass_fields(self))
        return tuple(tensor for tensor in fields if tensor is not None)

    @disable_autocast
    def to_fp8(self) -> ExpertWeights:
        """Return the same experts in FP8 with one scale for each 128 x 128 block.

        Raises:
            InvalidArgument: a size is not a multiple of 128.
        """
        return self._convert(quantize_blocks)

    @disable_autocast
    def to_mxfp4(self) -> ExpertWeights:
        """Return the same experts in MXFP4, packed for `grouped_gemm`.

        Raises:
            InvalidArgument: a size is not a multiple of 128, the weights have scales, or
                `weft.gemm.pack_mxfp4` rejects them.
        """
        if self.gate_up_scale is not None or self.down_scale is not None:
            raise InvalidArgument(
                f"weights are {self.gate_up.dtype} with scales; to_mxfp4 needs weights without"
            )
        return self._convert(lambda weights: pack_mxfp4(*quantize_mxfp4(weights)))

    def _convert(
        self, convert: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    ) -> ExpertWeights:
        gate_up, gate_up_scale = convert(self.gate_up)
        down, down_scale = convert(self.down)
        return replace(
            self, gate_up=gate_up, down=down, gate_up_scale=gate_up_scale, down_scale=down_scale
        )

    @classmethod
    @disable_autocast
    def stack(
        cls,
        config: MoEConfig,
        experts: Sequence[Expert],
        device: torch.device | str = "cpu",
    ) -> ExpertWeights:
        """Return the stacked weights of a list of experts, which may be empty.

        Args:
            config: Sizes of the layer.
            experts: This rank's experts in local order.
            device: Device of the result.

        Raises:
            InvalidArgument: an expert lacks a bias, or its sizes are not the config's.
        """
        check_instance("config", config, MoEConfig)
        device = None if device is None else resolve_device(device)
        if not isinstance(experts, list | tuple):
            raise_invalid("experts", experts, "a list of weft.moe.Expert")
        for i, expert in enumerate(experts):
            check_instance(f"experts[{i}]", expert, Expert)
        stacked: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in _get_expected_tensors(config, config.dtype).items():
            stacked[name] = torch.empty((len(experts), *shape), dtype=dtype, device=device)
            for i, expert in enumerate(experts):
                tensor = getattr(expert, name, None)
                if tensor is None or tensor.shape != shape:
                    actual = None if tensor is None else list(tensor.shape)
                    raise InvalidArgument(
                        f"expert {i} has {name} {actual}; the config expects {list(shape)}"
                    )
                stacked[name][i] = tensor
        return cls(**stacked)

    @classmethod
    @disable_autocast
    def from_safetensors(
        cls,
        folder: Path | str,
        layer: int,
        experts: Sequence[int] | torch.Tensor,
        *,
        config: MoEConfig,
        prefix: str | None = None,
        fp8: bool = False,
        device: torch.device | str = "cpu",
    ) -> ExpertWeights:
        """Read some experts of one layer of a checkpoint, in the given order.

        Experts may be separate (most checkpoints) or fused (GPT-OSS, Llama-4, and transformers'
        layout in memory). Formats are plain floats, FP8, MXFP4, and symmetric INT4 of
        compressed-tensors with a scale per 32 or 128 columns. `quantization_config` in the
        folder's config.json declares the format. Without it, only tensors with an unambiguous
        format are read.

        Files are memory-mapped, and only these experts are read. Beyond the result, memory holds
        one matrix at a time. Needs the package safetensors.

        With fp8 the result depends on the checkpoint:

        - MXFP4, and FP8 with a scale per 128 x 128: the bits of the checkpoint.
        - FP8 with power-of-two scales per 32 or 128 columns (MXFP8), or with one scale per matrix:
          each 128 x 128 block uses its largest scale. Values below 2^-6 of it are rounded to
          multiples of 2^-9 of it; all others are exact.
        - Other FP8, INT4 and wider weights: rounded as by `to_fp8`.

        Without fp8, weights are multiplied by their scales and rounded to the config's dtype.

        Args:
            folder: Folder with model.safetensors.index.json or model.safetensors, as transformers
                saves them.
            layer: Index of the layer in the model.
            experts: Global ids, such as `MoE.local_experts`.
            config: Sizes of the layer, such as `MoEConfig.from_hf(folder)`. If sizes are not
                multiples of 128 (GPT-OSS: 2880, Nemotron-3 Nano: 1856), round the config's sizes up
                for fp8; the additional rows and columns are zero. Fused MXFP4 experts and separate
                unquantised ones are padded.
            prefix: Prefix of the layers' names if the checkpoint has several stacks of layers:
                "mtp" for `mtp.layers.0.*`. Default: the main model's stack.
            fp8: Return weights for `MoE(fp8=True)`.
            device: Device of the result.

        Raises:
            InvalidArgument: a tensor is missing, has the wrong shape or a dtype that weft does not
                read, or is MXFP4 that `weft.gemm.pack_mxfp4` rejects.
        """
        config = check_instance("config", config, MoEConfig)
        layer = check_int("layer", layer, 0, MAX_LAYER)
        expert_ids = check_ints("experts", experts, 0, config.routing.num_experts - 1)
        check_bools(fp8=fp8)
        device = resolve_device(device)
        if prefix is not None and not isinstance(prefix, str):
            raise_invalid("prefix", prefix, "a str such as 'mtp'")
        with open_layer(folder, layer, config, prefix) as reader:
            weight_dtype = MXFP4 if reader.mxfp4 else FP8
            weights = cls._allocate(
                config, len(expert_ids), device, weight_dtype if fp8 else config.dtype
            )
            for local_id, expert in enumerate(expert_ids):
                for part in reader.read_parts(expert):
                    weights._write(local_id, part)
        return weights

    @classmethod
    @disable_autocast
    def from_mxfp4(
        cls,
        config: MoEConfig,
        gate_up: torch.Tensor,
        gate_up_scale: torch.Tensor,
        down: torch.Tensor,
        down_scale: torch.Tensor,
        *,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        interleaved: bool = False,
        packed: bool = True,
    ) -> ExpertWeights:
        """Convert a rank's MXFP4 experts from an engine's tensors, for `MoE(fp8=True)`.

        The tensors may be smaller than the config: additional rows and columns are zero.

        Args:
            config: Sizes of the layer.
            gate_up: uint8 `[local_experts, 2 * intermediate, hidden / 2]`, two values per byte; of
                `Ungated` experts `[local_experts, intermediate, hidden / 2]`.
            gate_up_scale: uint8 or float8_e8m0fnu `[local_experts, rows of gate_up, hidden / 32]`.
            down: uint8 `[local_experts, hidden, intermediate / 2]`.
            down_scale: uint8 or float8_e8m0fnu `[local_experts, hidden, intermediate / 32]`.
            gate_up_bias: `[local_experts, rows of gate_up]` if the config is biased.
            down_bias: `[local_experts, hidden]` if the config is biased.
            interleaved: Gate and up rows alternate (GPT-OSS). Default: gate rows first.
            packed: Return MXFP4 for `grouped_gemm`, with equal values. False: FP8 with a scale per
                128 x 128. Values with a power of two more than 14 powers below the largest of the
                block are rounded to multiples of 2^-15 of the largest; all others are exact.

        Raises:
            InvalidArgument: a tensor has the wrong shape or dtype, a scale is NaN, or
                `weft.gemm.pack_mxfp4` rejects the weights.
        """
        check_instance("config", config, MoEConfig)
        check_bools(interleaved=interleaved, packed=packed)
        device = getattr(gate_up, "device", torch.device("cpu"))
        for name, tensor in (("gate_up", gate_up), ("down", down)):  # determine all other sizes
            shape = ("local_experts", "rows", "columns")
            check_tensor(name, tensor, shape=shape, dtypes=(torch.uint8,), device=device)
        projections = config.gating.num_projections
        experts, inner, hidden = gate_up.shape[0], gate_up.shape[1] // projections, down.shape[1]
        up_rows = projections * inner
        for name, tensor, sizes, dtypes in (
            ("gate_up", gate_up, (experts, up_rows, hidden // 2), (torch.uint8,)),
            ("down", down, (experts, hidden, inner // 2), (torch.uint8,)),
            ("gate_up_scale", gate_up_scale, (experts, up_rows, hidden // BLOCK), SCALE_DTYPES),
            ("down_scale", down_scale, (experts, hidden, inner // BLOCK), SCALE_DTYPES),
        ):
            check_tensor(name, tensor, shape=sizes, dtypes=dtypes, device=device)
        if not (0 <= config.intermediate - inner < UNIT_K and 0 <= config.hidden - hidden < UNIT_K):
            raise InvalidArgument(
                f"the weights have intermediate {inner} and hidden {hidden}, the config "
                f"{config.intermediate} and {config.hidden}; the config's sizes must be equal to "
                f"these, or to the next multiples of {UNIT_K}"
            )
        biases = {"gate_up": gate_up_bias, "down": down_bias}
        for field, bias in biases.items():
            rows = {"gate_up": up_rows, "down": hidden}[field]
            if config.biased and (bias is None or tuple(bias.shape) != (experts, rows)):
                actual = None if bias is None else list(bias.shape)
                raise InvalidArgument(f"{field}_bias is {actual}; it must be {[experts, rows]}")
        weights = cls._allocate(config, experts, device, MXFP4 if packed else FP8)
        target_inner = config.intermediate
        tensors = {"gate_up": (gate_up, gate_up_scale), "down": (down, down_scale)}
        copies = []  # field, target rows, source rows, target columns
        for i in range(projections):
            target = slice(i * target_inner, (i + 1) * target_inner)
            contiguous = slice(i * inner, (i + 1) * inner)
            source = slice(i, None, projections) if interleaved else contiguous
            copies.append(("gate_up", target, source, config.hidden))
        copies.append(("down", slice(0, config.hidden), slice(0, hidden), target_inner))
        for expert in range(experts):
            for field, target, source, columns in copies:
                values, scale = (t[expert].view(torch.uint8)[source] for t in tensors[field])
                name = f"expert {expert}, {field} of rows {target.start}.."
                weights._write(expert, Part(name, field, target, values, scale).pad(columns))
                bias = biases[field]
                if config.biased and bias is not None:
                    part = Part(name, f"{field}_bias", target, bias[expert][source])
                    weights._write(expert, part.pad(0))
        return weights

    @classmethod
    def _allocate(
        cls, config: MoEConfig, experts: int, device: torch.device, weight_dtype: torch.dtype
    ) -> ExpertWeights:
        """Allocate uninitialised weights with a config's sizes."""
        inner, hidden = config.intermediate, config.hidden
        if weight_dtype in (FP8, MXFP4) and (inner % FP8_BLOCK or hidden % FP8_BLOCK):
            raise InvalidArgument(
                f"fp8 is True for intermediate {inner} and hidden {hidden}; blocks are {FP8_BLOCK} "
                f"x {FP8_BLOCK}: both must be multiples of {FP8_BLOCK}"
            )
        return cls(
            **{
                name: torch.empty((experts, *shape), dtype=dtype, device=device)
                for name, (shape, dtype) in _get_expected_tensors(config, weight_dtype).items()
            }
        )

    def _write(self, expert: int, part: Part) -> None:
        """Convert a part of a checkpoint to the format of these weights and write it."""
        matrix: torch.Tensor = getattr(self, part.field)[expert]
        values = part.values.to(matrix.device)
        scale = None if part.scale is None else part.scale.to(matrix.device)
        if matrix.dtype == MXFP4:
            if values.dtype != MXFP4 or scale is None:
                raise InvalidArgument(f"{part.name} is {values.dtype}, other experts are MXFP4")
            units = slice(part.rows.start // UNIT_N, part.rows.stop // UNIT_N)
            factors = getattr(self, f"{part.field}_scale")[expert, part.rows]
            pack_matrix(values, scale, matrix[units], factors, name=part.name)
            return
        target = matrix[part.rows]
        if values.dtype == MXFP4 and scale is not None and target.dtype != FP8:
            values, scale = dequantize_mxfp4(values, scale), None
        if target.dtype == FP8:
            if values.dtype == MXFP4 and scale is not None:
                q, q_scale = convert_mxfp4_to_fp8(values, scale, part.name)
            else:
                q, q_scale = convert_to_fp8(values, scale, part.block)
            blocks = slice(part.rows.start // FP8_BLOCK, part.rows.stop // FP8_BLOCK)
            getattr(self, f"{part.field}_scale")[expert, blocks] = q_scale
            target.copy_(q)
        elif scale is None:
            target.copy_(values)
        else:
            for start in range(0, len(values), FP8_BLOCK):  # limits the fp32 copies
                rows = slice(start, min(start + FP8_BLOCK, len(values)))
                factors = expand_scales(scale, part.block, rows, values.shape[1])
                target[rows] = (values[rows].float() * factors).to(target.dtype)

    def check(
        self, config: MoEConfig, local_experts: int, device: torch.device, *, fp8: bool = False
    ) -> None:
        """Check the tensors against a config and a placement.

        Args:
            config: Sizes of the layer.
            local_experts: Number of experts of this rank.
            device: Device of the weights.
            fp8: Whether the layer uses FP8 or MXFP4 weights, with their scales.

        Raises:
            InvalidArgument: a tensor does not match the config or the placement.
        """
        check_instance("config", config, MoEConfig)
        local_experts = check_int("local_experts", local_experts, 0, config.routing.num_experts)
        check_instance("device", device, torch.device)
        check_bools(fp8=fp8)
        weight_dtype = config.dtype
        if fp8:
            is_mxfp4 = isinstance(self.gate_up, torch.Tensor) and self.gate_up.dtype == MXFP4
            weight_dtype = MXFP4 if is_mxfp4 else FP8
        if weight_dtype == MXFP4 and config.dtype not in DTYPES_16BIT:
            raise InvalidArgument(
                f"the layer's dtype is {config.dtype}; MXFP4 weights need bfloat16 or float16"
            )
        expected = _get_expected_tensors(config, weight_dtype)
        for field in dataclass_fields(self):
            if field.name in expected or getattr(self, field.name) is None:
                continue
            if field.name.endswith("_bias"):
                raise InvalidArgument(
                    "the weights have biases, but the config has biased=False: leave them out, or "
                    "set biased=True"
                )
            raise InvalidArgument(
                f"{field.name} is set, but the layer's weights are {config.dtype}: leave it out, "
                "or build the layer with fp8=True"
            )
        gate_up = self.gate_up
        if isinstance(gate_up, torch.Tensor):
            if weight_dtype == FP8 and gate_up.dtype == config.dtype:
                raise InvalidArgument(
                    f"gate_up has dtype {gate_up.dtype}, but the layer was built with fp8=True: "
                    "pass weights.to_fp8(), or leave fp8 out"
                )
            if gate_up.dim() and gate_up.shape[0] != local_experts:
                raise InvalidArgument(
                    f"gate_up has {gate_up.shape[0]} experts, but this rank has {local_experts} of "
                    f"the layer's {config.routing.num_experts}: pass only this rank's experts"
                )
        for name, (shape, dtype) in expected.items():
            check_tensor(
                name,
                getattr(self, name),
                shape=(local_experts, *shape),
                dtypes=(dtype,),
                device=device,
                kept=True,
                aligned=1,
            )


def _get_expected_tensors(
    config: MoEConfig, weight_dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return each tensor's shape for one expert and its dtype, for weights of `weight_dtype`."""
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    inner, hidden = config.intermediate, config.hidden
    for name, rows, columns in (("gate_up", config.gate_up_rows, hidden), ("down", hidden, inner)):
        if weight_dtype == MXFP4:
            tensors[name] = (rows // UNIT_N, columns // UNIT_K, UNIT_BYTES), weight_dtype
            tensors[f"{name}_scale"] = (rows,), torch.float32
        else:
            tensors[name] = (rows, columns), weight_dtype
        if weight_dtype == FP8:
            blocks = rows // FP8_BLOCK, columns // FP8_BLOCK
            tensors[f"{name}_scale"] = blocks, torch.float32
        if config.biased:
            tensors[f"{name}_bias"] = (rows,), config.dtype
    return tensors
