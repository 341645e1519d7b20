"""Where the GPU's time goes in a decode step: torch's trace of a few steps, by kernel.

The result holds microseconds a step on rank 0, and `profile_picture.py` draws them.
"""

from __future__ import annotations

import concurrent.futures
import gzip
import json
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from server import OUT, Job, arguments, chosen, data_parallel, job_of, post, server
from variants import VARIANTS

MANY = 40  # kernels that are listed one by one; the rest is one number


def kernels(trace: Path) -> Counter[str]:
    """Microseconds of each kernel in a trace."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    found: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found[event["name"]] += event["dur"]
    return found


def spread(folder: Path) -> list[Path]:
    """The traces of a run, rank 0's first."""
    return sorted(folder.glob("**/*.trace.json.gz"))


def traced(job: Job, address: str, folder: Path, requests: int, steps: int) -> list[Path]:
    """Ask for long answers, and trace some steps while all of them are being written.

    Short ones are asked for before: the first prefill of a size compiles its kernels.
    """

    def ask(pool: concurrent.futures.Executor, tokens: int) -> list[Any]:
        body = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        prompts = [[3 + (7 * i + j) % 200 for j in range(64)] for i in range(requests)]
        asked = [{"input_ids": ids, "sampling_params": body} for ids in prompts]
        return [pool.submit(post, address, "/generate", one) for one in asked]

    with concurrent.futures.ThreadPoolExecutor(requests) as pool:
        for each in ask(pool, 4):
            each.result(timeout=job.left(200))
        running = ask(pool, 512)
        time.sleep(2.0)  # prefill, and the first steps
        about = {"output_dir": str(folder), "num_steps": steps, "activities": ["GPU"]}
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
    given = parser.parse_args()
    job = job_of(
        given,
        *data_parallel(given.gpus),
        *("--cuda-graph-max-bs", str(given.requests)),
    )
    for variant in chosen(given.variants, VARIANTS):
        if job.out_of_time(variant.name, 150):
            continue
        folder = OUT / f"trace-{variant.name}"
        shutil.rmtree(folder, ignore_errors=True)
        traces: list[Path] = []
        with server(job, variant) as address:
            if address is not None:
                traces = traced(job, address, folder, given.requests * given.gpus, given.steps)
        if not traces:
            job.fail(f"{variant.name}: no trace in {folder}")
            continue
        times = kernels(traces[0])
        top: dict[str, Any] = {
            name: us / given.steps for name, us in times.most_common(MANY) if us > 0
        }
        rest = sum(times.values()) / given.steps - sum(top.values())
        (OUT / f"kernels-{variant.name}.json").write_text(json.dumps(top, indent=1))
        result = {"us": sum(times.values()) / given.steps, "rest": rest, "kernels": top}
        job.record(variant, result, requests=given.requests, steps=given.steps)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
