"""A trained model in vLLM: right answers, and texts equal to stock's on one rank.

The checkpoint of `weft demo`, 200 of its questions, greedy. On GPUs in float16; with --cpu on CPU
ranks in float32. Each rank is a data- and expert-parallel one of its own, and answers its part.
vLLM's own exchange does not run on CPU ranks, so `stock` has one there.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from asking import ON_CPU, arguments, begin, job_of, result_of
from job import OUT, chosen
from variants import VARIANTS

from weft.cli.demo import CHECKPOINT, read_questions


def main() -> int:
    """An engine for each variant and number of ranks; the first is what the others are held to."""
    parser = arguments(str(__doc__), str(CHECKPOINT), ["stock", "block", "exchange"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--questions", type=int, default=200)
    given = parser.parse_args()
    questions = read_questions(CHECKPOINT / "questions.jsonl")[: given.questions]
    first: list[str] | None = None
    failed, left = 0, given.seconds
    for size in given.ranks:
        engine: dict[str, Any] = {"model": given.model, "dtype": "float16", "max_model_len": 256}
        engine |= {"max_num_seqs": 64, "max_num_batched_tokens": 512, "disable_log_stats": True}
        engine |= {"gpu_memory_utilization": 0.5, "enable_prefix_caching": False}
        engine |= {"enable_expert_parallel": True} if size > 1 else {}
        engine |= (ON_CPU if given.cpu else {}) | given.more
        job = job_of(given, engine, gpus=size)
        asked = {"engine": engine, "ranks": size, "timeout": left}
        asked |= {"prompts": [each.prompt for each in questions]}
        variants = [
            each
            for each in chosen(given.variants, VARIANTS)
            if not (given.cpu and size > 1 and not each.environment)
        ]
        for variant in () if given.cpu else variants:  # whose ranks share these cores
            begin(job, variant, "answers", asked, f"{variant.name}-{size}")
        for variant in variants:
            name = f"{variant.name}-{size}"
            if job.out_of_time(name, 40):
                continue
            if given.cpu:
                begin(job, variant, "answers", asked, name)
            found = result_of(job, variant, given.seconds, name)
            if not found:
                continue
            texts: list[str] = found[0]
            first = first or texts
            right = sum(q.is_right(text) for q, text in zip(questions, texts, strict=True))
            result = {
                "right": right / len(texts),
                "equal": sum(a == b for a, b in zip(first, texts, strict=True)) / len(texts),
                "questions": len(texts),
            }
            (OUT / f"arithmetic-{name}.json").write_text(json.dumps(texts, indent=0))
            job.record(variant, result)
            if right < len(texts):
                job.fail(f"{name}: {right} of {len(texts)} answers are right")
        failed |= job.done()
    return failed


if __name__ == "__main__":
    sys.exit(main())
