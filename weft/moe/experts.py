"""Weights of experts: one MLP of its own, and all of a rank's stacked for grouped products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from weft.arguments import flags, instance, integer, refuse
from weft.errors import InvalidArgument
from weft.memory.discovery import default_device
from weft.moe.gating import SWIGLU, Gating
from weft.moe.models import MoEConfig
from weft.reference import quantize
from weft.runtime.check import check_alignment, check_tensor, refuse_tensor
from weft.shape import FP8_BLOCK

FP8 = torch.float8_e4m3fn


class Expert(nn.Module):
    """One MLP in plain torch: `down(gating(gate_up(x)))`; a shared expert, or one of many.

    gate_up: `[2 * intermediate, hidden]`, the gate's rows first.   down: `[hidden, intermediate]`.
    biases: `[2 * intermediate]` and `[hidden]`, or None.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        gating: Gating = SWIGLU,
    ) -> None:
        super().__init__()
        instance("gating", gating, Gating)
        for name, tensor in (
            ("gate_up", gate_up),
            ("down", down),
            ("gate_up_bias", gate_up_bias),
            ("down_bias", down_bias),
        ):
            if tensor is None and name.endswith("bias"):
                continue
            if not isinstance(tensor, torch.Tensor):
                refuse_tensor(name, tensor)
        _check_expert(gate_up, down, gate_up_bias, down_bias)
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)
        self.gate_up_bias = _fixed(gate_up_bias)
        self.down_bias = _fixed(down_bias)
        self.gating = gating

    @classmethod
    def seeded(cls, config: MoEConfig, seed: int, *, shared: bool = False) -> Expert:
        """Random weights of a config's sizes, equal for equal seeds; activations keep their size.

        shared: the size of the shared expert, which has no biases.
        """
        instance("config", config, MoEConfig)
        seed = integer("seed", seed, -(1 << 63), (1 << 63) - 1)
        flags(shared=shared)
        generator = torch.Generator("cpu").manual_seed(seed)
        hidden, intermediate = config.hidden, config.shared if shared else config.intermediate

        def draw(*shape: int, fan: int) -> torch.Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            return (drawn / math.sqrt(fan)).to(config.dtype)

        gate_up = draw(2 * intermediate, hidden, fan=hidden)
        down = draw(hidden, intermediate, fan=intermediate)
        if shared or not config.biased:
            return cls(gate_up, down, gating=SWIGLU if shared else config.gating)
        return cls(
            gate_up,
            down,
            gate_up_bias=draw(2 * intermediate, fan=4),
            down_bias=draw(hidden, fan=4),
            gating=config.gating,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` -> `[rows, hidden]`."""
        h = functional.linear(x, self.gate_up, self.gate_up_bias)
        return functional.linear(self.gating.apply(h), self.down, self.down_bias)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """All experts of a rank, in local order.

    gate_up: `[local_experts, 2 * intermediate, hidden]`, the gate's rows first.
    down: `[local_experts, hidden, intermediate]`.
    gate_up_bias, down_bias: `[local_experts, 2 * intermediate]` and `[local_experts, hidden]`, of
        the layer's dtype, or None.
    gate_up_scale, down_scale: where the weights are float8_e4m3fn, float32
        `[local_experts, rows / 128, columns / 128]`: what a block's numbers are multiplied by.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    def to_fp8(self) -> ExpertWeights:
        """The same experts in FP8, a scale for each block of 128 x 128 numbers.

        Raises InvalidArgument for sizes that are no multiples of 128.
        """
        gate_up, gate_up_scale = to_blocks(self.gate_up)
        down, down_scale = to_blocks(self.down)
        return replace(
            self, gate_up=gate_up, down=down, gate_up_scale=gate_up_scale, down_scale=down_scale
        )

    @classmethod
    def stack(
        cls,
        config: MoEConfig,
        experts: Sequence[Expert],
        device: torch.device | str = "cpu",
    ) -> ExpertWeights:
        """One tensor from many experts, also from none.

        Raises InvalidArgument where the config wants a bias that an expert lacks.
        """
        instance("config", config, MoEConfig)
        device = None if device is None else default_device(device)
        if not isinstance(experts, list | tuple):
            refuse("experts", experts, "a list of weft.moe.Expert")
        for place, expert in enumerate(experts):
            instance(f"experts[{place}]", expert, Expert)
        wide, hidden = 2 * config.intermediate, config.hidden

        def join(name: str, *shape: int) -> torch.Tensor:
            whole = torch.empty((len(experts), *shape), dtype=config.dtype, device=device)
            for place, expert in enumerate(experts):
                part = getattr(expert, name)
                if part is None or part.shape != shape:
                    have = None if part is None else list(part.shape)
                    raise InvalidArgument(
                        f"expert {place} has {name} {have}; the config wants {list(shape)}"
                    )
                whole[place] = part
            return whole

        gate_up = join("gate_up", wide, hidden)
        down = join("down", hidden, config.intermediate)
        if not config.biased:
            return cls(gate_up, down)
        return cls(gate_up, down, join("gate_up_bias", wide), join("down_bias", hidden))

    def check(
        self, config: MoEConfig, local_experts: int, device: torch.device, *, fp8: bool = False
    ) -> None:
        """Raises InvalidArgument where a tensor is not what the config and the placement say.

        fp8: the layer wants weights of FP8, with their scales.
        """
        instance("config", config, MoEConfig)
        local_experts = integer("local_experts", local_experts, 0, config.routing.num_experts)
        instance("device", device, torch.device)
        flags(fp8=fp8)
        wide, hidden, inner = 2 * config.intermediate, config.hidden, config.intermediate
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up": (local_experts, wide, hidden),
            "down": (local_experts, hidden, inner),
        }
        dtypes = dict.fromkeys(shapes, FP8 if fp8 else config.dtype)
        if config.biased:
            shapes |= {
                "gate_up_bias": (local_experts, wide),
                "down_bias": (local_experts, hidden),
            }
        elif self.gate_up_bias is not None or self.down_bias is not None:
            raise InvalidArgument(
                "the weights have biases, the config has biased=False; leave them out, or set it"
            )
        for name in ("gate_up", "down"):
            if not fp8 and getattr(self, f"{name}_scale") is not None:
                raise InvalidArgument(
                    f"{name}_scale is given, the layer's weights are {config.dtype}: leave it out, "
                    "or build the layer with fp8=True"
                )
            rows, columns = shapes[name][1:]
            if fp8:
                blocks = (local_experts, rows // FP8_BLOCK, columns // FP8_BLOCK)
                shapes[f"{name}_scale"] = blocks
                dtypes[f"{name}_scale"] = torch.float32
        for name, shape in shapes.items():
            allowed = (dtypes.get(name, config.dtype),)
            tensor = getattr(self, name)
            check_tensor(name, tensor, shape=shape, dtypes=allowed, device=device, kept=True)
            check_alignment(name, tensor, tensor.itemsize)


def to_blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[experts, rows, columns]` as FP8 with float32 scales `[experts, rows / 128, columns / 128]`.

    A block is 128 x 128 numbers, by the rule of `weft.reference.quantize`. Raises InvalidArgument
    for sizes that are no multiples of 128.
    """
    if not isinstance(weights, torch.Tensor):
        refuse_tensor("weights", weights)
    if weights.dim() != 3 or not weights.is_floating_point():
        raise InvalidArgument(
            f"weights are {list(weights.shape)} {weights.dtype}; they must be [experts, rows, "
            "columns] of floating-point numbers"
        )
    experts, rows, columns = weights.shape
    if rows % FP8_BLOCK or columns % FP8_BLOCK:
        raise InvalidArgument(
            f"weights are {list(weights.shape)}; blocks are {FP8_BLOCK} x {FP8_BLOCK}: pad them"
        )
    down, across = rows // FP8_BLOCK, columns // FP8_BLOCK
    q = torch.empty(weights.shape, dtype=FP8, device=weights.device)
    scales = torch.empty((experts, down, across), dtype=torch.float32, device=weights.device)
    for expert, matrix in enumerate(weights):  # one at a time: fp32 copies are large
        blocks = matrix.view(down, FP8_BLOCK, across, FP8_BLOCK).transpose(1, 2)
        packed, found = quantize(blocks.flatten(2), "fp8", columns=FP8_BLOCK * FP8_BLOCK)
        back = packed.view(down, across, FP8_BLOCK, FP8_BLOCK).transpose(1, 2)
        q[expert] = back.reshape(rows, columns)
        scales[expert] = found.squeeze(-1)
    return q, scales


def _check_expert(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> None:
    """Raises InvalidArgument for tensors that are no MLP together."""
    fits = gate_up.dim() == 2 and down.dim() == 2 and gate_up.is_floating_point()
    if not fits or tuple(gate_up.shape) != (2 * down.shape[1], down.shape[0]):
        raise InvalidArgument(
            f"gate_up is {list(gate_up.shape)} {gate_up.dtype} and down {list(down.shape)}; they "
            "must be [2 * intermediate, hidden] and [hidden, intermediate] of one floating-point "
            "dtype"
        )
    for name, tensor, like in (
        ("down", down, down.shape),
        ("gate_up_bias", gate_up_bias, gate_up.shape[:1]),
        ("down_bias", down_bias, down.shape[:1]),
    ):
        if tensor is None:
            continue
        given = (tensor.shape, tensor.dtype, tensor.device)
        if given != (like, gate_up.dtype, gate_up.device):
            raise InvalidArgument(
                f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}; it must be "
                f"{list(like)} {gate_up.dtype} on {gate_up.device}, like gate_up"
            )


def _fixed(tensor: torch.Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)
