"""A small table of a layer's times, and questions that it can answer."""

from __future__ import annotations

from weft.moe import OVERLAPS, LayerTable
from weft.moe.choice import Question
from weft.moe.table import LayerCurve, LayerSizes
from weft.tuning.thresholds import Times

SIZES = LayerSizes("NVIDIA H200", 4, 128, 8, 7168, 2048, 2048, "fp8")
TOKENS = (8, 64, 512)
US: dict[str, Times] = {
    "none": (50.0, 60.0, 90.0),
    "shared_expert": (40.0, 55.0, 95.0),
    "gemm_push": (45.0, 50.0, 80.0),
}


def curve(mode="throughput", gemm="grouped", tokens=TOKENS, us=US):
    return LayerCurve(mode, gemm, tokens, us)


def table(*curves, sizes=SIZES):
    return LayerTable(sizes, "a model", "2026-01-02", "a machine", "a method", curves or (curve(),))


def question(max_tokens=64, able=OVERLAPS, sizes=SIZES, **changes):
    return Question(
        sizes,
        **{"mode": "throughput", "gemm": "grouped", **changes},
        **{"max_tokens": max_tokens, "able": tuple(able)},
    )
