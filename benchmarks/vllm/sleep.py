# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake of a server: texts after every wake, and memory of the GPUs while asleep.

It asks 200 questions of `weft demo`, puts the server to sleep, wakes it and asks again, several
times at level 1 and once at level 2, after which the weights are loaded again. Every text must
equal the first one.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

from asking import arguments, begin_server, job_of, of_trained
from job import Job, Variant, in_servers, post, select_variants
from under_load import gpu_mib
from variants import VARIANTS

from weft.cli.demo import CHECKPOINT, read_questions


def ask(address: str, prompts: list[str]) -> list[str]:
    """Return the greedy texts of prompts."""
    body = {"prompt": prompts, "max_tokens": 64, "temperature": 0, "stop": ["\n"]}
    choices = post(address, "/v1/completions", body)["choices"]
    return [each["text"] for each in sorted(choices, key=lambda each: each["index"])]


def sleep_and_wake(address: str, level: int) -> dict[str, Any]:
    """Run one cycle; return its times in seconds, and the memory of the GPUs while asleep."""
    start = time.monotonic()
    post(address, f"/sleep?level={level}", {})
    asleep = time.monotonic()
    memory = gpu_mib()
    woken = time.monotonic()
    if level == 2:  # the weights have no values
        post(address, "/wake_up?tags=weights", {})
        post(address, "/collective_rpc", {"method": "reload_weights"})
        post(address, "/wake_up?tags=kv_cache", {})
    else:
        post(address, "/wake_up", {})
    times = {"sleep_s": asleep - start, "wake_s": time.monotonic() - woken}
    return {"level": level, "gpu_mib_asleep": memory, **times}


def measure(
    job: Job, cycles: int, prompts: list[str], variant: Variant, name: str, address: str
) -> None:
    """Compare the texts after every wake with the first ones."""
    first = ask(address, prompts)
    awake, results = gpu_mib(), []
    for level in [1] * cycles + [2]:
        result = sleep_and_wake(address, level)
        texts = ask(address, prompts)
        result["equal"] = sum(a == b for a, b in zip(first, texts, strict=True))
        if result["equal"] < len(prompts):
            job.fail(f"{name}: {result['equal']} of {len(prompts)} texts are equal: {result}")
        results.append(result)
        print(result, flush=True)
    result = {"gpu_mib_awake": awake, "gpu_mib_woken": gpu_mib(), "cycles": results}
    job.record(variant, result, questions=len(prompts))


def main() -> int:
    """Run one server per variant."""
    parser = arguments(str(__doc__), str(CHECKPOINT), ["block"])
    parser.add_argument("--ranks", type=int, default=1, help="data- and expert-parallel ones")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--cycles", type=int, default=5, help="at level 1")
    args = parser.parse_args()
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # /sleep, /wake_up and /collective_rpc
    questions = read_questions(CHECKPOINT / "questions.jsonl")[: args.questions]
    more = {"data_parallel_size": args.ranks, "enable_sleep_mode": True}
    engine = of_trained(args, args.ranks, max_model_len=256, **more)
    job = job_of(args, engine, gpus=args.ranks)
    run = functools.partial(measure, job, args.cycles, [each.prompt for each in questions])
    start = functools.partial(begin_server, engine)
    in_servers(job, select_variants(args.variants, VARIANTS), start, run)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
