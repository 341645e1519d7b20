# SPDX-License-Identifier: Apache-2.0
"""Where the GPU's time goes in a step of decode or prefill: torch's trace of a few, by kernel.

The result holds microseconds a step on rank 0, and `profile_picture.py` draws them. What is between
their sum and `span` the GPU waited for the CPU, or for another rank's CPU.
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

from job import OUT, Job, Variant, chosen, in_servers, post
from server import arguments, begin, of_data_parallel
from trace_kernels import kernels, summed
from variants import VARIANTS


def spread(folder: Path) -> list[Path]:
    """The traces of a run, rank 0's first."""
    return sorted(folder.glob("**/*.trace.json.gz"))


def traced(job: Job, address: str, folder: Path, given: argparse.Namespace) -> list[Path]:
    """Ask for many answers, and trace some steps while they are being written, or read.

    A few are asked for before: the first prefill of a size compiles its kernels.
    """
    decode = given.phase == "decode"
    length, tokens, waves = (64, 512, 1) if decode else (1024, 1, 4)
    requests = given.requests * job.gpus

    def ask(pool: concurrent.futures.Executor, tokens: int, waves: int) -> list[Any]:
        body = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        prompts = [[3 + (7 * i + j) % 200 for j in range(length)] for i in range(waves * requests)]
        asked = [{"input_ids": ids, "sampling_params": body} for ids in prompts]
        return [pool.submit(post, address, "/generate", one) for one in asked]

    with concurrent.futures.ThreadPoolExecutor(waves * requests) as pool:
        for each in ask(pool, min(tokens, 4), 1):
            each.result(timeout=job.left(200))
        running = ask(pool, tokens, waves)
        time.sleep(2.0 if decode else 0.5)  # prefill, and the first steps
        about = {"output_dir": str(folder), "num_steps": given.steps, "activities": ["GPU"]}
        post(address, "/start_profile", about)
        for each in running:
            each.result(timeout=job.left(200))
    end = time.monotonic() + job.left(60)
    while len(spread(folder)) < job.gpus and time.monotonic() < end:
        time.sleep(0.5)
    return spread(folder)


def measure(job: Job, given: argparse.Namespace, variant: Variant, name: str, address: str) -> None:
    """A step of rank 0's, by kernel."""
    folder = OUT / f"trace-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    traces = traced(job, address, folder, given)
    if not traces:
        job.fail(f"{name}: no trace in {folder}")
        return
    result = summed(kernels(traces[0]), given.steps)
    (OUT / f"kernels-{name}.json").write_text(json.dumps(result["kernels"], indent=1))
    sizes = {"requests": given.requests, "steps": given.steps, "phase": given.phase}
    job.record(variant, result, **sizes)


def main() -> int:
    """One server for each variant."""
    parser = arguments(str(__doc__), "qwen3-30b-a3b", ["stock", "weft"])
    parser.add_argument("--requests", type=int, default=64, help="a rank")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--phase", choices=["decode", "prefill"], default="decode")
    given = parser.parse_args()
    job = of_data_parallel(given, given.requests, graphs="deepseek" not in given.model)
    each = functools.partial(measure, job, given)
    in_servers(job, chosen(given.variants, VARIANTS), begin, each)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
