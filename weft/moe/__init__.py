# SPDX-License-Identifier: Apache-2.0
"""MoE layers on weft: router, experts, and the layer that sends tokens between ranks."""

from weft.keywords import explain_keywords
from weft.moe.experts.fp8_expert import FP8Expert
from weft.moe.experts.modules import Expert, GatedExpert
from weft.moe.experts.weights import ExpertWeights
from weft.moe.layer.choice import MODES, OVERLAPS, LayerChoice
from weft.moe.layer.layer import MoE
from weft.moe.models import CLAMPED_SWIGLU, MODELS, RELU2, SWIGLU, Gating, MoEConfig, Ungated
from weft.moe.replicas.placement import Replicas, ReplicaTable, balance
from weft.moe.routing.router import (
    Routed,
    Routing,
    compute_topk_weights,
    normalize_topk,
    route,
    router_logits,
)

__all__ = [
    "CLAMPED_SWIGLU",
    "MODELS",
    "MODES",
    "OVERLAPS",
    "RELU2",
    "SWIGLU",
    "Expert",
    "ExpertWeights",
    "FP8Expert",
    "GatedExpert",
    "Gating",
    "LayerChoice",
    "MoE",
    "MoEConfig",
    "ReplicaTable",
    "Replicas",
    "Routed",
    "Routing",
    "Ungated",
    "balance",
    "normalize_topk",
    "route",
    "router_logits",
    "compute_topk_weights",
]

explain_keywords(globals())
