# SPDX-License-Identifier: Apache-2.0
"""Tune SGLang's fused MoE kernel in Triton, for shapes and GPUs without a table in SGLang.

SGLang's own tuning script is not part of its wheel. This one times the server's kernel,
`fused_experts_impl`, with expert-parallel routing over the configs below, one process per GPU. It
writes the best config of each number of tokens into SGLang's folder of tables and into $OUT. --take
copies another GPU's table for the shape instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUT = Path(os.environ["OUT"])
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SHAPES = {  # experts of the model, hidden, intermediate, top_k, FP8 blocks
    "qwen3-30b-a3b": (128, 2048, 768, 8, None),
    "deepseek-v3": (256, 7168, 2048, 8, [128, 128]),
}
ROUNDS, REPEATS = 3, 10


def configs(block: list[int] | None) -> Iterator[dict[str, int]]:
    """Yield configs; those that exceed shared memory are skipped during timing."""
    depths = (128,) if block else (64, 128)
    for m, n, k, warps, stages in itertools.product(
        (16, 32, 64, 128), (64, 128, 256), depths, (4, 8), (3, 4)
    ):
        if (m >= 64 or warps == 4) and not (m == 128 and warps == 4):
            group = 1 if m <= 32 else 16
            sizes = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k}
            yield {**sizes, "GROUP_SIZE_M": group, "num_warps": warps, "num_stages": stages}


def share(model: str, gpus: int, part: int, parts: int, end: float) -> list[dict[str, Any]]:
    """Return the us of this process's share of the configs, for every number of tokens."""
    import torch
    from sglang.srt.layers.moe.moe_runner.triton_utils import override_config
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts_impl
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    experts, hidden, width, top_k, block = SHAPES[model]
    local = experts // gpus
    torch.manual_seed(0)
    options: dict[str, Any] = {}
    w1 = torch.randn(local, 2 * width, hidden, device="cuda", dtype=torch.bfloat16) / 32
    w2 = torch.randn(local, hidden, width, device="cuda", dtype=torch.bfloat16) / 32
    if block:
        w1, w2 = w1.to(torch.float8_e4m3fn), w2.to(torch.float8_e4m3fn)
        options = {"use_fp8_w8a8": True, "block_shape": block}
        for name, w in (("w1_scale", w1), ("w2_scale", w2)):
            grid = (local, -(-w.shape[1] // block[0]), -(-w.shape[2] // block[1]))
            options[name] = torch.full(grid, 1 / 32, device="cuda")
    inputs = {}
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.int()
        ids = torch.where(ids < local, ids, -1)  # other experts are on other ranks
        inputs[tokens] = (x, torch.rand(tokens, top_k, device="cuda"), ids)
    results: list[dict[str, Any]] = []
    for config in list(configs(block))[part::parts]:
        if time.time() > end:
            print("time is up: the remaining configs were not tried", file=sys.stderr)
            break
        for tokens, (x, weights, ids) in inputs.items():

            def once(x: Any = x, weights: Any = weights, ids: Any = ids) -> None:
                fused_experts_impl(x, w1, w2, weights, ids, **options)

            try:
                with override_config(config):
                    us = timed(once)
            except Exception as error:  # out of shared memory or registers
                print(f"{config}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
                break
            results.append({"tokens": tokens, "us": us, "config": config})
    return results


def timed(once: Any) -> float:
    """Return the best us of several rounds, as a CUDA graph."""
    import torch

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            once()
    graph.replay()
    best = float("inf")
    for _ in range(ROUNDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(stop) * 1000 / REPEATS)
    return best


def best_of(results: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return a table in SGLang's format."""
    table = {}
    for tokens in sorted({each["tokens"] for each in results}):
        rows = [each for each in results if each["tokens"] == tokens]
        table[str(tokens)] = min(rows, key=lambda each: each["us"])["config"]
    return table


def tables() -> Path:
    """Return SGLang's folder of tables for the installed Triton."""
    import triton

    triton_utils = "sglang/srt/layers/moe/moe_runner/triton_utils/configs"
    version = triton.__version__.replace(".", "_")
    return Path(os.environ["PACK_SITE"]) / triton_utils / f"triton_{version}"


def file_name(model: str, gpus: int, device: str) -> str:
    """Return SGLang's name of a table."""
    experts, _, width, _, block = SHAPES[model]
    kind = f",dtype=fp8_w8a8,block_shape={block}" if block else ""
    return f"E={experts // gpus},N={width},device_name={device.replace(' ', '_')}{kind}.json"


def main() -> int:
    """Tune, or copy another GPU's table."""
    from job import gpu_names

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what")
    parser.add_argument("--model", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--gpus", type=int, default=max(1, len(gpu_names())), help="ranks")
    parser.add_argument("--seconds", type=float, default=480.0, help="time limit")
    parser.add_argument("--take", metavar="GPU", help="such as NVIDIA_H100_80GB_HBM3")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = gpu_names()
    if args.part is not None:
        found = share(args.model, args.gpus, args.part, len(names), args.end)
        (OUT / f"tune-{args.part}.json").write_text(json.dumps(found))
        return 0
    if not names:
        sys.exit("no GPU")
    name = file_name(args.model, args.gpus, names[0])
    if args.take:
        other = file_name(args.model, args.gpus, args.take)
        known = sorted(tables().parent.glob(f"triton_*/{other}"))
        if not known:
            sys.exit(f"SGLang ships no {other}")
        table = json.loads(known[-1].read_text())
        print(f"{name}: as {known[-1]}")
    else:
        end = str(time.time() + args.seconds)
        shares = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--part", str(part), "--end", end],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": str(part)},
            )
            for part in range(len(names))
        ]
        if any([each.wait() for each in shares]):
            sys.exit("a share failed")
        results = [
            json.loads((OUT / f"tune-{part}.json").read_text()) for part in range(len(names))
        ]
        table = best_of([row for rows in results for row in rows])
    for folder in (tables(), OUT):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(table, indent=4) + "\n")
    print(f"{name}: {len(table)} numbers of tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
