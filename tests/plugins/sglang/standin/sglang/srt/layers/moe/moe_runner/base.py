# SPDX-License-Identifier: Apache-2.0
"""What a runner is told of a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class MoeRunnerConfig:
    """Of gated SiLU, unless a model says otherwise."""

    layer_id: int | None = None
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True
