# SPDX-License-Identifier: Apache-2.0
"""Time every plan of the grouped GEMM on one GPU, and check it against fp32.

    python benchmarks/gemm_sweep.py [--json FILE] [--rows 4 16 ...] [--dtypes fp8 bf16] [--even]
        [--work up down quant push] [--programmatic] [--limit SECONDS]

Prints a table, the best plan of each size, and its fraction of this GPU's memory rate. A plan's
bits are compared with those of the first plan of its size and dtype.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weft.bench.machine import describe_machine
from weft.gemm import GatedQuant, GemmPlan, Push, WgmmaPlan, grouped_gemm
from weft.gemm.config import BLOCK_MS, FP8
from weft.reference import dequantize, quantize

EXPERTS, HIDDEN, WIDE = 32, 7168, 4096  # DeepSeek-V3 on 8 ranks: gate and up have 4096 columns
SHAPES = {
    "up": (WIDE, HIDDEN),
    "quant": (WIDE, HIDDEN),
    "down": (HIDDEN, WIDE // 2),
    "push": (HIDDEN, WIDE // 2),
}
ROWS = (4, 8, 16, 32, 64, 128)
DTYPES = {"fp8": FP8, "bf16": torch.bfloat16}
CALLS, REPLAYS = 20, 5


Plan = GemmPlan | WgmmaPlan


def plans(rows: int, dtype: torch.dtype, work: str) -> Iterator[Plan]:
    """Yield the plans to try for this number of rows."""
    if dtype == FP8 and work != "up":
        fitting = [m for m in BLOCK_MS if m >= rows] or [BLOCK_MS[-1]]
        yield from map(WgmmaPlan, fitting[:3])
    block_k = 128 if dtype == FP8 else 64
    for tile in tiles(rows, work == "quant"):
        for flatten in (True, False):
            yield GemmPlan(block_k=block_k, flatten=flatten, **tile)


def tiles(rows: int, gated: bool) -> Iterator[dict[str, Any]]:
    """Yield tiles, stages, warps and CTAs."""
    for block_m in (16, 32):
        narrow = {"block_m": block_m, "swap": True}
        if rows > 2 * block_m:
            continue
        if not gated:
            yield narrow | {"stages": 6 - block_m // 32, "ctas_per_sm": 2}
            yield narrow | {"stages": 3, "ctas_per_sm": 3}
        else:
            yield narrow | {"block_n": 256, "stages": 5}
            yield narrow | {"block_n": 256, "stages": 3, "ctas_per_sm": 2}
    if rows >= 16 and not gated:
        yield {"block_m": 64, "stages": 4, "ctas_per_sm": 2}
        yield {"block_m": 64, "stages": 3, "ctas_per_sm": 3}
    elif rows >= 16:
        yield {"block_m": 64, "block_n": 256, "stages": 5}
        yield {"block_m": 64, "block_n": 256, "stages": 5, "warps": 8}
    if rows >= 64:
        yield {"block_m": 128, "block_n": 256, "stages": 4, "warps": 8}
        if not gated:
            yield {"block_m": 128, "stages": 6, "warps": 8}


@dataclass
class Operands:
    """Tensors of one shape, with as many rows as the largest size, masked."""

    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor | None
    b_scale: torch.Tensor | None
    expected: torch.Tensor  # a @ b.T in fp32, gated for "quant"
    out: torch.Tensor
    scales: torch.Tensor | None
    dst_addr: torch.Tensor

    @classmethod
    def make(cls, work: str, dtype: torch.dtype, rows: int) -> Operands:
        n, k = SHAPES[work]
        generator = torch.Generator("cuda").manual_seed(n)
        x = torch.randn(EXPERTS, rows, k, device="cuda", generator=generator).bfloat16()
        b = torch.empty(EXPERTS, n, k, device="cuda", dtype=dtype)
        for expert in range(EXPERTS):
            b[expert] = (torch.randn(n, k, device="cuda", generator=generator) * k**-0.5 * 16).to(
                dtype
            )
        a, a_scale, b_scale = x, None, None
        if dtype == FP8:
            a, a_scale = quantize(x, "fp8")
            size = (EXPERTS, n // 128, k // 128)
            b_scale = torch.rand(size, device="cuda", generator=generator) / 16 + 1 / 32
        expected = torch.empty(EXPERTS, rows, n, device="cuda")
        for expert in range(EXPERTS):
            w = b[expert].float()
            if b_scale is not None and a_scale is not None:
                w = dequantize(b[expert], b_scale[expert].repeat_interleave(128, dim=0))
                expected[expert] = dequantize(a[expert], a_scale[expert]) @ w.T
            else:
                expected[expert] = a[expert].float() @ w.T
        if work == "quant":
            gate, up = expected.chunk(2, dim=-1)
            expected = gate * torch.sigmoid(gate) * up
        width = expected.shape[-1]
        kind = FP8 if work == "quant" else torch.bfloat16
        out = torch.empty(EXPERTS, rows, width, device="cuda", dtype=kind)
        scales = torch.empty(EXPERTS, rows, width // 128, device="cuda")
        dst_addr = torch.arange(EXPERTS * rows, device="cuda") * (width * 2) + out.data_ptr()
        return cls(a, b, a_scale, b_scale, expected, out, scales, dst_addr)


def call(
    tensors: Operands,
    work: str,
    plan: Plan,
    counts: torch.Tensor,
    programmatic: bool,
) -> Callable[[], object]:
    """Return the call to time."""
    kwargs: dict[str, Any] = {"counts": counts, "plan": plan, "programmatic_launch": programmatic}
    kwargs |= {"a_scale": tensors.a_scale, "b_scale": tensors.b_scale}
    if work == "quant":
        kwargs |= {"epilogue": GatedQuant(), "out": (tensors.out, tensors.scales)}
    elif work == "push":
        kwargs |= {"epilogue": Push(tensors.dst_addr)}
    else:
        kwargs |= {"out": tensors.out}
    return lambda: grouped_gemm(tensors.a, tensors.b, **kwargs)


def timed(body: Callable[[], object]) -> float:
    """Return the median us per call of a graph of CALLS calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            body()
    graph.replay()
    spans = []
    for _ in range(REPLAYS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        spans.append(first.elapsed_time(last) * 1e3 / CALLS)
    return statistics.median(spans)


def read_rate() -> float:
    """Return the bytes per us that a sum over 1 GiB reads."""
    words = torch.zeros(1 << 27, dtype=torch.int64, device="cuda")
    return words.numel() * 8 / timed(lambda: words.sum())


def drawn(rows: int, even: bool) -> torch.Tensor:
    """Return the rows of each expert, all equal or Poisson-distributed."""
    if even:
        return torch.full((EXPERTS,), rows, dtype=torch.int32, device="cuda")
    generator = torch.Generator().manual_seed(rows)
    return torch.poisson(torch.full((EXPERTS,), float(rows)), generator).to("cuda", torch.int32)


def check(
    tensors: Operands, work: str, counts: torch.Tensor, known: list[torch.Tensor]
) -> tuple[float, bool, bool]:
    """Return relative error, whether bits equal earlier calls', and whether padding is intact."""
    most = tensors.out.shape[1]
    used = torch.arange(most, device="cuda") < counts[:, None]
    number = tensors.out.float()
    if work == "quant" and tensors.scales is not None:
        number = dequantize(tensors.out, tensors.scales)
    expected = tensors.expected[used]
    error = ((number[used] - expected).norm() / expected.norm()).item()
    bits = tensors.out.view(torch.uint8)
    intact = bool((bits[~used] == 255).all())
    same = True
    if known:
        both = used & known[1]
        same = torch.equal(known[0][both], bits[both])
    if not known or used.sum() > known[1].sum():
        known[:] = [bits.clone(), used]
    return error, same, intact


def measure(args: argparse.Namespace, work: str, dtype_name: str) -> list[dict[str, Any]]:
    """Measure every plan at every size of one shape and dtype."""
    dtype, results = DTYPES[dtype_name], []
    most = max(int(drawn(r, args.even).max()) for r in args.rows)
    tensors = Operands.make(work, dtype, most)
    n, k = SHAPES[work]
    counts = {r: drawn(r, args.even) for r in args.rows}
    jobs = [(r, p) for r in args.rows for p in plans(r, dtype, work)]
    failed = warm(tensors, work, {p: counts[r] for r, p in jobs}, args.programmatic)
    known: list[torch.Tensor] = []
    for rows, plan in jobs:
        row: dict[str, Any] = {"work": work, "dtype": dtype_name, "rows": rows, **asdict(plan)}
        if plan in failed:
            results.append(row | {"failed": failed[plan]})
            continue
        if time.monotonic() > args.deadline:
            results.append(row | {"failed": "out of time"})
            continue
        body = call(tensors, work, plan, counts[rows], args.programmatic)
        tensors.out.view(torch.uint8).fill_(255)
        body()
        error, same, rest = check(tensors, work, counts[rows], known)
        item, total = tensors.b.element_size(), int(counts[rows].sum())
        moved = EXPERTS * n * k * item + total * (k * item + tensors.out[0, 0].nbytes)
        us = timed(body)
        results.append(row | {"us": us, "error": error, "same": same, "rest": rest, "bytes": moved})
    return results


def warm(
    tensors: Operands,
    work: str,
    todo: dict[Plan, torch.Tensor],
    programmatic: bool,
) -> dict[Plan, str]:
    """Compile every plan, several at once; return the failures with their reasons."""

    def one(job: tuple[Plan, torch.Tensor]) -> tuple[Plan, str]:
        plan, counts = job
        try:
            call(tensors, work, plan, counts, programmatic)()
        except Exception as error:  # a sweep continues, and reports failures
            return plan, repr(error)[:160]
        return plan, ""

    before = time.monotonic()
    jobs = list(todo.items())
    answers = [one(jobs[0])]  # alone, because it initializes Triton
    with ThreadPoolExecutor(8) as pool:
        answers += pool.map(one, jobs[1:])
    torch.cuda.synchronize()
    print(f"# {work}: {len(todo)} plans compiled in {time.monotonic() - before:.1f} s", flush=True)
    return {plan: why for plan, why in answers if why}


def label(row: dict[str, Any]) -> str:
    """Abbreviate a plan."""
    if "stages" not in row:
        return f"wgmma, {row['block_m']} rows"
    marks = "s" * row["swap"] + "f" * row["flatten"]
    tile = f"{row['block_m']}x{row['block_n']}x{row['block_k']}"
    return f"{tile} st{row['stages']} w{row['warps']} x{row['ctas_per_sm']} {marks}"


def show(rows: list[dict[str, Any]], rate: float) -> None:
    """Print the table of one shape and dtype, best plan first."""
    for count in sorted({row["rows"] for row in rows}):
        group = [row for row in rows if row["rows"] == count]
        good = sorted((row for row in group if "us" in row), key=lambda row: row["us"])
        for place, row in enumerate(good):
            floor = row["bytes"] / rate
            bad = "" if row["error"] < 0.05 and row["rest"] else "  WRONG"
            print(
                f"{row['work']:5} {row['dtype']:4} {count:4} rows {row['us']:7.1f} us "
                f"{100 * floor / row['us']:4.0f} % {label(row):26} error {row['error']:.1e} "
                f"bits {'same' if row['same'] else 'DIFFER'}{bad}{'  <-' if not place else ''}"
            )
        for row in group:
            if "failed" in row:
                print(
                    f"{row['work']:5} {row['dtype']:4} {count:4} rows {label(row)}: {row['failed']}"
                )


def best_of(results: list[dict[str, Any]], dtype: str, rows: int) -> dict[str, float]:
    """Return the us of the fastest plan of each work."""
    best: dict[str, float] = {}
    for row in results:
        if (row["dtype"], row["rows"]) == (dtype, rows) and "us" in row:
            best[row["work"]] = min(row["us"], best.get(row["work"], row["us"]))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--dtypes", nargs="+", default=["fp8"], choices=list(DTYPES))
    parser.add_argument(
        "--work", nargs="+", default=["quant", "down", "push"], choices=list(SHAPES)
    )
    parser.add_argument("--even", action="store_true", help="equal numbers of rows per expert")
    parser.add_argument("--programmatic", action="store_true", help="programmatic launch")
    parser.add_argument("--limit", type=float, default=110.0, help="seconds")
    args = parser.parse_args()
    args.deadline = time.monotonic() + args.limit
    rate = read_rate()
    device = torch.cuda.get_device_name()
    print(f"# {device}, torch {torch.__version__}, reads {rate / 1e6:.2f} TB/s", flush=True)
    results = []
    for dtype in args.dtypes:
        for work in args.work:
            if work == "quant" and dtype != "fp8":
                continue
            rows = measure(args, work, dtype)
            show(rows, rate)
            results += rows
            torch.cuda.empty_cache()
    for dtype in args.dtypes:
        for count in args.rows:
            best = best_of(results, dtype, count)
            words = "  ".join(f"{work} {us:.1f}" for work, us in best.items())
            print(f"best {dtype} {count:4} rows: {words}  together {sum(best.values()):.1f}")
    if args.json:
        machine = describe_machine([device])
        data = {"device": device, "machine": machine, "rate": rate, "rows": results}
        args.json.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
