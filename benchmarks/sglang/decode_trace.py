"""Where the GPU's time goes in a step of decode or prefill: torch's trace of a few, by kernel.

The result holds microseconds a step on rank 0, and `profile_picture.py` draws them. What is between
their sum and `span` the GPU waited for the CPU, or for another rank's CPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gzip
import json
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server import (
    OUT,
    Job,
    arguments,
    begin,
    chosen,
    data_parallel,
    job_of,
    post,
    prefill_graphs,
    server,
)
from variants import VARIANTS

MANY = 40  # kernels that are listed one by one; the rest is one number


@dataclass(frozen=True)
class Trace:
    """One rank's. us: of each kernel.   span: from the first one's start to the last one's end."""

    us: Counter[str]
    span: float


def kernels(trace: Path) -> Trace:
    """Microseconds of each kernel in a trace."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    events = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found: Counter[str] = Counter()
    for event in events:
        found[event["name"]] += event["dur"]
    ends = [event["ts"] + event["dur"] for event in events]
    return Trace(found, max(ends, default=0.0) - min((e["ts"] for e in events), default=0.0))


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


def main() -> int:
    """One server for each variant."""
    parser = arguments(str(__doc__), "qwen3-30b-a3b", ["stock", "weft"])
    parser.add_argument("--requests", type=int, default=64, help="a rank")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--phase", choices=["decode", "prefill"], default="decode")
    parser.add_argument("--chunk", type=int, default=2048, help="prefill tokens of a rank")
    given = parser.parse_args()
    job = job_of(
        given,
        *data_parallel(given.gpus),
        *("--cuda-graph-max-bs-decode", str(given.requests)),
        *("--chunked-prefill-size", str(given.chunk * given.gpus)),
        *prefill_graphs(given.chunk, served="deepseek" not in given.model),
    )
    variants = chosen(given.variants, VARIANTS)
    for variant in variants:
        begin(job, variant)
    for variant in variants:
        if job.out_of_time(variant.name, 90):
            continue
        folder = OUT / f"trace-{variant.name}"
        shutil.rmtree(folder, ignore_errors=True)
        traces: list[Path] = []
        with server(job, variant) as address:
            if address is not None:
                traces = traced(job, address, folder, given)
        if not traces:
            job.fail(f"{variant.name}: no trace in {folder}")
            continue
        found = kernels(traces[0])
        top: dict[str, Any] = {
            name: us / given.steps for name, us in found.us.most_common(MANY) if us > 0
        }
        total = sum(found.us.values()) / given.steps
        (OUT / f"kernels-{variant.name}.json").write_text(json.dumps(top, indent=1))
        result = {"us": total, "rest": total - sum(top.values()), "kernels": top}
        result["span"] = found.span / given.steps
        sizes = {"requests": given.requests, "steps": given.steps, "phase": given.phase}
        job.record(variant, result, **sizes)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
