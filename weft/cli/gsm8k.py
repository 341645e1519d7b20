"""Questions in GSM8K's form: a JSONL file, prompts with worked examples, and grading.

A line has "question" and "answer"; the answer ends in `#### N`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from weft.errors import InvalidArgument

STOP = "Question:"  # a model that goes on after its answer writes the next question
_FINAL = "####"
# A minus behind a digit is a subtraction, as in 75-13.
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its worked answer, which ends in `#### N`."""

    question: str
    answer: str

    @property
    def prompt(self) -> str:
        """What stands before the answer."""
        return f"{STOP} {self.question}\nAnswer:"

    @property
    def worked(self) -> str:
        """The prompt with its answer, as an example for questions behind it."""
        return f"{self.prompt} {self.answer}\n\n"

    def is_right(self, text: str) -> bool:
        """Whether a generated text ends in this question's number."""
        return final_number(text) == final_number(self.answer)


def final_number(text: str) -> Decimal | None:
    """The last number behind the last `####`, or without one the last number; None for none.

    Only what stands before the next question counts. Thousands may have commas.
    """
    answer = text.partition(STOP)[0]
    marked = _NUMBER.findall(answer.rpartition(_FINAL)[2]) if _FINAL in answer else []
    numbers = marked or _NUMBER.findall(answer)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def prompts(questions: Sequence[Question], examples: Sequence[Question]) -> list[str]:
    """One prompt for each question, behind the same examples."""
    before = "".join(example.worked for example in examples)
    return [before + question.prompt for question in questions]


def read_questions(path: Path) -> list[Question]:
    """The questions of a file in GSM8K's form.

    Raises InvalidArgument for a file that cannot be read or has another form, naming its line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read questions from {path}: {error}") from error
    return [_question(path, at, line) for at, line in enumerate(lines, 1) if line.strip()]


def _question(path: Path, at: int, line: str) -> Question:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{path}:{at} is no JSON: {error}") from error
    known = fields if isinstance(fields, dict) else {}
    question, answer = known.get("question"), known.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise InvalidArgument(
            f'{path}:{at} is {line[:60]!r}; a line needs the texts "question" and "answer"'
        )
    _, mark, final = answer.rpartition(_FINAL)
    if not mark or _NUMBER.search(final) is None:
        raise InvalidArgument(f"{path}:{at}: the answer {answer[-40:]!r} does not end in #### N")
    return Question(question, answer)
