# SPDX-License-Identifier: Apache-2.0
"""A server of SGLang that loses ranks while it answers, and goes on: --elastic-ep-backend weft.

The trained model of `weft demo`, its questions, greedy, each a request of its own. Stock SGLang on
one rank gives the texts. Then ranks with a replica of every expert answer all questions, in one
round after another, and in each but the first a rank is killed once a third is answered. A request
that fails in words (503) is asked again.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import sys
import threading
import time
import urllib.error
from dataclasses import dataclass, field
from typing import Any

from arithmetic import GREEDY, texts
from job import Variant, chosen, in_servers, post
from load import API
from server import arguments, begin, of_trained
from variants import ELASTIC, VARIANTS

from weft.cli.demo import CHECKPOINT, Question, read_questions

TRIES = 5  # of a question whose rank has died
LONGEST = 120.0  # seconds that an answer may take


@dataclass
class Round:
    """All questions once, by so many clients, while ranks are killed or not."""

    address: str
    questions: list[Question]
    kill: int | None = None
    answers: dict[int, str] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)  # answers by the rank that gave them
    refusals: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    killed: float | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, clients: int) -> dict[str, Any]:
        """What came of it."""
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            for each in [pool.submit(self.ask, i) for i in range(len(self.questions))]:
                each.result()
        right = sum(q.is_right(self.answers.get(i, "")) for i, q in enumerate(self.questions))
        found: dict[str, Any] = {
            "questions": len(self.questions),
            "answered": len(self.answers),
            "right": right,
            "asked_again": len(self.refusals),
            "refusals": sorted(set(self.refusals)),
            "lost": self.lost[:3],
            "by_rank": dict(sorted(self.ranks.items())),
        }
        if self.killed is not None:
            after = sorted(end - self.killed for end in self.ends if end > self.killed)
            gaps = [b - a for a, b in zip([0.0, *after], after, strict=False)]
            found |= {
                "killed": self.kill,
                "answers_after": len(after),
                "first_answer_after_s": round(after[0], 3) if after else None,
                "longest_wait_after_s": round(max(gaps), 3) if gaps else None,
            }
        return found

    def ask(self, index: int) -> None:
        """One question, until it is answered."""
        body = {"text": self.questions[index].prompt, "sampling_params": GREEDY}
        for _ in range(TRIES):
            try:
                answer = post(self.address, "/generate", body, timeout=LONGEST)
            except urllib.error.HTTPError as error:
                text = error.read().decode(errors="replace")
                with self.lock:
                    self.refusals.append(f"{error.code}: {text}")
                continue
            except OSError as error:
                with self.lock:
                    self.lost.append(f"{type(error).__name__}: {error}")
                return
            self.note(index, answer)
            return
        with self.lock:
            self.lost.append(f"refused {TRIES} times")

    def note(self, index: int, answer: dict[str, Any]) -> None:
        """An answer has come; a third of them, and a rank is killed."""
        with self.lock:
            self.answers[index] = answer["text"]
            rank = answer["meta_info"].get("dp_rank")
            self.ranks[rank] = self.ranks.get(rank, 0) + 1
            self.ends.append(time.monotonic())
            if self.kill is None or self.killed is not None:
                return
            if 3 * len(self.answers) >= len(self.questions):
                process = process_of(self.kill)
                self.killed = time.monotonic()
                os.kill(process, signal.SIGKILL)


def process_of(rank: int) -> int:
    """Of a scheduler, by the rank in its title."""
    return next(p for title, p in API.ranks().items() if f"_TP{rank}_" in f"{title}_")


def main() -> int:
    """Two servers."""
    parser = arguments(str(__doc__), str(CHECKPOINT), ["elastic"])
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kill", type=int, nargs="+", default=[3], help="ranks, one a round")
    given = parser.parse_args()
    questions = read_questions(CHECKPOINT / "questions.jsonl")[: given.questions]
    want: list[str] = []

    def alone(variant: Variant, name: str, address: str) -> None:
        want.extend(texts(address, [each.prompt for each in questions], 50))

    one = of_trained(given, 1)
    in_servers(one, [VARIANTS["stock"]], begin, alone, suffix="-1")
    if one.failed:
        return one.done()
    job = of_trained(given, given.ranks)

    def measure(variant: Variant, name: str, address: str) -> None:
        for kill in (None, *given.kill):
            this = Round(address, questions, kill)
            result = this.run(given.clients)
            result["equal"] = sum(this.answers.get(i) == text for i, text in enumerate(want))
            job.record(variant, result, clients=given.clients)
            if result["equal"] != len(questions) or (kill is not None and not this.killed):
                job.fail(f"{name}, round of {kill}: {result}")
        lines = job.log(name).read_text(errors="replace").splitlines()
        print("\n".join(line for line in lines if "ranks go on after" in line), flush=True)
        for kill in given.kill:
            job.heard(name, f"rank {kill} has died; ")

    in_servers(job, chosen(given.variants, ELASTIC), begin, measure)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
