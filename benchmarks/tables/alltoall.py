"""Pairs of weft.AllToAll: bf16 and FP8, routings and groups, few SMs, and the ablation."""

# ruff: noqa: E501  (labels are those of the documents)
from __future__ import annotations

from typing import Any

from benchmarks.series import Series, load, series
from benchmarks.tables.sources import ABLATION, SIZES, Tables, gpus, others_pair, target
from weft.bench.limits import pair_floor_us

A2A_4 = "alltoall-4xH200-2026-11-21.json"
MOE_8 = "moe-deepseek-v3-perfect-8xH200-2026-11-20.json"
FP8_BACK = "fp8-home-4xH200-2026-11-21.json"
FEW_8 = ABLATION + "/few SMs, perfect 8, bf16/one warp loads ahead and eight add"
PAIR_8 = series(MOE_8 + "/rows[phase=pair]@tokens.us.median")
ROW = 7168 * 2  # bytes of a bf16 row


def pair_floors(ranks: int, sent: int = ROW, back: int = ROW) -> Series:
    """Floors of a pair, perfect routing: each token's row to every other rank, and back."""
    moved = {tokens: tokens * (ranks - 1) for tokens in SIZES}
    found = {t: pair_floor_us(n * sent, n * back, gpus(ranks)) for t, n in moved.items()}
    return Series({tokens: us for tokens, us in found.items() if us is not None})


def pair_4(run: int) -> Series:
    """Pairs of one of the runs on 4 GPUs."""
    return series(f"{A2A_4}/runs/{run}/rows[phase=pair]@tokens.us.median")


def rung(number: int, runs: str) -> Series:
    """Pairs of one rung of the ablation."""
    return series(f"{ABLATION}/ladder/{number}/{runs}/*.0")


def fp8_back(variant: str) -> Series:
    """Pairs on 4 ranks by how combine moves its rows."""
    return series(f"{FP8_BACK}/runs/0/rows[variant={variant}]@tokens.pair")


def corun(run: int, tokens: int) -> list[Any]:
    """A pair on few SMs, its phases' GB/s, and in a co-run with a matmul."""
    rows = {
        row["phase"]: row for row in load(A2A_4)["runs"][run]["rows"] if row["tokens"] == tokens
    }
    pair, together = rows["pair"]["us"]["median"], rows["pair"]["beside"]
    rates = (rows["dispatch"]["wire"], rows["combine"]["wire"])
    return [pair, rates, together["pair"], (together["slower"], together["slower_limited"])]


def few_8(selector: str) -> list[Any]:
    """Pairs of four sizes, and GB/s of both phases at 2048 tokens; 8 ranks."""
    pair, dispatch = series(f"{selector}/*.0"), series(f"{selector}/*.1")
    moved = 2048 * 7 * ROW / 1e3
    rates = [moved / dispatch[2048], moved / (pair[2048] - dispatch[2048])]
    return [*(pair[tokens] for tokens in (8, 128, 1024, 2048)), *rates]


def few_4(row: int) -> list[Any]:
    """One row of the kernels on few SMs, 4 ranks."""
    found = load("few-sms-4xH200-2026-11-21.json")["runs"][0]["rows"][row]
    names = "pair dispatch dispatch_gbs dispatch_sm combine combine_gbs combine_sm"
    return [found[name] for name in names.split()]


TABLES: Tables = {
    "pairs-8": [
        ("weft", PAIR_8),
        ("floor: bytes / 340 GB/s + 4.0 us", pair_floors(8)),
        ("weft / floor", PAIR_8 / pair_floors(8)),
        ("FlashInfer 0.7.2", others_pair(0)),
    ],
    "pairs-other": [
        ("8 ranks, perfect", rung(4, "perfect 8")),
        ("8 ranks, perfect, second run", series(ABLATION + "/parts and waves/0/pull 8/*.0")),
        ("of it dispatch alone, repeated", series(ABLATION + "/parts and waves/0/pull 8/*.1")),
        ("8 ranks, random", rung(4, "random 8")),
        ("8 ranks, random, second run", series(ABLATION + "/parts and waves/0/pull-random 8/*.0")),
        ("FlashInfer, 8 ranks, random", others_pair(1)),
        ("4 ranks, perfect", rung(4, "perfect 4")),
        ("4 ranks, perfect, second run", series(ABLATION + "/parts and waves/0/pull 4/*.0")),
        ("FlashInfer, 4 ranks, perfect", others_pair(3)),
        ("4 ranks, random, second run", series(ABLATION + "/parts and waves/0/pull-random 4/*.0")),
        ("FlashInfer, 4 ranks, random", others_pair(4)),
    ],
    "pairs-4-other": [
        ("target", target("pair, 4 ranks, perfect, bf16")),
        ("4 ranks, perfect, quantised, fp8 both ways (the form before)", pair_4(2)),
        ("2 ranks, perfect", pair_4(4)),
        ("its floor", pair_floors(2)),
        ("2 ranks, perfect, quantised, fp8 both ways (the form before)", pair_4(5)),
    ],
    "few-corun": [("`num_sms=16`", corun(6, 2048)), ("`num_sms=8`, 1024 tokens", corun(7, 1024))],
    "fp8-8": [
        (
            "fp8 payload + scales out, bf16 back",
            series(ABLATION + "/ways/perfect 8, fp8 payload + scales out, bf16 pulled back/*.0"),
        ),
        ("FlashInfer, the same", others_pair(2)),
        (
            '`quantize="mxfp8"`, bf16 back',
            series(ABLATION + "/ways/perfect 8, quantize=mxfp8, bf16 pulled back/*.0"),
        ),
        (
            'fp8 payload out, `combine_by="fp8"`',
            series(ABLATION + "/ways/perfect 8, fp8 payload + scales out, combine_by=fp8/*.0"),
        ),
        (
            '`quantize="fp8"`, `combine_by="fp8"`',
            series(ABLATION + "/ways/perfect 8, quantize=fp8, combine_by=fp8/*.0"),
        ),
        (
            "the first of the two with random routing",
            series(ABLATION + "/ways/random 8, fp8 payload + scales out, combine_by=fp8/*.0"),
        ),
    ],
    "fp8-home": [
        ("FP8 back, summed as rows come: three CTAs an SM push", fp8_back("now")),
        ("the same, two push, seven strips at once", fp8_back("2+1x7")),
        ("FP8 back, the form before", fp8_back("last")),
        ("bf16 back, pulled", fp8_back("pull")),
        ("floor, FP8 both ways", pair_floors(4, 7392, 7392)),
    ],
    "few-8": [
        ("`num_sms=8`", few_8(f"{FEW_8}/num_sms=8")),
        ("`num_sms=16`", few_8(f"{FEW_8}/num_sms=16")),
        ("`num_sms=24`", few_8(f"{FEW_8}/num_sms=24")),
        ("all 132", few_8(f"{ABLATION}/ladder/4/perfect 8")),
    ],
    "few-4": [
        ("`num_sms=8`, a fence of the GPU's memory a piece", few_4(0)),
        ("`num_sms=8`, now", few_4(1)),
        ("`num_sms=16`, a fence a piece", few_4(2)),
        ("`num_sms=16`, now", few_4(3)),
    ],
    "ablation": [
        (
            "1. slot = token index, one launch a phase, device epochs; combine pulls from rank 0 upwards",
            rung(0, "perfect 8"),
        ),
        (
            "2. each rank starts its pulls at itself (`rank` a compile-time constant)",
            rung(1, "perfect 8"),
        ),
        (
            "3. cold loads before anything is decided; combine CTAs of 128 threads, at most four an SM",
            rung(2, "perfect 8"),
        ),
        (
            "4. programmatic dependent launch (two objects in one run: mean)",
            (rung(3, "perfect 8") + rung(3, "perfect 8, again")) / 2,
        ),
        ("5. the same, but only below 256 x 896 words", rung(4, "perfect 8")),
    ],
}
