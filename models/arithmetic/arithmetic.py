# SPDX-License-Identifier: Apache-2.0
"""Three-number arithmetic in GSM8K's form: tiny models learn it, and one wrong row spoils it.

    Question: 48+27-13=
    Answer: 48+27=75. 75-13=62. #### 62

No intermediate result is negative. Whether a question is held out follows from a hash of its text,
so no training stream contains one, whatever its seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from weft.cli.demo import Question

LARGEST = 99  # of the three numbers; the smallest is 1
HELD_OUT = 1 / 32  # this part of all questions is kept from training


def is_held_out(question: str) -> bool:
    """Whether training never sees this question."""
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32


def questions(seed: int, *, held_out: bool) -> Iterator[Question]:
    """An endless stream of questions for training, or of those held out of it."""
    draw = random.Random(seed)
    while True:
        question = _question(draw)
        if is_held_out(question.question) == held_out:
            yield question


def _question(draw: random.Random) -> Question:
    so_far = draw.randint(1, LARGEST)
    text, worked = str(so_far), ""
    for _ in range(2):
        number = draw.randint(1, LARGEST)
        sign = draw.choice("+-") if so_far >= number else "+"
        result = so_far + number if sign == "+" else so_far - number
        worked += f"{so_far}{sign}{number}={result}. "
        text, so_far = f"{text}{sign}{number}", result
    return Question(f"{text}=", f"{worked}#### {so_far}")
