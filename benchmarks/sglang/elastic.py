# SPDX-License-Identifier: Apache-2.0
"""Kill ranks of a SGLang server with --elastic-ep-backend weft while it answers.

It uses the trained model of `weft demo` and its questions, greedily, one per request. Stock SGLang
on one rank gives the expected texts. Then ranks with a replica of every expert answer all questions
in several rounds. In every second round, a rank is killed after a third of the answers. The next
round begins when a new process has replaced it, and must use that rank again. Requests that fail
with 503 are repeated. With --fail, new processes are killed while they load.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import sys
import threading
import time
import urllib.error
from dataclasses import dataclass, field
from typing import Any

from arithmetic import GREEDY, texts
from job import Variant, in_servers, post, select_variants, tail
from load import API
from server import arguments, begin, of_trained
from variants import ELASTIC, VARIANTS

from weft.cli.demo import CHECKPOINT, Question, read_questions

TRIES = 5  # attempts per question
LONGEST = 120.0  # timeout of an answer in seconds
HEALING = 900.0  # timeout of a replacement in seconds
LOADING = 5.0  # seconds until a replacement that is to fail is killed
STARTED = re.compile(r"process (\d+) will replace it")
PAUSED = re.compile(r"has been replaced; serving paused for (\d+) ms")


@dataclass
class Round:
    """One pass over all questions by several clients, in which a rank may be killed."""

    address: str
    questions: list[Question]
    kill: int | None = None
    answers: dict[int, str] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)  # number of answers by rank
    refusals: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    killed: float | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, clients: int) -> dict[str, Any]:
        """Ask all questions, and return the results."""
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            for each in [pool.submit(self.ask, i) for i in range(len(self.questions))]:
                each.result()
        right = sum(q.is_correct(self.answers.get(i, "")) for i, q in enumerate(self.questions))
        result: dict[str, Any] = {
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
            result |= {
                "killed": self.kill,
                "answers_after": len(after),
                "first_answer_after_s": round(after[0], 3) if after else None,
                "longest_wait_after_s": round(max(gaps), 3) if gaps else None,
            }
        return result

    def ask(self, index: int) -> None:
        """Ask one question until it is answered."""
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
        """Record an answer; after a third of them, kill the rank."""
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
    """Return a scheduler's process, by the rank in its title."""
    return next(p for title, p in API.ranks().items() if f"_TP{rank}_" in f"{title}_")


def main() -> int:
    """Run the two servers."""
    parser = arguments(str(__doc__), str(CHECKPOINT), ["elastic"])
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kill", type=int, nargs="+", help="ranks, one a round; default: the last")
    parser.add_argument("--fail", type=int, default=0, help="replacements of a rank to kill")
    args = parser.parse_args()
    args.kill = args.kill or [args.ranks - 1]
    questions = read_questions(CHECKPOINT / "questions.jsonl")[: args.questions]
    expected: list[str] = []

    def alone(variant: Variant, name: str, address: str) -> None:
        expected.extend(texts(address, [each.prompt for each in questions], 50))

    one = of_trained(args, 1)
    in_servers(one, [VARIANTS["stock"]], begin, alone, suffix="-1")
    if one.failed:
        return one.done()
    job = of_trained(args, args.ranks)

    def ask(variant: Variant, name: str, address: str, kill: int | None) -> Round:
        round_ = Round(address, questions, kill)
        result = round_.run(args.clients)
        result["equal"] = sum(round_.answers.get(i) == text for i, text in enumerate(expected))
        job.record(variant, result, clients=args.clients)
        if result["equal"] != len(questions) or (kill is not None and not round_.killed):
            job.fail(f"{name}, round of {kill}: {result}")
        return round_

    def measure(variant: Variant, name: str, address: str) -> None:
        ask(variant, name, address, None)
        for count, kill in enumerate(args.kill, 1):
            killed = ask(variant, name, address, kill).killed
            text, log, failed = "has been replaced; serving paused", job.log(name), 0
            end = time.monotonic() + job.left(HEALING)
            while (lines := log.read_text(errors="replace")).count(text) < count * (args.ranks - 1):
                started = STARTED.findall(lines)[(count - 1) * (args.fail + 1) :]
                if failed < min(args.fail, len(started)):
                    time.sleep(LOADING)
                    os.kill(int(started[failed]), signal.SIGKILL)
                    failed += 1
                if time.monotonic() > end:
                    job.fail(f"{name}: rank {kill} was not replaced; end of {log}:\n{tail(log)}")
                    return
                time.sleep(0.1)
            if killed is not None:
                paused = [int(ms) for ms in PAUSED.findall(log.read_text(errors="replace"))]
                healed: dict[str, Any] = {"replaced": kill, "killed_while_loading": failed}
                healed["back_after_s"] = round(time.monotonic() - killed, 1)
                healed["paused_ms"] = max(paused[-(args.ranks - 1) :])
                job.record(variant, healed, clients=args.clients)
            served = ask(variant, name, address, None).ranks.get(kill, 0)
            if not served:
                job.fail(f"{name}: rank {kill} has answered nothing after its replacement")
        log_lines = job.log(name).read_text(errors="replace").splitlines()
        found = [x for x in log_lines if "ranks continue after" in x or "has been replaced" in x]
        print("\n".join(found), flush=True)
        for kill in args.kill:
            job.check_log(name, f"rank {kill} has died; ")

    in_servers(job, select_variants(args.variants, ELASTIC), begin, measure)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
