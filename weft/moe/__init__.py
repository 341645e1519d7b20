"""MoE layers on weft: router, experts, and the layer that sends tokens between ranks."""

from weft.moe.choice import MODES, OVERLAPS, LayerChoice
from weft.moe.experts import Expert, ExpertWeights
from weft.moe.fp8_expert import FP8Expert
from weft.moe.gating import CLAMPED_SWIGLU, SWIGLU, Gating
from weft.moe.given import given_routing
from weft.moe.layer import MoE
from weft.moe.models import MODELS, MoEConfig
from weft.moe.replicas import Replicas, ReplicaTable, balance
from weft.moe.router import Routed, Routing, route, router_logits

__all__ = [
    "CLAMPED_SWIGLU",
    "MODELS",
    "MODES",
    "OVERLAPS",
    "SWIGLU",
    "Expert",
    "ExpertWeights",
    "FP8Expert",
    "Gating",
    "LayerChoice",
    "MoE",
    "MoEConfig",
    "ReplicaTable",
    "Replicas",
    "Routed",
    "Routing",
    "balance",
    "given_routing",
    "route",
    "router_logits",
]
