# SPDX-License-Identifier: Apache-2.0
"""A model in vLLM: texts equal to stock's on one rank, and the trained one's answers right.

200 questions of `weft demo`, greedy. On GPUs in float16; with --cpu on CPU ranks in float32. Each
rank is a data- and expert-parallel one of its own, and answers its part.
"""

from __future__ import annotations

import sys

from asking import arguments, in_engines, job_of, of_trained
from job import Job, Variant, chosen
from questions import Questions, add_arguments, in_each_size
from variants import VARIANTS

from weft.cli.demo import CHECKPOINT


def main() -> int:
    """An engine for each variant and number of ranks; the first is what the others are held to."""
    parser = arguments(str(__doc__), str(CHECKPOINT), ["stock", "block", "exchange"])
    add_arguments(parser)
    given = parser.parse_args()
    given.ranks = given.ranks or [1]
    questions = Questions(given.model, given.questions)

    def engine(ranks: int) -> dict[str, object]:
        return of_trained(given, ranks, max_model_len=256, disable_log_stats=True)

    def made(ranks: int) -> Job:
        return job_of(given, engine(ranks), gpus=ranks)

    def ask(job: Job, cases: list[Variant]) -> None:
        asked = {"engine": engine(job.gpus), "ranks": job.gpus, "timeout": given.seconds}
        asked |= {"prompts": questions.prompts}
        suffix = f"-{job.gpus}"
        for variant, name, found in in_engines(
            job, cases, "answers", lambda _: asked, suffix=suffix
        ):
            questions.record(job, variant, name, found[0], right=True)

    return in_each_size(given, chosen(given.variants, VARIANTS), made, ask, alone=given.cpu)


if __name__ == "__main__":
    sys.exit(main())
