"""Pairs of weft.LowLatencyAllToAll on 4 and 8 ranks, what was tried, their floors and memory."""

from __future__ import annotations

from typing import Any

from benchmarks.series import Series, least, load, series
from benchmarks.tables.sources import ABLATION, Tables, gpus, others_pair, target
from weft import LowLatencyAllToAll
from weft.bench.limits import PAIR_FIXED_US, link_rate, pair_floor_us
from weft.bench.lowlatency import LowCase
from weft.bench.routing import make_ids

LOW_4 = "lowlatency-4xH200-2026-11-21.json"
SWEPT = load("lowlatency-sweep-8xH200-2026-11-20.json")["us"]


def refloored(run: int) -> Series:
    """A recorded floor, bytes / 334 GB/s + 5 us then, by today's numbers; 4 ranks."""
    floors = series(f"{LOW_4}/{run}/rungs[variant=default]@tokens.floor")
    return (floors - 5.0) * (334.0 / link_rate(4)) + PAIR_FIXED_US


def low(run: int, variant: str) -> Series:
    """Pairs of the low-latency all-to-all."""
    return series(f"{LOW_4}/{run}/medians[variant={variant}]@tokens.pair")


def gained(run: int, variant: str) -> Series:
    """us that the default saves of a pair, beside a variant of the same run."""
    return low(run, variant) - low(run, "default")


def sweep(shape: str) -> Series:
    """Pairs of the low-latency all-to-all on 8 ranks, by launch shape."""
    return Series({float(name.split()[1]): each["pair"] for name, each in SWEPT[shape].items()})


def low_floors(tokens: int, routing: str) -> list[Any]:
    """Floors of a low-latency pair on 8 ranks by how rows return, by the routing of bench."""
    found = []
    sizes: dict[str, Any] = {"ranks": 8, "device": "cuda"}
    several: tuple[dict[str, Any], ...] = (
        {},
        {"reduce": "sender"},
        {"combine_dtype": "fp8"},
        {"reduce": "sender", "combine_dtype": "fp8"},
    )
    for options in several:
        case = LowCase(**sizes, tokens=(tokens,), routing=routing, **options)
        traffic = case.traffic([make_ids(case, tokens, rank) for rank in range(8)])
        found.append(pair_floor_us(traffic["out_bytes"], traffic["back_bytes"], gpus(8)))
    return found


def low_memory(**options: str) -> list[Any]:
    """MB of a low-latency all-to-all, shared, results, and both."""
    sizes = {"ranks": 8, "max_tokens": 128, "top_k": 8, "num_experts": 256, "hidden": 7168}
    found: Any = LowLatencyAllToAll.memory_bytes(**sizes, **options)  # type: ignore[arg-type]
    return [part / 1e6 for part in (found.shared, found.ordinary, found.shared + found.ordinary)]


TABLES: Tables = {
    "lowlatency-4": [
        ("weft.LowLatencyAllToAll", low(3, "default")),
        ("DeepEP v1, recorded", others_pair(9)),
        ("floor", refloored(0)),
        ("with `profile=True`", low(3, "profile")),
        ("random routing, sums at the sender, FP8 back", low(4, "default")),
        ("its floor", refloored(4)),
    ],
    "lowlatency-4-before": [
        ("one row at a time, same day", low(0, "default")),
        ("the same without programmatic launch", low(0, "no-pdl")),
        ("the same, FP8 back", low(0, "fp8-home")),
        ("the same, bf16 out", low(0, "plain")),
        ("the same, random routing", low(1, "default")),
        ("the same, random routing, sums at the sender, FP8 back", low(1, "lean")),
        ("the form before that, same day", low(2, "default")),
        ("the form before that, a place for each kind of row", low(2, "halves")),
    ],
    "lowlatency-ideas": [
        (
            "one row at a time; sums at the sender, FP8 back (`before`, second run)",
            gained(4, "before"),
        ),
        ("one row at a time, and stores with gaps (`before`)", gained(3, "before")),
        ("one lane of a warp looks for a row (`one-lane`)", gained(3, "one-lane")),
        ("two CTAs an SM that send, one that takes (`senders`)", gained(3, "senders")),
        ("kernels that keep a trace (`profile`)", gained(3, "profile")),
    ],
    "lowlatency-8": [
        (
            "weft.LowLatencyAllToAll",
            least(*(sweep(shape) for shape in SWEPT if not shape.startswith("no pdl"))),
        ),
        ("target", target("low latency, 8 ranks, perfect, fp8 out")),
        ("DeepEP v1 low latency, recorded", others_pair(6)),
        (
            "weft.AllToAll, fp8 out, bf16 back (rank-major)",
            series(ABLATION + "/ways/perfect 8, fp8 payload + scales out, bf16 pulled back/*.0"),
        ),
        ("without programmatic launch", sweep("no pdl @128")),
    ],
    "lowlatency-memory": [
        ("default", low_memory()),
        ("FP8 back", low_memory(combine_dtype="fp8")),
        ("sums at the sender, FP8 back", low_memory(reduce="sender", combine_dtype="fp8")),
    ],
    "lowlatency-floors": [
        (f"{tokens}, {label}", low_floors(tokens, routing))
        for tokens in (256, 512)
        for routing, label in (("uniform", "random"), ("perfect", "perfect"))
    ],
}
