"""Random experts, drawn on the device one by one: any rank can draw any of them again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.moe import Expert, ExpertWeights, FP8Expert, MoEConfig
from weft.moe.experts import to_blocks

if TYPE_CHECKING:
    from weft.bench.layer import LayerCase

FP8_BLOCK = 128  # rows and columns of a weight that share a scale
SHARED = -1  # the shared expert's number


class Matrix(NamedTuple):
    """A weight `[rows, columns]` as it is stored; scale: one float32 for each block, or None."""

    values: torch.Tensor
    scale: torch.Tensor | None

    def wide(self) -> torch.Tensor:
        """float32, the numbers that the stored ones stand for."""
        if self.scale is None:
            return self.values.float()
        blocks = self.scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
        return self.values.float() * blocks


@dataclass(frozen=True, slots=True)
class Drawn:
    """One expert: two matrices, and biases where the config has them."""

    gate_up: Matrix
    down: Matrix
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def draw(case: LayerCase, expert: int, device: torch.device) -> Drawn:
    """Expert `expert` (or SHARED), equal for equal seeds on devices of one kind."""
    config, shared = case.config, expert == SHARED
    generator = torch.Generator(device).manual_seed(case.seed * 100_003 + expert + 1)
    inner = config.shared if shared else config.intermediate

    def normal(*shape: int, fan: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device) / math.sqrt(fan)

    def matrix(rows: int, columns: int) -> Matrix:
        numbers = normal(rows, columns, fan=columns)
        if case.dtype == "fp8" and not shared:
            values, scale = to_blocks(numbers.unsqueeze(0))
            return Matrix(values[0], scale[0])
        return Matrix(numbers.to(config.dtype), None)

    gate_up, down = matrix(2 * inner, config.hidden), matrix(config.hidden, inner)
    if not config.biased or shared:
        return Drawn(gate_up, down, None, None)
    wide, narrow = normal(2 * inner, fan=4), normal(config.hidden, fan=4)
    return Drawn(gate_up, down, wide.to(config.dtype), narrow.to(config.dtype))


def stack(case: LayerCase, local: tuple[int, ...], device: torch.device) -> ExpertWeights:
    """A rank's experts as `weft.MoE` takes them; one is drawn at a time, into its place."""
    parts: dict[str, torch.Tensor] = {}
    for place, expert in enumerate(local):
        for name, part in _parts(draw(case, expert, device)).items():
            if name not in parts:
                shape = (len(local), *part.shape)
                parts[name] = torch.empty(shape, dtype=part.dtype, device=device)
            parts[name][place] = part
    arguments: dict[str, Any] = parts
    return ExpertWeights(**arguments)


def shared_expert(case: LayerCase, device: torch.device) -> Expert | FP8Expert | None:
    """The shared expert, where there is one: in FP8 as the others, or in the config's dtype."""
    if not case.config.shared:
        return None
    drawn = draw(case, SHARED, device)
    plain = Expert(drawn.gate_up.values, drawn.down.values)
    return FP8Expert.of(plain) if case.dtype == "fp8" else plain


def expert_bytes(config: MoEConfig, dtype: str) -> int:
    """Bytes of one expert's weights, scales and biases."""
    hidden, inner = config.hidden, config.intermediate
    numbers = 3 * hidden * inner
    if dtype == "fp8":
        return numbers + 4 * numbers // FP8_BLOCK**2
    biases = 2 * inner + hidden if config.biased else 0
    return (numbers + biases) * config.dtype.itemsize


def shared_bytes(config: MoEConfig, dtype: str) -> int:
    """Bytes of the shared expert's weights and scales."""
    numbers = 3 * config.hidden * config.shared
    if dtype == "fp8":
        return numbers + 4 * numbers // FP8_BLOCK**2
    return numbers * config.dtype.itemsize


def _parts(drawn: Drawn) -> dict[str, torch.Tensor]:
    """By the names of ExpertWeights' fields, those that there are."""
    named = {
        "gate_up": drawn.gate_up.values,
        "gate_up_scale": drawn.gate_up.scale,
        "gate_up_bias": drawn.gate_up_bias,
        "down": drawn.down.values,
        "down_scale": drawn.down.scale,
        "down_bias": drawn.down_bias,
    }
    return {name: part for name, part in named.items() if part is not None}
