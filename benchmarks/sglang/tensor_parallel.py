# SPDX-License-Identifier: Apache-2.0
"""Latency of one batch under tensor parallelism, with different all-reduces.

GLM-4.5-Air's shape in bf16, 256 tokens in and out, by sglang.benchmark.one_batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from job import OUT, Job, Variant, begin_command, in_turn, run, select_variants, tail
from server import NO_PREFILL_GRAPHS, arguments, environment, job_of
from variants import SUMS

HERE = Path(__file__).parent
KEPT = (
    "prefill_latency",
    "median_decode_latency",
    "median_decode_throughput",
    "total_latency",
    "overall_throughput",
)


def raw_of(job: Job, name: str) -> Path:
    """Return the output file of SGLang's own benchmark."""
    return OUT / f"{job.what}-{name}.jsonl"


def main() -> int:
    """Run each variant once."""
    parser = arguments(str(__doc__), "glm-4.5-air", ["stock", "weft", "flashinfer"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=256)
    args = parser.parse_args()
    most = str(max(args.batches))
    flags = ("--tp", str(args.gpus), "--cuda-graph-max-bs-decode", most, NO_PREFILL_GRAPHS)
    job = job_of(args, *flags)

    def start(job: Job, variant: Variant, name: str) -> None:
        raw_of(job, name).unlink(missing_ok=True)
        command = [sys.executable, str(HERE / "one_batch.py"), *job.flags, *variant.flags]
        command += ["--batch-size", *map(str, args.batches), "--input-len", str(args.input)]
        command += ["--output-len", str(args.output), "--run-name", name]
        command += ["--result-filename", str(raw_of(job, name))]
        begin_command(job, name, command, environment(job, variant))

    for variant, name in in_turn(job, select_variants(args.variants, SUMS), start, needs=60):
        raw, done = raw_of(job, name), run(job, name, [], 400)
        if done and not job.check_log(name, variant.startup_text):
            continue
        lines = raw.read_text().splitlines() if raw.exists() else []
        if done and len(lines) < len(args.batches):  # its exit status does not reflect the ranks'
            few = f"{len(lines)} of {len(args.batches)} batches"
            job.fail(f"{name}: {few}, end of its log:\n{tail(job.log(name))}")
        for line in lines:
            measured = json.loads(line)
            result = {key: measured[key] for key in KEPT if key in measured}
            sizes = {"input": args.input, "output": args.output}
            job.record(variant, result, batch=measured["batch_size"], layers=args.layers, **sizes)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
