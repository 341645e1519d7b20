# SPDX-License-Identifier: Apache-2.0
"""Check a model in vLLM: texts equal stock vLLM's on one rank, and the trained model is right.

It asks 200 questions of `weft demo`, greedily, on GPUs in float16, or with --cpu on CPU ranks in
float32. Each rank is data- and expert-parallel, and answers its part.
"""

from __future__ import annotations

import sys

from asking import arguments, in_engines, job_of, of_trained
from job import Job, Variant, select_variants
from questions import Questions, add_arguments, in_each_size
from variants import VARIANTS

from weft.cli.demo import CHECKPOINT


def main() -> int:
    """Run one engine per variant and number of ranks; the first is the baseline."""
    parser = arguments(str(__doc__), str(CHECKPOINT), ["stock", "block", "exchange"])
    add_arguments(parser)
    args = parser.parse_args()
    args.ranks = args.ranks or [1]
    questions = Questions(args.model, args.questions)

    def engine(ranks: int) -> dict[str, object]:
        return of_trained(args, ranks, max_model_len=256, disable_log_stats=True)

    def new_job(ranks: int) -> Job:
        return job_of(args, engine(ranks), gpus=ranks)

    def ask(job: Job, cases: list[Variant]) -> None:
        request = {"engine": engine(job.gpus), "ranks": job.gpus, "timeout": args.seconds}
        request |= {"prompts": questions.prompts, "shares_gpu": job.shares_gpu}
        suffix = f"-{job.gpus}"
        for variant, name, lines in in_engines(
            job, cases, "answers", lambda _: request, suffix=suffix
        ):
            questions.record(job, variant, name, lines[0], right=True)

    return in_each_size(
        args, select_variants(args.variants, VARIANTS), new_job, ask, alone=args.cpu
    )


if __name__ == "__main__":
    sys.exit(main())
