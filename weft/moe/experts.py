"""SwiGLU experts in plain torch: clear, exact about its order of sums, and not fast."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from weft.ops.received import Received


class SwiGLU(nn.Module):
    """One MLP: `down(silu(gate(x)) * up(x))`.

    gate_up: `[2 * intermediate, hidden]`, the gate's rows first.   down: `[hidden, intermediate]`.
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)

    @classmethod
    def seeded(cls, hidden: int, intermediate: int, dtype: torch.dtype, seed: int) -> SwiGLU:
        """Random weights, equal for equal seeds; activations keep their size through them."""
        generator = torch.Generator().manual_seed(seed)
        gate_up = torch.randn(2 * intermediate, hidden, generator=generator) / hidden**0.5
        down = torch.randn(hidden, intermediate, generator=generator) / intermediate**0.5
        return cls(gate_up.to(dtype), down.to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` -> `[rows, hidden]`."""
        gate, up = functional.linear(x, self.gate_up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.down)


class Experts(nn.Module):
    """This rank's experts, by local id."""

    def __init__(self, experts: list[SwiGLU]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, received: Received, out: torch.Tensor) -> None:
        """Write `out[s, t] = sum over k of weights[s, t, k] * expert[ids[s, t, k]](x[s, t])`.

        received: what dispatch brought.   out: `[ep_size, max_tokens, hidden]`, usually `output()`.
        Only rows with an id are read and written. Experts are taken in ascending order and summed
        in fp32, so the result does not depend on who sent what. Asking how many rows an expert
        has waits for the device: eager calls only, no graph capture.
        """
        total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for local, expert in enumerate(self.experts):
            source, token, k = (received.ids == local).nonzero(as_tuple=True)
            if len(token):
                y = expert(received.x[source, token]).float()
                total[source, token] += received.weights[source, token, k].unsqueeze(-1) * y
        carries = (received.ids >= 0).any(dim=-1)
        out[carries] = total[carries].to(out.dtype)
