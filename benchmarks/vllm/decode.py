# SPDX-License-Identifier: Apache-2.0
"""Time between tokens on one GPU with random weights, and a decode step by kernel.

decode: Qwen3-30B-A3B's shape in bf16. deepseek: DeepSeek-V3's, block FP8. Requests have 128 tokens
in and 256 out, at several levels of concurrency; a warm-up wave precedes each level. profile:
torch's trace of some steps of either model.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from asking import arguments, in_engines, job_of, random_model
from job import OUT, Job, Variant, select_variants
from trace_kernels import kernels, summed
from variants import VARIANTS

STEP, DECODE = "execute_context_", "execute_context_0("  # annotations of passes in vLLM's traces
DEFAULTS = {
    "decode": ("qwen3-30b-a3b", ["stock", "block"]),
    "deepseek": ("deepseek-v3", ["stock", "block", "deep_gemm"]),
    "profile": ("qwen3-30b-a3b", ["stock", "block"]),
}


def time_between_tokens(job: Job, args: argparse.Namespace, engine: Any, layers: Any) -> None:
    """Measure every level of load on each variant's engine."""
    request = {"engine": engine, "requests": args.requests, "waves": args.waves}
    request |= {"input": args.input, "output": args.output}
    variants = select_variants(args.variants, VARIANTS)
    for each, name, lines in in_engines(job, variants, "decode", lambda variant: request):
        if len(lines) < len(args.requests):
            job.fail(f"{name}: {len(lines)} of {len(args.requests)} levels")
        for line in lines:
            requests = line.pop("requests")
            if line["completed"] != requests * args.waves:
                expected = requests * args.waves
                job.fail(f"{name}-{requests}: {line['completed']} of {expected} requests")
            sizes = {"requests": requests, "input": args.input, "output": args.output}
            job.record(each, line, layers=layers, memory=args.memory, **sizes)


def by_kernel(job: Job, args: argparse.Namespace, engine: Any, layers: Any) -> None:
    """Record a trace of each variant at the last level."""
    requests = args.requests[-1]

    def request(variant: Variant) -> dict[str, Any]:
        profiler = {"profiler": "torch", "torch_profiler_dir": str(OUT / f"trace-{variant.name}")}
        profiler |= {"torch_profiler_with_stack": False, "ignore_frontend": True}
        profiler |= {"max_iterations": args.steps}
        sizes = {"requests": requests, "input": args.input, "output": args.output}
        return {"engine": engine | {"profiler_config": profiler}, **sizes}

    for each, name, _ in in_engines(
        job, select_variants(args.variants, VARIANTS), "profile", request
    ):
        traces = sorted((OUT / f"trace-{name}").glob("**/*.trace.json.gz"))
        if len(traces) != 1:
            job.fail(f"{name}: {len(traces)} traces, expected one")
            continue
        trace = kernels(traces[0])
        steps = sum(count for name, count in trace.steps.items() if name.startswith(DECODE))
        if not steps or steps != sum(n for name, n in trace.steps.items() if name.startswith(STEP)):
            job.fail(f"{name}: its trace has other passes than decode: {dict(trace.steps)}")
            continue
        sizes = {"requests": requests, "steps": steps, "phase": "decode"}
        job.record(each, summed(trace, steps), layers=layers, **sizes)


def main() -> int:
    """Run one engine per variant, one after another."""
    what = sys.argv[1]
    model, variants = DEFAULTS[what]
    parser = arguments(str(__doc__), model, variants)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--waves", type=int, default=2, help="timed waves")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--steps", type=int, default=16, help="traced steps")
    args = parser.parse_args()
    engine, layers = random_model(args)
    most = max(args.requests)
    sizes = sorted({size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size < most} | {most})
    engine |= {"max_model_len": args.input + args.output, "max_num_seqs": most}
    engine |= {"max_num_batched_tokens": 2048}
    engine |= {} if args.cpu else {"cudagraph_capture_sizes": sizes}
    job = job_of(args, engine, gpus=engine.get("data_parallel_size", 1))
    (by_kernel if what == "profile" else time_between_tokens)(job, args, engine, layers)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
