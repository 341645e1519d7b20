"""MoE layers on weft: router, experts, and the layer that sends tokens between ranks."""

from weft.moe.experts import Experts, SwiGLU
from weft.moe.layer import MoELayer
from weft.moe.router import softmax_top_k

__all__ = ["Experts", "MoELayer", "SwiGLU", "softmax_top_k"]
