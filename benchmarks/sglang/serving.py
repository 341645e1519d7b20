# SPDX-License-Identifier: Apache-2.0
"""Time between tokens of a server with data-parallel attention and expert parallelism.

decode: Qwen3-30B-A3B's shape in bf16. deepseek: DeepSeek-V3's, block FP8, few layers. Requests have
1024 tokens in and 128 out, at several levels of concurrency per rank; a warm-up run precedes each
level. step_ms is a decode step from the server's log (README.md, Steps). It is missing for short
answers, where no log line follows the prefill's.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from statistics import median
from typing import Any

from job import OUT, Job, Variant, in_servers, last_line, run, select_variants
from server import arguments, begin, of_data_parallel
from variants import VARIANTS

DEFAULTS = {
    "decode": ("qwen3-30b-a3b", [8, 64], ["stock", "weft", "dispatcher"]),
    "deepseek": ("deepseek-v3", [32, 128], ["stock", "weft", "dispatcher", "no-overlap"]),
}
KEPT = (
    "completed",
    "median_itl_ms",
    "p99_itl_ms",
    "mean_itl_ms",
    "median_tpot_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "output_throughput",
    "total_throughput",
    "duration",
)
# [date time DP0 TP0 EP0] Decode batch, #running-req: 8, ..., gen throughput (token/s): 1144.0, ...
BATCH = re.compile(
    r"\[\S+ [^ \]]+([^\]]*)\] (?:(Prefill) batch|"
    r"Decode batch, #running-req: (\d+),.*gen throughput \(token/s\): ([\d.]+))"
)


def decode_steps(log: str, requests: int) -> list[float]:
    """Return the ms of decode steps of a full batch, a mean per log line of a rank.

    A line counts the tokens since the rank's previous line, so lines after a prefill are skipped.
    """
    steps, prefilled = [], set()
    for match in filter(None, map(BATCH.match, log.splitlines())):
        rank, prefill, running, rate = match.groups()
        if prefill:
            prefilled.add(rank)
        elif rank in prefilled:
            prefilled.remove(rank)
        elif int(running) == requests:
            steps.append(1e3 * requests / float(rate))
    return steps


def measure(
    job: Job, args: argparse.Namespace, variant: Variant, server: str, address: str
) -> None:
    """Measure every level of load."""
    for each in args.requests:
        at_once = each * job.gpus
        name = f"{server}-{each}"
        if job.out_of_time(f"{name} of {job.what}", 45):
            return
        for part, waves in (("warm", 1), ("timed", args.waves)):
            raw = OUT / f"{job.what}-{name}-{part}.jsonl"
            raw.unlink(missing_ok=True)
            command = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"]
            command += ["--base-url", address, "--model", str(job.model), "--seed", "1"]
            command += ["--tokenizer", str(job.model), "--dataset-name", "random-ids"]
            command += ["--random-input-len", str(args.input), "--random-range-ratio", "1"]
            command += ["--random-output-len", str(args.output), "--disable-tqdm"]
            command += ["--tokenize-prompt"]  # as text, most ids would be several tokens
            command += ["--num-prompts", str(at_once * waves), "--max-concurrency", str(at_once)]
            logged = job.log(server).stat().st_size
            if not run(job, name, [*command, "--output-file", str(raw)], 200):
                return
        totals = last_line(raw)
        result: dict[str, Any] = {key: totals[key] for key in KEPT if key in totals}
        log = job.log(server).read_bytes()[logged:].decode(errors="replace")
        if steps := decode_steps(log, each):
            result["step_ms"] = median(steps)
        if totals["completed"] != at_once * args.waves:
            job.fail(f"{name}: {totals['completed']} of {at_once * args.waves} requests were done")
        sizes = {"requests": each, "input": args.input, "output": args.output}
        job.record(variant, result, layers=args.layers, memory=args.memory, **sizes)


def main() -> int:
    """Run one server per variant."""
    what = sys.argv[1]
    model, requests, variants = DEFAULTS[what]
    parser = arguments(str(__doc__), model, variants)
    parser.add_argument("--requests", type=int, nargs="+", default=requests, help="per rank")
    parser.add_argument("--waves", type=int, default=3, help="total requests / concurrency")
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=128)
    args = parser.parse_args()
    job = of_data_parallel(args, max(args.requests), graphs=what == "decode")
    each = functools.partial(measure, job, args)
    in_servers(job, select_variants(args.variants, VARIANTS), begin, each)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
