# SPDX-License-Identifier: Apache-2.0
"""Expert modules in plain torch."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from weft.arguments import check_bools, check_instance, check_int
from weft.errors import InvalidArgument
from weft.moe.models import SWIGLU, Gating, MoEConfig, Ungated, check_gating
from weft.runtime.check import check_dense, raise_not_tensor


class Expert(nn.Module):
    """One MLP in plain torch, `down(gating(gate_up(x)))`: a shared or a routed expert.

    Args:
        gate_up: `[2 * intermediate, hidden]`, gate rows first; up alone, `[intermediate, hidden]`,
            with an `Ungated` activation.
        down: `[hidden, intermediate]`.
        gate_up_bias: One per row of gate_up, or None.
        down_bias: `[hidden]`, or None.
        gating: Activation of gate and up, or of up.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        gating: Gating | Ungated = SWIGLU,
    ) -> None:
        super().__init__()
        check_gating(gating)
        _check_expert(gate_up, down, gate_up_bias, down_bias, gating.num_projections)
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)
        self.gate_up_bias = _create_frozen_parameter(gate_up_bias)
        self.down_bias = _create_frozen_parameter(down_bias)
        self.gating = gating

    @classmethod
    def seeded(cls, config: MoEConfig, seed: int, *, shared: bool = False) -> Expert:
        """Return an expert with random weights, equal for equal seeds.

        Args:
            config: Sizes, dtype and gating.
            seed: Seed of the weights.
            shared: Make a shared expert: of size `config.shared`, without biases, and with SwiGLU
                if the config's experts have a gate.
        """
        check_instance("config", config, MoEConfig)
        seed = check_int("seed", seed, -(1 << 63), (1 << 63) - 1)
        check_bools(shared=shared)
        generator = torch.Generator("cpu").manual_seed(seed)
        hidden, intermediate = config.hidden, config.shared if shared else config.intermediate
        gating = SWIGLU if shared and isinstance(config.gating, Gating) else config.gating
        rows = intermediate * gating.num_projections

        def draw(*shape: int, fan: int) -> torch.Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            return (values / math.sqrt(fan)).to(config.dtype)

        gate_up = draw(rows, hidden, fan=hidden)
        down = draw(hidden, intermediate, fan=intermediate)
        if shared or not config.biased:
            return cls(gate_up, down, gating=gating)
        return cls(
            gate_up,
            down,
            gate_up_bias=draw(rows, fan=4),
            down_bias=draw(hidden, fan=4),
            gating=gating,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[rows, hidden]` for x `[rows, hidden]`."""
        h = functional.linear(x, self.gate_up, self.gate_up_bias)
        return functional.linear(self.gating.apply(h), self.down, self.down_bias)


class GatedExpert(nn.Module):
    """A shared expert with a sigmoid gate (Qwen3-Next): `sigmoid(x @ gate.T) * expert(x)`.

    Args:
        expert: `[rows, hidden]` -> `[rows, hidden]`: an `Expert`, an `FP8Expert` or any other
            module.
        gate: `[1, hidden]`, of x's dtype: shared_expert_gate.weight of a checkpoint.

    Raises:
        InvalidArgument: the argument is invalid.
    """

    def __init__(self, expert: nn.Module, gate: torch.Tensor) -> None:
        super().__init__()
        self.expert = check_instance("expert", expert, nn.Module)
        if not isinstance(gate, torch.Tensor):
            raise_not_tensor("gate", gate)
        if gate.dim() != 2 or len(gate) != 1 or not gate.is_floating_point():
            raise InvalidArgument(
                f"gate is {list(gate.shape)} {gate.dtype}; it must be [1, hidden], floating-point"
            )
        self.gate = nn.Parameter(gate, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[rows, hidden]` for x `[rows, hidden]`."""
        out: torch.Tensor = self.expert(x)
        return functional.linear(x, self.gate).sigmoid() * out


def _check_expert(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    num_projections: int,
) -> None:
    for name, matrix in (("gate_up", gate_up), ("down", down)):
        if not isinstance(matrix, torch.Tensor):
            raise_not_tensor(name, matrix)
        check_dense(name, matrix)
    valid = gate_up.dim() == 2 and down.dim() == 2 and gate_up.is_floating_point()
    if not valid or tuple(gate_up.shape) != (num_projections * down.shape[1], down.shape[0]):
        raise InvalidArgument(
            f"gate_up is {list(gate_up.shape)} {gate_up.dtype} and down {list(down.shape)}; they "
            f"must be [{num_projections} * intermediate, hidden] and [hidden, intermediate] of one "
            "floating-point dtype"
        )
    for name, tensor, shape in (
        ("down", down, down.shape),
        ("gate_up_bias", gate_up_bias, gate_up.shape[:1]),
        ("down_bias", down_bias, down.shape[:1]),
    ):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise_not_tensor(name, tensor)
        check_dense(name, tensor)
        if (tensor.shape, tensor.dtype, tensor.device) != (shape, gate_up.dtype, gate_up.device):
            raise InvalidArgument(
                f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}; it must be "
                f"{list(shape)} {gate_up.dtype} on {gate_up.device}, like gate_up"
            )


def _create_frozen_parameter(tensor: torch.Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)
