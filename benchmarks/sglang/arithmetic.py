"""A trained model in SGLang: right answers, and texts equal to stock SGLang's on one GPU.

The checkpoint of `weft demo`, 200 of its questions, greedy. With --cpu it needs no GPU: SGLang's
own way then serves one rank, and weft any number.
"""

from __future__ import annotations

import json
import sys

from server import (
    OUT,
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

from weft.cli.demo import CHECKPOINT, Question, read_questions


def texts(address: str, questions: list[Question], together: int) -> list[str]:
    """Greedy answers, in the order of the questions, so many prompts in a request."""
    found: list[str] = []
    greedy = {"temperature": 0, "max_new_tokens": 64, "stop": ["\n"]}
    for start in range(0, len(questions), together):
        asked = [one.prompt for one in questions[start : start + together]]
        answers = post(address, "/generate", {"text": asked, "sampling_params": greedy})
        found += [one["text"] for one in answers]
    return found


def main() -> int:
    """One server for each variant and number of GPUs; the first is what the others are held to."""
    known = ["stock", "dispatcher", "no-overlap", "weft", "combine-fp8"]
    parser = arguments(str(__doc__), str(CHECKPOINT), known)
    parser.add_argument("--cpu", action="store_true", help="on CPU ranks, in float32")
    parser.add_argument("--ranks", type=int, nargs="+", help="(default: 1, 2, 4, as GPUs go)")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--together", type=int, default=50, help="prompts in a request")
    given = parser.parse_args()
    questions = read_questions(CHECKPOINT / "questions.jsonl")[: given.questions]
    ranks = given.ranks or [n for n in (1, 2, 4) if given.cpu or n <= given.gpus]
    first: list[str] | None = None
    end, failed = None, 0
    for size in ranks:
        given.gpus = size
        # SGLang has no kernel that rotates and stores heads of 32 in bf16, nor another way.
        flags = (*data_parallel(size), "--cuda-graph-max-bs", "64", "--dtype", "float16")
        flags += () if given.cpu else tuple(prefill_graphs(2048, served=True))
        job = job_of(given, *flags, dummy=False, cpu=given.cpu)
        end = job.end = end or job.end
        variants = [
            each
            for each in chosen(given.variants, VARIANTS)
            if not (given.cpu and not each.weft and size > 1)
        ]
        for variant in () if given.cpu else variants:  # whose ranks share these cores
            begin(job, variant, name=f"{variant.name}-{size}")
        for variant in variants:
            name = f"{variant.name}-{size}"
            if job.out_of_time(name, 40):
                continue
            said = None
            with server(job, variant, name=name) as address:
                said = texts(address, questions, given.together) if address else None
            if said is None:
                continue
            first = first or said
            right = sum(q.is_right(text) for q, text in zip(questions, said, strict=True))
            result = {
                "right": right / len(said),
                "equal": sum(a == b for a, b in zip(first, said, strict=True)) / len(said),
                "questions": len(said),
            }
            (OUT / f"arithmetic-{name}.json").write_text(json.dumps(said, indent=0))
            job.record(variant, result)
        failed |= job.done()
    return failed


if __name__ == "__main__":
    sys.exit(main())
