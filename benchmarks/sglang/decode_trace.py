# SPDX-License-Identifier: Apache-2.0
"""GPU time of a decode or prefill step by kernel, from torch's trace.

Results are us per step on rank 0; `profile_picture.py` plots them. The difference between their sum
and `span` is time in which the GPU waited for its CPU, or for another rank's.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from job import OUT, Job, Variant, in_servers, post, select_variants
from server import arguments, begin, of_data_parallel
from trace_kernels import kernels, summed
from variants import VARIANTS


def spread(folder: Path) -> list[Path]:
    """Return the traces of a run, rank 0's first."""
    return sorted(folder.glob("**/*.trace.json.gz"))


def traced(job: Job, address: str, folder: Path, args: argparse.Namespace) -> list[Path]:
    """Request many answers, and trace some steps of decode or prefill.

    A few requests come first, because the first prefill of a size compiles its kernels.
    """
    decode = args.phase == "decode"
    length, tokens, waves = (64, 512, 1) if decode else (1024, 1, 4)
    requests = args.requests * job.gpus

    def ask(pool: concurrent.futures.Executor, tokens: int, waves: int) -> list[Any]:
        body = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        prompts = [[3 + (7 * i + j) % 200 for j in range(length)] for i in range(waves * requests)]
        bodies = [{"input_ids": ids, "sampling_params": body} for ids in prompts]
        return [pool.submit(post, address, "/generate", one) for one in bodies]

    with concurrent.futures.ThreadPoolExecutor(waves * requests) as pool:
        for each in ask(pool, min(tokens, 4), 1):
            each.result(timeout=job.left(200))
        running = ask(pool, tokens, waves)
        time.sleep(2.0 if decode else 0.5)  # wait for prefill and the first steps
        about = {"output_dir": str(folder), "num_steps": args.steps, "activities": ["GPU"]}
        post(address, "/start_profile", about)
        for each in running:
            each.result(timeout=job.left(200))
    end = time.monotonic() + job.left(60)
    while len(spread(folder)) < job.gpus and time.monotonic() < end:
        time.sleep(0.5)
    return spread(folder)


def measure(job: Job, args: argparse.Namespace, variant: Variant, name: str, address: str) -> None:
    """Record rank 0's step by kernel."""
    folder = OUT / f"trace-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    traces = traced(job, address, folder, args)
    if not traces:
        job.fail(f"{name}: no trace in {folder}")
        return
    result = summed(kernels(traces[0]), args.steps)
    (OUT / f"kernels-{name}.json").write_text(json.dumps(result["kernels"], indent=1))
    sizes = {"requests": args.requests, "steps": args.steps, "phase": args.phase}
    job.record(variant, result, **sizes)


def main() -> int:
    """Run one server per variant."""
    parser = arguments(str(__doc__), "qwen3-30b-a3b", ["stock", "weft"])
    parser.add_argument("--requests", type=int, default=64, help="a rank")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--phase", choices=["decode", "prefill"], default="decode")
    args = parser.parse_args()
    job = of_data_parallel(args, args.requests, graphs="deepseek" not in args.model)
    each = functools.partial(measure, job, args)
    in_servers(job, select_variants(args.variants, VARIANTS), begin, each)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
