"""A model in vLLM: texts equal to stock's on one rank, and the trained one's answers right.

200 questions of `weft demo`, greedy. On GPUs in float16; with --cpu on CPU ranks in float32. Each
rank is a data- and expert-parallel one of its own, and answers its part.
"""

from __future__ import annotations

import sys
from typing import Any

from asking import ON_CPU, arguments, begin, job_of, result_of
from job import chosen
from questions import Questions, add_arguments, ranks_and_variants
from variants import VARIANTS

from weft.cli.demo import CHECKPOINT


def main() -> int:
    """An engine for each variant and number of ranks; the first is what the others are held to."""
    parser = arguments(str(__doc__), str(CHECKPOINT), ["stock", "block", "exchange"])
    add_arguments(parser)
    given = parser.parse_args()
    questions, variants = Questions(given.model, given.questions), chosen(given.variants, VARIANTS)
    failed = 0
    for size, cases in ranks_and_variants(given.ranks or [1], variants, cpu=given.cpu):
        engine: dict[str, Any] = {"model": given.model, "dtype": "float16", "max_model_len": 256}
        engine |= {"max_num_seqs": 64, "max_num_batched_tokens": 512, "disable_log_stats": True}
        engine |= {"gpu_memory_utilization": 0.5, "enable_prefix_caching": False}
        engine |= {"enable_expert_parallel": True} if size > 1 else {}
        engine |= (ON_CPU if given.cpu else {}) | given.more
        job = job_of(given, engine, gpus=size)
        asked = {"engine": engine, "ranks": size, "timeout": given.seconds}
        asked |= {"prompts": questions.prompts}
        for variant in () if given.cpu else cases:  # whose ranks share these cores
            begin(job, variant, "answers", asked, f"{variant.name}-{size}")
        for variant in cases:
            name = f"{variant.name}-{size}"
            if job.out_of_time(name, 40):
                continue
            if given.cpu:
                begin(job, variant, "answers", asked, name)
            if found := result_of(job, variant, given.seconds, name):
                questions.record(job, variant, name, found[0], right=True)
        failed |= job.done()
    return failed


if __name__ == "__main__":
    sys.exit(main())
