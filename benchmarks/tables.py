"""Where the figures of every result table of the docs come from, row by row.

A table stands in a document behind `<!-- table: NAME -->`. Here is, for each of its rows, the label
in its first cell and what its other cells say: a series over the numbers of the header, a list of
one entry a cell, or None for a row of words. `benchmarks/publish.py` writes the cells anew;
tests/docs/test_tables.py compares them.
"""

# ruff: noqa: E501  (labels are those of the documents)
from __future__ import annotations

import statistics
from typing import Any, TypeAlias

from benchmarks.series import Series, least, load, series
from weft import AllReduce, LowLatencyAllToAll
from weft.bench.limits import (
    PAIR_FIXED_US,
    allreduce_floor_us,
    layer_floor_us,
    link_rate,
    pair_floor_us,
)
from weft.bench.lowlatency import LowCase
from weft.bench.routing import make_ids

Cells: TypeAlias = "Series | list[Any] | None"
ABLATION = "alltoall-ladder-8xH200-2026-11-20.json"
A2A_4 = "alltoall-4xH200-2026-11-21.json"
PEERS = "peers-8xH200.json"
PROBES = "limits-8xH200-2026-11-20.json"
EXCHANGES_4 = "layer-exchanges-4xH200-2026-11-22.json"
TURNS = "layer-turns-4xH200-2026-11-22.json"
L2 = "layer-2xH200-2026-11-21.json"
L4 = "layer-4xH200-2026-11-21.json"
X2 = "layer-exchanges-2xH200-2026-11-21.json"
R4 = "allreduce-4xH200-2026-11-21.json"
LOW_4 = "lowlatency-4xH200-2026-11-21.json"
TILES = "layer-tiles-2xH200-2026-11-22.json"
HOME = "fp8-home-4xH200-2026-11-21.json"
MOE_8 = "moe-deepseek-v3-perfect-8xH200-2026-11-20.json"

LIMITS = load(PROBES)
BACKENDS = ("oneshot", "twoshot", "twoshot_bulk")
LAUNCHES = (("oneshot", "default"), ("twoshot", "default"), ("twoshot_bulk", "c1x448 r1/4 move99"))
SWEPT = tuple(load("lowlatency-sweep-8xH200-2026-11-20.json")["us"])
SIZES = [1 << power for power in range(13)]
ROW = 7168 * 2  # bytes of a bf16 row


def limit(name: str) -> float:
    """One number of what the machine allows."""
    return float(LIMITS[name])


def target(name: str) -> Series:
    """What was to be reached."""
    return series(f"targets.json/{name}/*")


def gpus(ranks: int) -> list[str]:
    """So many H200s."""
    return ["NVIDIA H200"] * ranks


def pair_floors(ranks: int, sent: int = ROW, back: int = ROW) -> Series:
    """Floors of a pair, perfect routing: each token's row to every other rank, and back."""
    moved = {tokens: tokens * (ranks - 1) for tokens in SIZES}
    found = {t: pair_floor_us(n * sent, n * back, gpus(ranks)) for t, n in moved.items()}
    return Series({tokens: us for tokens, us in found.items() if us is not None})


def reduce_floors(ranks: int, hidden: int) -> Series:
    """Floors of an all-reduce of bf16 rows."""
    found = {t: allreduce_floor_us(t * hidden * 2, ranks, gpus(ranks)) for t in SIZES}
    return Series({tokens: us for tokens, us in found.items() if us is not None})


def refloored(selector: str) -> Series:
    """A recorded floor, bytes / 334 GB/s + 5 us then, by today's numbers; 4 ranks."""
    return (series(selector) - 5.0) * (334.0 / link_rate(4)) + PAIR_FIXED_US


def layer_floors(name: str, run: int) -> Series:
    """Floors of layers by what they put on memory and links."""
    found = load(name)[run]
    names = found["machine"]["gpus"]
    floors = {
        tokens: layer_floor_us(each["hbm_bytes"], each["wire_bytes"], names)
        for tokens, each in found["loads"].items()
    }
    return Series({float(tokens): floor.least for tokens, floor in floors.items() if floor})


def layer(name: str, run: int, overlap: str) -> Series:
    """Medians of a layer by overlap."""
    return series(f"{name}/{run}/rows[overlap={overlap}]@tokens.us.median")


def model(name: str, dtype: str) -> list[Any]:
    """The fastest overlap of a model at four sizes, and its ratio to the floor of memory."""
    records = "layer-models-2xH200-2026-11-21.json"
    run = next(
        index
        for index, each in enumerate(load(records))
        if (each["settings"]["model"], each["settings"]["dtype"]) == (name, dtype)
    )
    floors, rows = layer_floors(records, run), load(records)[run]["rows"]
    best = {
        size: min(row["us"]["median"] for row in rows if row["tokens"] == size)
        for size in (8, 64, 128, 512)
    }
    return [(us, us / floors[size]) for size, us in best.items()]


def best_of_others(ranks: int, hidden: int) -> Series:
    """The least of the recorded and reckoned all-reduces with the norm."""
    return least(
        *(
            Series({float(tokens): us for tokens, us in each["us"].items()})
            for each in load(PEERS)["allreduce"]
            if (each["ranks"], each["hidden"], each["epilogue"]) == (ranks, hidden, "norm")
        )
    )


def ablation_of(
    hidden: int, backend: str, shape: str, epilogue: str = "norm", *, pdl: str | None = None
) -> Series:
    """A backend's times on 8 ranks, with and without programmatic launch the lesser, or one."""
    chosen = f"ranks=8,hidden={hidden},backend={backend},shape={shape},epilogue={epilogue}"
    name = "allreduce-ladder-8xH200-2026-11-20.json"
    found = []
    for early in ("True", "False") if pdl is None else (pdl,):
        try:
            found.append(series(f"{name}/rows[{chosen},pdl={early}]@tokens.us"))
        except KeyError:
            continue  # not every shape was timed both ways
    return least(*found)


def baseline_in_run(library: str) -> Series:
    """Another library's all-reduce with the norm, from the run of 2026-11-21."""
    rows = load(R4)["runs"][6]["rows"]
    key = f"{library} 2.11.0, this run"
    return Series({row["tokens"]: row["rivals"][key] for row in rows if key in row["rivals"]})


def low(run: int, variant: str) -> Series:
    """Pairs of the low-latency all-to-all."""
    return series(f"{LOW_4}/{run}/medians[variant={variant}]@tokens.pair")


def sweep(shape: str) -> Series:
    """Pairs of the low-latency all-to-all on 8 ranks, by launch shape."""
    found = load("lowlatency-sweep-8xH200-2026-11-20.json")["us"][shape]
    return Series({float(name.split()[1]): each["pair"] for name, each in found.items()})


def corun(run: int, tokens: int) -> list[Any]:
    """A pair on few SMs, its phases' GB/s, and in a co-run with a matmul."""
    rows = {
        row["phase"]: row for row in load(A2A_4)["runs"][run]["rows"] if row["tokens"] == tokens
    }
    pair, together = rows["pair"]["us"]["median"], rows["pair"]["beside"]
    rates = (rows["dispatch"]["wire"], rows["combine"]["wire"])
    return [pair, rates, together["pair"], (together["slower"], together["slower_limited"])]


def few(pair: Series, dispatch: Series) -> list[Any]:
    """Pairs of four sizes, and GB/s of both phases at 2048 tokens."""
    moved = 2048 * 7 * ROW / 1e3
    rates = [moved / dispatch[2048], moved / (pair[2048] - dispatch[2048])]
    return [*(pair[tokens] for tokens in (8, 128, 1024, 2048)), *rates]


def few_4(row: int) -> list[Any]:
    """One row of the kernels on few SMs, 4 ranks."""
    found = load("few-sms-4xH200-2026-11-21.json")["runs"][0]["rows"][row]
    names = "pair dispatch dispatch_gbs dispatch_sm combine combine_gbs combine_sm"
    return [found[name] for name in names.split()]


def twice(selector: str) -> list[Any]:
    """Two runs at the sizes of the table, where there are any."""
    first, second = (series(f"{TILES}/{selector}.{index}") for index in (0, 1))
    sizes = (8, 64, 256, 512, 1024)
    return [(first[size], second[size]) if size in first else None for size in sizes]


def mean_of(selector: str) -> Series:
    """The mean of two runs."""
    first, second = (series(f"{TILES}/{selector}.{index}") for index in (0, 1))
    return Series({size: statistics.fmean((first[size], second[size])) for size in first})


def fastest_plan_us(work: str, rows: int) -> float:
    """us of the fastest plan of a grouped product, as many rows for every expert."""
    found = load("gemm-1xH200-2026-11-21.json")["equal_rows"]
    return min(
        float(row["us"])
        for row in found
        if (row["work"], row["dtype"], row["rows"]) == (work, "fp8", rows) and row.get("us")
    )


def low_floors(tokens: int, routing: str) -> list[Any]:
    """Floors of a low-latency pair on 8 ranks by how rows come home, of the routing that bench has."""
    found = []
    several: tuple[dict[str, Any], ...] = (
        {},
        {"reduce": "sender"},
        {"combine_dtype": "fp8"},
        {"reduce": "sender", "combine_dtype": "fp8"},
    )
    for options in several:
        case = LowCase(**_LOW, tokens=(tokens,), routing=routing, **options)
        traffic = case.traffic([make_ids(case, tokens, rank) for rank in range(8)])
        found.append(pair_floor_us(traffic["out_bytes"], traffic["back_bytes"], gpus(8)))
    return found


_LOW: dict[str, Any] = dict(ranks=8, device="cuda", max_tokens=512)


def low_memory(**options: str) -> list[Any]:
    """MB of a low-latency all-to-all, shared, results, and both."""
    sizes = {"ranks": 8, "max_tokens": 128, "top_k": 8, "num_experts": 256, "hidden": 7168}
    found: Any = LowLatencyAllToAll.memory_bytes(**sizes, **options)  # type: ignore[arg-type]
    return [part / 1e6 for part in (found.shared, found.results, found.shared + found.results)]


def reduce_memory(ranks: int) -> Series:
    """MiB of an all-reduce by its most tokens."""
    return Series(
        {
            tokens: AllReduce.memory_bytes(ranks=ranks, hidden=7168, max_tokens=tokens) / (1 << 20)
            for tokens in (128, 512, 2048, 8192)
        }
    )


TABLES: dict[str, list[tuple[str, Cells]]] = {
    "probes": [
        ("push, 16-byte stores", series(PROBES + "/gb_per_s_by_ctas/push, 16-byte stores/*")),
        ("pull, 16-byte loads", series(PROBES + "/gb_per_s_by_ctas/pull, 16-byte loads/*")),
        (
            "TMA bulk store (1 thread a CTA, 16 KiB chunks, 8 stages)",
            series(PROBES + "/gb_per_s_by_ctas/TMA bulk store/*"),
        ),
    ],
    "costs": [
        ("barrier of 8 GPUs inside a kernel", [limit("barrier_of_8_gpus_in_a_kernel_us")]),
        ("empty kernel in a graph", [limit("empty_kernel_in_a_graph_us")]),
        (
            "launch from the host: `cuda.bindings`, ctypes, C",
            [tuple(LIMITS["host_launch_us"].values())],
        ),
        ("HBM read", [limit("hbm_read_tb_per_s")]),
    ],
    "flashinfer": [
        ("8, perfect, bf16", series(PEERS + "/records/0/pair_us/*")),
        ("8, random, bf16", series(PEERS + "/records/1/pair_us/*")),
        ("8, perfect, fp8 and scales", series(PEERS + "/records/2/pair_us/*")),
        ("4, perfect, bf16", series(PEERS + "/records/3/pair_us/*")),
        ("4, random, bf16", series(PEERS + "/records/4/pair_us/*")),
        ("4, perfect, fp8 and scales", series(PEERS + "/records/5/pair_us/*")),
    ],
    "flashinfer-kernels": [
        ("dispatch", series(PROBES + "/flashinfer_kernels_us/dispatch/*")),
        ("combine", series(PROBES + "/flashinfer_kernels_us/combine/*")),
        ("sanitize", series(PROBES + "/flashinfer_kernels_us/sanitize/*")),
        (
            "prepare dispatch + combine",
            series(PROBES + "/flashinfer_kernels_us/prepare dispatch + combine/*"),
        ),
    ],
    "deepep": [
        ("8, perfect, fp8", series(PEERS + "/records/6/pair_us/*")),
        ("8, random, fp8", series(PEERS + "/records/7/pair_us/*")),
        ("8, perfect, bf16", series(PEERS + "/records/8/pair_us/*")),
        ("4, perfect, fp8", series(PEERS + "/records/9/pair_us/*")),
        (
            "8, perfect, fp8: dispatch kernel alone",
            series(PROBES + "/deepep_v1_low_latency_kernels_us/dispatch/*"),
        ),
        (
            "8, perfect, fp8: combine kernel alone",
            series(PROBES + "/deepep_v1_low_latency_kernels_us/combine/*"),
        ),
    ],
    "nccl": [
        ("all-gather", list(LIMITS["nccl_us_by_bytes_a_rank"]["all-gather"].values())),
        ("reduce-scatter", list(LIMITS["nccl_us_by_bytes_a_rank"]["reduce-scatter"].values())),
    ],
    "reduces-7168": [
        ("8, torch all_reduce, sum", series(PEERS + "/allreduce/0/us/*")),
        ("8, torch all_reduce, with norm", series(PEERS + "/allreduce/1/us/*")),
        ("8, torch symm_mem one-shot, sum", series(PEERS + "/allreduce/2/us/*")),
        ("8, torch symm_mem two-shot, sum", series(PEERS + "/allreduce/3/us/*")),
        ("8, FlashInfer trtllm one-shot, sum", series(PEERS + "/allreduce/5/us/*")),
        ("8, FlashInfer trtllm one-shot, with norm", series(PEERS + "/allreduce/6/us/*")),
        ("8, FlashInfer trtllm two-shot, with norm", series(PEERS + "/allreduce/7/us/*")),
        ("4, torch all_reduce, sum", series(PEERS + "/allreduce/13/us/*")),
        ("4, torch all_reduce, with norm", series(PEERS + "/allreduce/14/us/*")),
        ("4, torch symm_mem two-shot, sum", series(PEERS + "/allreduce/15/us/*")),
        ("4, FlashInfer trtllm one-shot, sum", series(PEERS + "/allreduce/17/us/*")),
        ("4, FlashInfer trtllm one-shot, with norm", series(PEERS + "/allreduce/18/us/*")),
        ("4, FlashInfer trtllm two-shot, with norm", series(PEERS + "/allreduce/19/us/*")),
    ],
    "reduces-4096": [
        ("8, torch all_reduce, sum", series(PEERS + "/allreduce/8/us/*")),
        ("8, torch symm_mem two-shot, sum", series(PEERS + "/allreduce/9/us/*")),
        ("8, FlashInfer trtllm one-shot, sum", series(PEERS + "/allreduce/10/us/*")),
        ("8, FlashInfer trtllm one-shot, with norm", series(PEERS + "/allreduce/11/us/*")),
        ("8, FlashInfer trtllm two-shot, with norm", series(PEERS + "/allreduce/12/us/*")),
        ("4, torch all_reduce, sum", series(PEERS + "/allreduce/20/us/*")),
        ("4, torch symm_mem two-shot, sum", series(PEERS + "/allreduce/21/us/*")),
        ("4, FlashInfer trtllm one-shot, sum", series(PEERS + "/allreduce/22/us/*")),
        ("4, FlashInfer trtllm one-shot, with norm", series(PEERS + "/allreduce/23/us/*")),
        ("4, FlashInfer trtllm two-shot, with norm", series(PEERS + "/allreduce/24/us/*")),
    ],
    "pairs-8": [
        ("weft", series(MOE_8 + "/rows[phase=pair]@tokens.us.median")),
        ("floor: bytes / 340 GB/s + 4.0 us", pair_floors(8)),
        ("weft / floor", series(MOE_8 + "/rows[phase=pair]@tokens.us.median") / pair_floors(8)),
        ("FlashInfer 0.7.2", series(PEERS + "/records/0/pair_us/*")),
    ],
    "pairs-other": [
        ("8 ranks, perfect", series(ABLATION + "/ladder/4/perfect 8/*.0")),
        ("8 ranks, perfect, second run", series(ABLATION + "/parts and waves/0/pull 8/*.0")),
        ("of it dispatch alone, repeated", series(ABLATION + "/parts and waves/0/pull 8/*.1")),
        ("8 ranks, random", series(ABLATION + "/ladder/4/random 8/*.0")),
        ("8 ranks, random, second run", series(ABLATION + "/parts and waves/0/pull-random 8/*.0")),
        ("FlashInfer, 8 ranks, random", series(PEERS + "/records/1/pair_us/*")),
        ("4 ranks, perfect", series(ABLATION + "/ladder/4/perfect 4/*.0")),
        ("4 ranks, perfect, second run", series(ABLATION + "/parts and waves/0/pull 4/*.0")),
        ("FlashInfer, 4 ranks, perfect", series(PEERS + "/records/3/pair_us/*")),
        ("4 ranks, random, second run", series(ABLATION + "/parts and waves/0/pull-random 4/*.0")),
        ("FlashInfer, 4 ranks, random", series(PEERS + "/records/4/pair_us/*")),
    ],
    "pairs-4": [
        ("4 ranks, perfect", series(A2A_4 + "/runs/0/rows[phase=pair]@tokens.us.median")),
        ("floor", pair_floors(4)),
        ("FlashInfer 0.7.2, recorded", series(PEERS + "/records/3/pair_us/*")),
        ("4 ranks, random", series(A2A_4 + "/runs/1/rows[phase=pair]@tokens.us.median")),
        ("FlashInfer, the same", series(PEERS + "/records/4/pair_us/*")),
        (
            "4 ranks, perfect, fp8 payload out, bf16 back",
            series(A2A_4 + "/runs/3/rows[phase=pair]@tokens.us.median"),
        ),
        ("FlashInfer, the same", series(PEERS + "/records/5/pair_us/*")),
    ],
    "pairs-4-other": [
        ("target", target("pair, 4 ranks, perfect, bf16")),
        (
            "4 ranks, perfect, quantised, fp8 both ways (the form before)",
            series(A2A_4 + "/runs/2/rows[phase=pair]@tokens.us.median"),
        ),
        ("2 ranks, perfect", series(A2A_4 + "/runs/4/rows[phase=pair]@tokens.us.median")),
        ("its floor", pair_floors(2)),
        (
            "2 ranks, perfect, quantised, fp8 both ways (the form before)",
            series(A2A_4 + "/runs/5/rows[phase=pair]@tokens.us.median"),
        ),
    ],
    "few-corun": [
        ("`num_sms=16`", corun(6, 2048)),
        ("`num_sms=8`, 1024 tokens", corun(7, 1024)),
    ],
    "fp8-8": [
        (
            "fp8 payload + scales out, bf16 back",
            series(ABLATION + "/ways/perfect 8, fp8 payload + scales out, bf16 pulled back/*.0"),
        ),
        ("FlashInfer, the same", series(PEERS + "/records/2/pair_us/*")),
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
        (
            "FP8 back, summed as rows come: three CTAs an SM push",
            series(HOME + "/runs/0/rows[variant=now]@tokens.pair"),
        ),
        (
            "the same, two push, seven strips at once",
            series(HOME + "/runs/0/rows[variant=2+1x7]@tokens.pair"),
        ),
        ("FP8 back, the form before", series(HOME + "/runs/0/rows[variant=last]@tokens.pair")),
        ("bf16 back, pulled", series(HOME + "/runs/0/rows[variant=pull]@tokens.pair")),
        ("floor, FP8 both ways", pair_floors(4, 7392, 7392)),
    ],
    "few-8": [
        (
            "`num_sms=8`",
            few(
                series(
                    ABLATION
                    + "/few SMs, perfect 8, bf16/one warp loads ahead and eight add/num_sms=8/*.0"
                ),
                series(
                    ABLATION
                    + "/few SMs, perfect 8, bf16/one warp loads ahead and eight add/num_sms=8/*.1"
                ),
            ),
        ),
        (
            "`num_sms=16`",
            few(
                series(
                    ABLATION
                    + "/few SMs, perfect 8, bf16/one warp loads ahead and eight add/num_sms=16/*.0"
                ),
                series(
                    ABLATION
                    + "/few SMs, perfect 8, bf16/one warp loads ahead and eight add/num_sms=16/*.1"
                ),
            ),
        ),
        (
            "`num_sms=24`",
            few(
                series(
                    ABLATION
                    + "/few SMs, perfect 8, bf16/one warp loads ahead and eight add/num_sms=24/*.0"
                ),
                series(
                    ABLATION
                    + "/few SMs, perfect 8, bf16/one warp loads ahead and eight add/num_sms=24/*.1"
                ),
            ),
        ),
        (
            "all 132",
            few(
                series(ABLATION + "/ladder/4/perfect 8/*.0"),
                series(ABLATION + "/ladder/4/perfect 8/*.1"),
            ),
        ),
    ],
    "few-4": [
        ("`num_sms=8`, a fence of the GPU's memory a piece", few_4(0)),
        ("`num_sms=8`, now", few_4(1)),
        ("`num_sms=16`, a fence a piece", few_4(2)),
        ("`num_sms=16`, now", few_4(3)),
    ],
    "allreduce-8-7168": [
        ("weft", least(*(ablation_of(7168, backend, shape) for backend, shape in LAUNCHES))),
        ("by", None),
        ("target", target("all-reduce, 8 ranks, 7168")),
        ("best of others", best_of_others(8, 7168)),
        ("floor", reduce_floors(8, 7168)),
    ],
    "allreduce-8-4096": [
        ("weft", least(*(ablation_of(4096, backend, "default") for backend in BACKENDS))),
        ("target", target("all-reduce, 8 ranks, 4096")),
        ("best of others", best_of_others(8, 4096)),
        ("floor", reduce_floors(8, 4096)),
    ],
    "allreduce-4": [
        ("weft, auto", series(R4 + "/runs/0/rows[backend=auto]@tokens.us.median")),
        ("best of others, recorded", best_of_others(4, 7168)),
        ("floor", reduce_floors(4, 7168)),
    ],
    "allreduce-4-other": [
        ("target", target("all-reduce, 4 ranks, 7168")),
        ("hidden 4096, auto", series(R4 + "/runs/1/rows[backend=auto]@tokens.us.median")),
    ],
    "allreduce-baselines": [
        ("weft, sum + residual + norm", series(R4 + "/runs/6/rows[]@tokens.us.median")),
        ("torch all_reduce (NCCL)", baseline_in_run("torch all_reduce")),
        ("torch symm_mem one-shot", baseline_in_run("torch symm_mem one-shot")),
        ("torch symm_mem two-shot", baseline_in_run("torch symm_mem two-shot")),
    ],
    "epilogues-4": [
        ("nothing", series(R4 + "/runs/2/rows[]@tokens.us.median")),
        ("residual and norm", series(R4 + "/runs/0/rows[backend=auto]@tokens.us.median")),
        ("and FP8, one scale given", series(R4 + "/runs/3/rows[]@tokens.us.median")),
        ("and FP8, a scale a token", series(R4 + "/runs/4/rows[]@tokens.us.median")),
        ("and FP8, a scale for 128 columns", series(R4 + "/runs/5/rows[]@tokens.us.median")),
    ],
    "epilogues-8": [
        (
            "nothing",
            least(
                *(ablation_of(7168, backend, "default", "none", pdl="True") for backend in BACKENDS)
            ),
        ),
        (
            "residual and norm",
            least(
                *(ablation_of(7168, backend, "default", "norm", pdl="True") for backend in BACKENDS)
            ),
        ),
        (
            "and FP8, one scale given",
            least(
                *(
                    ablation_of(7168, backend, "default", "static", pdl="True")
                    for backend in BACKENDS
                )
            ),
        ),
        (
            "and FP8, a scale a token",
            least(
                *(
                    ablation_of(7168, backend, "default", "token", pdl="True")
                    for backend in BACKENDS
                )
            ),
        ),
        (
            "and FP8, a scale for 128 columns",
            least(
                *(
                    ablation_of(7168, backend, "default", "group", pdl="True")
                    for backend in BACKENDS
                )
            ),
        ),
    ],
    "lowlatency-4": [
        ("weft.LowLatencyAllToAll", series(LOW_4 + "/3/medians[variant=default]@tokens.pair")),
        ("DeepEP v1, recorded", series(PEERS + "/records/9/pair_us/*")),
        ("floor", refloored(LOW_4 + "/0/rungs[variant=default]@tokens.floor")),
        ("with `profile=True`", series(LOW_4 + "/3/medians[variant=profile]@tokens.pair")),
        (
            "random routing, sums at the sender, FP8 back",
            series(LOW_4 + "/4/medians[variant=default]@tokens.pair"),
        ),
        ("its floor", refloored(LOW_4 + "/4/rungs[variant=default]@tokens.floor")),
    ],
    "lowlatency-4-before": [
        ("one row at a time, same day", series(LOW_4 + "/0/medians[variant=default]@tokens.pair")),
        (
            "the same without programmatic launch",
            series(LOW_4 + "/0/medians[variant=no-pdl]@tokens.pair"),
        ),
        ("the same, FP8 back", series(LOW_4 + "/0/medians[variant=fp8-home]@tokens.pair")),
        ("the same, bf16 out", series(LOW_4 + "/0/medians[variant=plain]@tokens.pair")),
        ("the same, random routing", series(LOW_4 + "/1/medians[variant=default]@tokens.pair")),
        (
            "the same, random routing, sums at the sender, FP8 back",
            series(LOW_4 + "/1/medians[variant=lean]@tokens.pair"),
        ),
        (
            "the form before that, same day",
            series(LOW_4 + "/2/medians[variant=default]@tokens.pair"),
        ),
        (
            "the form before that, a place for each kind of row",
            series(LOW_4 + "/2/medians[variant=halves]@tokens.pair"),
        ),
    ],
    "lowlatency-ideas": [
        (
            "one row at a time; sums at the sender, FP8 back (`before`, second run)",
            low(4, "before") - low(4, "default"),
        ),
        (
            "one row at a time, and stores with gaps (`before`)",
            low(3, "before") - low(3, "default"),
        ),
        ("one lane of a warp looks for a row (`one-lane`)", low(3, "one-lane") - low(3, "default")),
        (
            "two CTAs an SM that send, one that takes (`senders`)",
            low(3, "senders") - low(3, "default"),
        ),
        ("kernels that keep a trace (`profile`)", low(3, "profile") - low(3, "default")),
    ],
    "lowlatency-8": [
        (
            "weft.LowLatencyAllToAll",
            least(*(sweep(shape) for shape in SWEPT if not shape.startswith("no pdl"))),
        ),
        ("target", target("low latency, 8 ranks, perfect, fp8 out")),
        ("DeepEP v1 low latency, recorded", series(PEERS + "/records/6/pair_us/*")),
        (
            "weft.AllToAll, fp8 out, bf16 back (rank-major)",
            series(ABLATION + "/ways/perfect 8, fp8 payload + scales out, bf16 pulled back/*.0"),
        ),
        ("without programmatic launch", sweep("no pdl @128")),
    ],
    "layer-4": [
        ("low_latency: none", series(EXCHANGES_4 + "/1/rows[overlap=none]@tokens.us.median")),
        ("shared_expert", series(EXCHANGES_4 + "/1/rows[overlap=shared]@tokens.us.median")),
        ("gemm_push", series(EXCHANGES_4 + "/1/rows[overlap=push]@tokens.us.median")),
        ("throughput: gemm_push", series(EXCHANGES_4 + "/0/rows[overlap=push]@tokens.us.median")),
        ("DeepEP + DeepGEMM, published", series(PEERS + "/layers/0/us/*")),
        ("one-kernel Mega MoE, published", series(PEERS + "/layers/1/us/*")),
        (
            "floor: weights and rows at 4.6 TB/s",
            layer_floors(EXCHANGES_4, 1).beside(layer_floors(EXCHANGES_4, 0)),
        ),
    ],
    "layer-4-other": [
        (
            "low_latency: none / gemm_push",
            layer(EXCHANGES_4, 1, "none") / layer(EXCHANGES_4, 1, "push"),
        ),
        ("throughput: none", series(EXCHANGES_4 + "/0/rows[overlap=none]@tokens.us.median")),
        ("shared_expert", series(EXCHANGES_4 + "/0/rows[overlap=shared]@tokens.us.median")),
        ("target, best mode, 8 ranks", target("layer, deepseek-v3, fp8, 8 ranks")),
    ],
    "layer-models-4": [
        (
            "qwen3-30b-a3b, FP8, low_latency: none",
            series(EXCHANGES_4 + "/2/rows[overlap=none]@tokens.us.median"),
        ),
        ("gemm_push", series(EXCHANGES_4 + "/2/rows[overlap=push]@tokens.us.median")),
        ("throughput: gemm_push", series(TURNS + "/qwen3-30b-a3b by rank, with the last group/*")),
        (
            "glm-4.5-air, FP8, low_latency: shared_expert",
            series(EXCHANGES_4 + "/3/rows[overlap=shared]@tokens.us.median"),
        ),
        ("gemm_push", series(EXCHANGES_4 + "/3/rows[overlap=push]@tokens.us.median")),
        ("throughput: gemm_push", series(EXCHANGES_4 + "/4/rows[]@tokens.us.median")),
    ],
    "layer-turns": [
        (
            "the first product goes first",
            series(TURNS + "/who goes first, by exchange expert/the first product, at any size/*"),
        ),
        (
            "the shared expert does",
            series(TURNS + "/who goes first, by exchange expert/the shared expert, at any size/*"),
        ),
        (
            "the same, its stream before others",
            series(
                TURNS
                + "/who goes first, by exchange expert/the shared expert, in a stream that goes first/*"
            ),
        ),
        (
            "the same, dispatch on 12 + 28 CTAs of 768 threads",
            series(
                TURNS
                + "/who goes first, by exchange expert/the shared expert; dispatch on 12 + 28 CTAs of 768 threads/*"
            ),
        ),
        ("on 20 + 44", series(TURNS + "/who goes first, by exchange expert/the same on 20 + 44/*")),
        (
            "by rank, on the same GPUs",
            series(TURNS + "/who goes first, by exchange expert/by rank/*"),
        ),
        (
            "the first product goes first",
            series(
                TURNS
                + "/at 16 to 64 tokens, beside layer-exchanges-4xH200-2026-11-22.json/the first product first/*"
            ),
        ),
        (
            "the shared expert does",
            series(
                TURNS
                + "/at 16 to 64 tokens, beside layer-exchanges-4xH200-2026-11-22.json/the shared expert first/*"
            ),
        ),
    ],
    "layer-4-before": [
        ("none", series(L4 + "/0/rows[overlap=none]@tokens.us.median")),
        ("shared", series(L4 + "/0/rows[overlap=shared]@tokens.us.median")),
        ("push", series(L4 + "/0/rows[overlap=push]@tokens.us.median")),
        ("push, before Hopper's own product", series(L4 + "/0/auto/*.us.rank.push")),
        ("columns, before it", series(L4 + "/0/auto/*.us.rank.columns")),
    ],
    "layer-2": [
        ("none", series(L2 + "/0/rows[overlap=none]@tokens.us.median")),
        ("shared", series(L2 + "/0/rows[overlap=shared]@tokens.us.median")),
        ("columns", series(L2 + "/0/rows[overlap=columns]@tokens.us.median")),
        ("signals", series(L2 + "/0/rows[overlap=signals]@tokens.us.median")),
        ("push", series(L2 + "/0/rows[overlap=push]@tokens.us.median")),
        ("push, that morning", series(L2 + "/0/auto/*.us.rank.push")),
        ("target, best mode, 8 ranks", target("layer, deepseek-v3, fp8, 8 ranks")),
        ("DeepEP + DeepGEMM, published, 8 ranks", series(PEERS + "/layers/0/us/*")),
        ("one-kernel Mega MoE, published, 8 ranks", series(PEERS + "/layers/1/us/*")),
        ("floor: weights and rows at 4.6 TB/s", layer_floors(L2, 0)),
    ],
    "layer-pairs-of-gpus": [
        ("first pair", series("layer-push-2xH200-2026-11-21.json/rows[]@tokens.us.median")),
        (
            "its fastest replay",
            Series(
                {
                    row["tokens"]: row["us"]["min"]
                    for row in load("layer-push-2xH200-2026-11-21.json")["rows"]
                }
            ),
        ),
        (
            "second pair",
            series("layer-models-2xH200-2026-11-21.json/5/rows[overlap=push]@tokens.us.median"),
        ),
        ("third pair", series(X2 + "/2/rows[]@tokens.us.median")),
    ],
    "layer-tiles": [
        ("deepseek-v3, tiles of up to 160 rows", twice("tiles_of_256_rows[]@tokens.before")),
        ("of up to 256", twice("tiles_of_256_rows[]@tokens.with")),
        ("no early weights", series(TILES + "/early_weights[model=deepseek-v3]@tokens.none")),
        (
            "of the second product (kept)",
            series(TILES + "/early_weights[model=deepseek-v3]@tokens.second"),
        ),
        ("of both", series(TILES + "/early_weights[model=deepseek-v3]@tokens.both")),
        (
            "qwen3-30b-a3b: no early weights",
            series(TILES + "/early_weights[model=qwen3-30b-a3b]@tokens.none"),
        ),
        (
            "of the second product (kept)",
            series(TILES + "/early_weights[model=qwen3-30b-a3b]@tokens.second"),
        ),
        ("of both", series(TILES + "/early_weights[model=qwen3-30b-a3b]@tokens.both")),
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
        (
            'qwen3-30b-a3b, FP8, by rank ("push")',
            series(X2 + "/0/rows[overlap=push]@tokens.us.median"),
        ),
        ('by expert ("none")', series(X2 + "/1/rows[]@tokens.us.median")),
        ('deepseek-v3, FP8, by rank ("push")', series(X2 + "/2/rows[]@tokens.us.median")),
        ('by expert ("shared")', series(X2 + "/3/rows[]@tokens.us.median")),
    ],
    "ablation": [
        (
            "1. slot = token index, one launch a phase, device epochs; combine pulls from rank 0 upwards",
            series(ABLATION + "/ladder/0/perfect 8/*.0"),
        ),
        (
            "2. each rank starts its pulls at itself (`rank` a compile-time constant)",
            series(ABLATION + "/ladder/1/perfect 8/*.0"),
        ),
        (
            "3. cold loads before anything is decided; combine CTAs of 128 threads, at most four an SM",
            series(ABLATION + "/ladder/2/perfect 8/*.0"),
        ),
        (
            "4. programmatic dependent launch (two objects in one run: mean)",
            (
                series(ABLATION + "/ladder/3/perfect 8/*.0")
                + series(ABLATION + "/ladder/3/perfect 8, again/*.0")
            )
            / 2,
        ),
        (
            "5. the same, but only below 256 x 896 words",
            series(ABLATION + "/ladder/4/perfect 8/*.0"),
        ),
    ],
    "gemm-plans": [
        (str(rows), [fastest_plan_us(work, rows) for work in ("quant", "down")])
        for rows in (16, 32, 64, 128, 256)
    ],
    "allreduce-memory": [(f"{ranks} ranks", reduce_memory(ranks)) for ranks in (8, 4, 2)],
    "lowlatency-memory": [
        ("default", low_memory()),
        ("FP8 back", low_memory(combine_dtype="fp8")),
        ("sums at the sender, FP8 back", low_memory(reduce="sender", combine_dtype="fp8")),
    ],
    "lowlatency-floors": [
        (f"{tokens}, {told}", low_floors(tokens, routing))
        for tokens in (256, 512)
        for routing, told in (("uniform", "random"), ("perfect", "perfect"))
    ],
}
