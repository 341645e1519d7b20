"""MoE layers on weft: router, experts, and the layer that sends tokens between ranks."""

from weft.moe.experts import Experts, SwiGLU
from weft.moe.gating import CLAMPED_SWIGLU, SWIGLU, Gating
from weft.moe.layer import MoELayer
from weft.moe.models import MODELS, MoEConfig
from weft.moe.router import Routed, Routing, route, router_logits

__all__ = [
    "CLAMPED_SWIGLU",
    "MODELS",
    "SWIGLU",
    "Experts",
    "Gating",
    "MoEConfig",
    "MoELayer",
    "Routed",
    "Routing",
    "SwiGLU",
    "route",
    "router_logits",
]
