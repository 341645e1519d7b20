"""weft.MoE from router logits to output: models, overlaps, modes, and what was tried."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.series import Series, load, series
from benchmarks.tables.sources import Tables, others_layer, target
from weft.bench.limits import layer_floor_us

EXCHANGES_4 = "layer-exchanges-4xH200-2026-11-22.json"
TURNS = "layer-turns-4xH200-2026-11-22.json"
L2 = "layer-2xH200-2026-11-21.json"
L4 = "layer-4xH200-2026-11-21.json"
X2 = "layer-exchanges-2xH200-2026-11-21.json"
MODELS = "layer-models-2xH200-2026-11-21.json"
PUSH = "layer-push-2xH200-2026-11-21.json"
TILES = "layer-tiles-2xH200-2026-11-22.json"


def layer_floors(name: str, run: int) -> Series:
    """Floors of layers by what they put on memory and links."""
    found = load(name)[run]
    names = found["machine"]["gpus"]
    floors = {
        tokens: layer_floor_us(each["hbm_bytes"], each["wire_bytes"], names)
        for tokens, each in found["loads"].items()
    }
    return Series({float(tokens): floor.least for tokens, floor in floors.items() if floor})


def layer(name: str, run: int, overlap: str | None = None) -> Series:
    """Medians of a layer by overlap, or of the only one that a run has."""
    chosen = "" if overlap is None else f"overlap={overlap}"
    return series(f"{name}/{run}/rows[{chosen}]@tokens.us.median")


def model(name: str, dtype: str) -> list[Any]:
    """The fastest overlap of a model at four sizes, and its ratio to the floor of memory."""
    run = next(
        index
        for index, each in enumerate(load(MODELS))
        if (each["settings"]["model"], each["settings"]["dtype"]) == (name, dtype)
    )
    floors, rows = layer_floors(MODELS, run), load(MODELS)[run]["rows"]
    best = {
        size: min(row["us"]["median"] for row in rows if row["tokens"] == size)
        for size in (8, 64, 128, 512)
    }
    return [(us, us / floors[size]) for size, us in best.items()]


def goes_first(who: str) -> Series:
    """us by what goes first, the first product or the shared expert."""
    return series(f"{TURNS}/who goes first, by exchange expert/{who}/*")


def goes_first_again(who: str) -> Series:
    """The same at 16 to 64 tokens, in another run."""
    run = "at 16 to 64 tokens, beside layer-exchanges-4xH200-2026-11-22.json"
    return series(f"{TURNS}/{run}/{who}/*")


def early_weights(model: str, of: str) -> Series:
    """us by which of the two products has its weights loaded early."""
    return series(f"{TILES}/early_weights[model={model}]@tokens.{of}")


def twice(selector: str) -> list[Any]:
    """Two runs at the sizes of the table, where there are any."""
    first, second = (series(f"{TILES}/{selector}.{index}") for index in (0, 1))
    sizes = (8, 64, 256, 512, 1024)
    return [(first[size], second[size]) if size in first else None for size in sizes]


def mean_of(selector: str) -> Series:
    """The mean of two runs."""
    first, second = (series(f"{TILES}/{selector}.{index}") for index in (0, 1))
    return Series({size: statistics.fmean((first[size], second[size])) for size in first})


TABLES: Tables = {
    "layer-4-other": [
        (
            "low_latency: none / gemm_push",
            layer(EXCHANGES_4, 1, "none") / layer(EXCHANGES_4, 1, "push"),
        ),
        ("throughput: none", layer(EXCHANGES_4, 0, "none")),
        ("shared_expert", layer(EXCHANGES_4, 0, "shared")),
        ("target, best mode, 8 ranks", target("layer, deepseek-v3, fp8, 8 ranks")),
    ],
    "layer-models-4": [
        ("qwen3-30b-a3b, FP8, low_latency: none", layer(EXCHANGES_4, 2, "none")),
        ("gemm_push", layer(EXCHANGES_4, 2, "push")),
        ("throughput: gemm_push", series(TURNS + "/qwen3-30b-a3b by rank, with the last group/*")),
        ("glm-4.5-air, FP8, low_latency: shared_expert", layer(EXCHANGES_4, 3, "shared")),
        ("gemm_push", layer(EXCHANGES_4, 3, "push")),
        ("throughput: gemm_push", layer(EXCHANGES_4, 4)),
    ],
    "layer-turns": [
        ("the first product goes first", goes_first("the first product, at any size")),
        ("the shared expert does", goes_first("the shared expert, at any size")),
        (
            "the same, its stream before others",
            goes_first("the shared expert, in a stream that goes first"),
        ),
        (
            "the same, dispatch on 12 + 28 CTAs of 768 threads",
            goes_first("the shared expert; dispatch on 12 + 28 CTAs of 768 threads"),
        ),
        ("on 20 + 44", goes_first("the same on 20 + 44")),
        ("by rank, on the same GPUs", goes_first("by rank")),
        ("the first product goes first", goes_first_again("the first product first")),
        ("the shared expert does", goes_first_again("the shared expert first")),
    ],
    "layer-4-before": [
        ("none", layer(L4, 0, "none")),
        ("shared", layer(L4, 0, "shared")),
        ("push", layer(L4, 0, "push")),
        ("push, before Hopper's own product", series(L4 + "/0/auto/*.us.rank.push")),
        ("columns, before it", series(L4 + "/0/auto/*.us.rank.columns")),
    ],
    "layer-2": [
        ("none", layer(L2, 0, "none")),
        ("shared", layer(L2, 0, "shared")),
        ("columns", layer(L2, 0, "columns")),
        ("signals", layer(L2, 0, "signals")),
        ("push", layer(L2, 0, "push")),
        ("push, that morning", series(L2 + "/0/auto/*.us.rank.push")),
        ("target, best mode, 8 ranks", target("layer, deepseek-v3, fp8, 8 ranks")),
        ("DeepEP + DeepGEMM, published, 8 ranks", others_layer(0)),
        ("one-kernel Mega MoE, published, 8 ranks", others_layer(1)),
        ("floor: weights and rows at 4.6 TB/s", layer_floors(L2, 0)),
    ],
    "layer-pairs-of-gpus": [
        ("first pair", series(PUSH + "/rows[]@tokens.us.median")),
        (
            "its fastest replay",
            Series({row["tokens"]: row["us"]["min"] for row in load(PUSH)["rows"]}),
        ),
        ("second pair", layer(MODELS, 5, "push")),
        ("third pair", layer(X2, 2)),
    ],
    "layer-tiles": [
        ("deepseek-v3, tiles of up to 160 rows", twice("tiles_of_256_rows[]@tokens.before")),
        ("of up to 256", twice("tiles_of_256_rows[]@tokens.with")),
        ("no early weights", early_weights("deepseek-v3", "none")),
        ("of the second product (kept)", early_weights("deepseek-v3", "second")),
        ("of both", early_weights("deepseek-v3", "both")),
        ("qwen3-30b-a3b: no early weights", early_weights("qwen3-30b-a3b", "none")),
        ("of the second product (kept)", early_weights("qwen3-30b-a3b", "second")),
        ("of both", early_weights("qwen3-30b-a3b", "both")),
        (
            "another pair: no early weights, DeepSeek-V3",
            mean_of("early_weights_of_both_on_another_pair[model=deepseek-v3]@tokens.none"),
        ),
        (
            "of both",
            mean_of("early_weights_of_both_on_another_pair[model=deepseek-v3]@tokens.both"),
        ),
    ],
    "layer-models": [
        ("qwen3-30b-a3b, BF16", model("qwen3-30b-a3b", "bf16")),
        ("qwen3-30b-a3b, FP8", model("qwen3-30b-a3b", "fp8")),
        ("glm-4.5-air, BF16", model("glm-4.5-air", "bf16")),
        ("glm-4.5-air, FP8", model("glm-4.5-air", "fp8")),
        ("gpt-oss-120b, BF16", model("gpt-oss-120b", "bf16")),
        ("deepseek-v3, FP8", model("deepseek-v3", "fp8")),
    ],
    "layer-exchanges-2": [
        ('qwen3-30b-a3b, FP8, by rank ("push")', layer(X2, 0, "push")),
        ('by expert ("none")', layer(X2, 1)),
        ('deepseek-v3, FP8, by rank ("push")', layer(X2, 2)),
        ('by expert ("shared")', layer(X2, 3)),
    ],
}
