# SPDX-License-Identifier: Apache-2.0
"""Time between tokens of one GPU, with random weights, and a decode step by kernel.

decode: Qwen3-30B-A3B's shape in bf16. deepseek: DeepSeek-V3's, block FP8. So many requests at once,
128 tokens in and 256 out, after a wave that warms up. profile: torch's trace of some steps, of
either model.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from asking import arguments, in_engines, job_of, random_model
from job import OUT, Job, Variant, chosen
from trace_kernels import kernels, summed
from variants import VARIANTS

STEP, DECODE = "execute_context_", "execute_context_0("  # how vLLM's traces mark a pass
DEFAULTS = {
    "decode": ("qwen3-30b-a3b", ["stock", "block"]),
    "deepseek": ("deepseek-v3", ["stock", "block", "deep_gemm"]),
    "profile": ("qwen3-30b-a3b", ["stock", "block"]),
}


def time_between_tokens(job: Job, given: argparse.Namespace, engine: Any, layers: Any) -> None:
    """Every level of load on each variant's engine."""
    asked = {"engine": engine, "requests": given.requests, "waves": given.waves}
    asked |= {"input": given.input, "output": given.output}
    variants = chosen(given.variants, VARIANTS)
    for each, name, lines in in_engines(job, variants, "decode", lambda variant: asked):
        if len(lines) < len(given.requests):
            job.fail(f"{name}: {len(lines)} of {len(given.requests)} levels")
        for line in lines:
            requests = line.pop("requests")
            if line["completed"] != requests * given.waves:
                many = requests * given.waves
                job.fail(f"{name}-{requests}: {line['completed']} of {many} requests")
            sizes = {"requests": requests, "input": given.input, "output": given.output}
            job.record(each, line, layers=layers, memory=given.memory, **sizes)


def by_kernel(job: Job, given: argparse.Namespace, engine: Any, layers: Any) -> None:
    """A trace of each variant at the last level."""
    requests = given.requests[-1]

    def asked(variant: Variant) -> dict[str, Any]:
        profiler = {"profiler": "torch", "torch_profiler_dir": str(OUT / f"trace-{variant.name}")}
        profiler |= {"torch_profiler_with_stack": False, "ignore_frontend": True}
        profiler |= {"max_iterations": given.steps}
        sizes = {"requests": requests, "input": given.input, "output": given.output}
        return {"engine": engine | {"profiler_config": profiler}, **sizes}

    for each, name, _ in in_engines(job, chosen(given.variants, VARIANTS), "profile", asked):
        traces = sorted((OUT / f"trace-{name}").glob("**/*.trace.json.gz"))
        if len(traces) != 1:
            job.fail(f"{name}: {len(traces)} traces, wanted is one")
            continue
        found = kernels(traces[0])
        steps = sum(count for name, count in found.steps.items() if name.startswith(DECODE))
        if not steps or steps != sum(n for name, n in found.steps.items() if name.startswith(STEP)):
            job.fail(f"{name}: its trace is not of decode alone: {dict(found.steps)}")
            continue
        sizes = {"requests": requests, "steps": steps, "phase": "decode"}
        job.record(each, summed(found, steps), layers=layers, **sizes)


def main() -> int:
    """One engine for each variant, one after the other."""
    what = sys.argv[1]
    model, variants = DEFAULTS[what]
    parser = arguments(str(__doc__), model, variants)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--waves", type=int, default=2, help="waves that count")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--steps", type=int, default=16, help="that are traced")
    given = parser.parse_args()
    engine, layers = random_model(given)
    most = max(given.requests)
    sizes = sorted({size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size < most} | {most})
    engine |= {"max_model_len": given.input + given.output, "max_num_seqs": most}
    engine |= {"max_num_batched_tokens": 2048}
    engine |= {} if given.cpu else {"cudagraph_capture_sizes": sizes}
    job = job_of(given, engine, gpus=engine.get("data_parallel_size", 1))
    (by_kernel if what == "profile" else time_between_tokens)(job, given, engine, layers)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
