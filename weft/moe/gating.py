"""What stands between an expert's two products: gate and up become one row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from weft.gemm.epilogue import GateNumbers
from weft.runtime.check import refuse_tensor


@dataclass(frozen=True, slots=True)
class Gating(GateNumbers):
    """`gate * sigmoid(alpha * gate) * (up + offset)`, with gate and up held to a limit before.

    alpha, offset: 1 and 0 give SwiGLU.
    limit: None, or gate is at most limit, and up in -limit..limit.

    Raises InvalidArgument for a number that is not finite or a limit that is not positive.
    """

    def apply(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., 2 * intermediate]`, the gate first -> `[..., intermediate]`; gate_up is spoilt.

        out: where to write, or None for a new tensor. Each step is rounded to gate_up's dtype.
        """
        for name, tensor in (("gate_up", gate_up), ("out", out)):
            if not isinstance(tensor, torch.Tensor) and not (tensor is None and name == "out"):
                refuse_tensor(name, tensor)
        gate, up = gate_up.chunk(2, dim=-1)
        if out is None:
            out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        if self.limit is not None:
            gate.clamp_(max=self.limit)
            up.clamp_(-self.limit, self.limit)
        if self.alpha == 1.0:
            functional.silu(gate, inplace=True)
        else:
            gate.mul_(torch.mul(gate, self.alpha, out=out).sigmoid_())
        if self.offset:
            up.add_(self.offset)
        return torch.mul(gate, up, out=out)


SWIGLU = Gating()
CLAMPED_SWIGLU = Gating(alpha=1.702, offset=1.0, limit=7.0)  # GPT-OSS
