# SPDX-License-Identifier: Apache-2.0
"""The questions of `weft demo`, and the answers of each variant of an engine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from job import OUT, Job, Variant

from weft.cli.demo import CHECKPOINT, read_questions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for the number of questions and of ranks."""
    parser.add_argument("--ranks", type=int, nargs="+", help="(default: 1, 2, 4, up to the GPUs)")
    parser.add_argument("--questions", type=int, default=200)


def in_each_size(
    args: argparse.Namespace,
    variants: list[Variant],
    new_job: Callable[[int], Job],
    ask: Callable[[Job, list[Variant]], None],
    *,
    alone: bool,
) -> int:
    """Ask the variants on each number of ranks, within one command's time; return its exit status.

    With `alone`, stock runs on one rank only, and first: on CPUs an engine may lack an all-to-all.
    """
    stock = [each for each in variants if alone and not each.environment]
    cases = [(size, [v for v in variants if v not in stock or size == 1]) for size in args.ranks]
    if stock and 1 not in args.ranks:
        cases.insert(0, (1, stock))
    end, failed = None, 0
    for size, subset in cases:
        job = new_job(size)
        end = job.end = end or job.end
        ask(job, subset)
        failed |= job.done()
    return failed


class Questions:
    """Texts of each variant, compared with the first variant's.

    Only the trained model's answers are checked for correctness.
    """

    def __init__(self, model: str, count: int) -> None:
        self.trained = Path(model).resolve() == CHECKPOINT.resolve()
        self._asked = read_questions(CHECKPOINT / "questions.jsonl")[:count]
        self.prompts = [each.prompt for each in self._asked]
        self._first: list[str] | None = None

    def record(
        self, job: Job, variant: Variant, name: str, texts: list[str], *, right: bool
    ) -> None:
        """Save and compare the texts. With `right`, a wrong answer of the trained model fails."""
        self._first = self._first or texts
        pairs = zip(self._first, texts, strict=True)
        result: dict[str, float] = {"equal": sum(a == b for a, b in pairs) / len(texts)}
        if self.trained:
            pairs_ = zip(self._asked, texts, strict=True)
            correct = sum(question.is_correct(text) for question, text in pairs_)
            result = {"right": correct / len(texts), **result}
            if right and correct < len(texts):
                job.fail(f"{name}: {correct} of {len(texts)} answers are right")
        (OUT / f"arithmetic-{name}.json").write_text(json.dumps(texts, indent=0))
        job.record(variant, {**result, "questions": len(texts)})
