# SPDX-License-Identifier: Apache-2.0
"""One engine of vLLM in a process of its own: answers, time between tokens, or a trace of decode.

    engine.py answers|decode|profile ASKED.json RESULT.json

This folder's other scripts start it, in a variant's environment. It imports first, and then waits
for its turn, the file SERVER_GATE, before it touches a GPU. Tokens come from vLLM's own
asynchronous engine, without HTTP and without text.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from queue import Empty
from statistics import mean, median, quantiles
from typing import Any

Asked = dict[str, Any]
FIRST, LAST = 3, 259  # ids of bytes in the vocabulary of our tokenizers


def wait_for_turn() -> None:
    """Return when the file that SERVER_GATE names is there."""
    gate = os.environ.get("SERVER_GATE")
    while gate and not Path(gate).exists():
        time.sleep(0.1)


@asynccontextmanager
async def engine(arguments: dict[str, Any]) -> AsyncIterator[Any]:
    """vLLM's asynchronous engine; its core is another process."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    wait_for_turn()
    found = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        yield found
    finally:
        found.shutdown()


class Started:
    """Set once all of so many requests are being answered."""

    def __init__(self, requests: int) -> None:
        self.missing, self.all = requests, asyncio.Event()

    def one(self) -> None:
        """A request has its first token."""
        self.missing -= 1
        if self.missing == 0:
            self.all.set()


async def ask(
    made: Any, name: str, ids: list[int], tokens: int, started: Started
) -> list[tuple[float, int]]:
    """When tokens came, and how many; greedily, so many in all."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    greedy.output_kind = RequestOutputKind.DELTA
    seen = []
    async for each in made.generate({"prompt_token_ids": ids}, greedy, name):
        if count := len(each.outputs[0].token_ids):
            if not seen:
                started.one()
            seen.append((time.perf_counter(), count))
    return seen


async def wave(
    made: Any,
    name: str,
    requests: int,
    length: int,
    tokens: int,
    started: Started | None = None,
) -> dict[str, Any]:
    """So many requests at once, of random prompts: seconds, and when their tokens came."""
    started, draw = started or Started(requests), random.Random(name)
    prompts = [[draw.randrange(FIRST, LAST) for _ in range(length)] for _ in range(requests)]
    began = time.perf_counter()
    asked = (ask(made, f"{name}-{i}", ids, tokens, started) for i, ids in enumerate(prompts))
    seen = await asyncio.gather(*asked)
    gaps, firsts, count = [], [], 0
    for one in seen:
        firsts.append(one[0][0] - began)
        gaps += [(b - a) / n for (a, _), (b, n) in zip(one, one[1:], strict=False)]
        count += sum(n for _, n in one)
    return {"seconds": time.perf_counter() - began, "gaps": gaps, "firsts": firsts, "count": count}


def summed(waves: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """The numbers of some waves, by the names that engines' own benchmarks give them."""
    gaps = [1e3 * gap for each in waves for gap in each["gaps"]]
    firsts = [1e3 * first for each in waves for first in each["firsts"]]
    return {
        "completed": sum(each["count"] for each in waves) // tokens,
        "median_itl_ms": median(gaps),
        "mean_itl_ms": mean(gaps),
        "p99_itl_ms": quantiles(gaps, n=100)[-1],
        "median_ttft_ms": median(firsts),
        # Of the median wave: in the first one kernels may still be compiled.
        "output_throughput": median(each["count"] / each["seconds"] for each in waves),
        "wave_s": [each["seconds"] for each in waves],
    }


async def decode(asked: Asked, result: Path) -> None:
    """Each level of load: a wave that warms up, and those that count. A line for each level."""
    length, tokens = asked["input"], asked["output"]
    async with engine(asked["engine"]) as made:
        for requests in asked["requests"]:
            await wave(made, f"warm-{requests}", requests, length, tokens)
            names = [f"timed-{requests}-{turn}" for turn in range(asked["waves"])]
            waves = [await wave(made, name, requests, length, tokens) for name in names]
            with open(result, "a") as file:
                file.write(json.dumps({"requests": requests, **summed(waves, tokens)}) + "\n")


async def profile(asked: Asked, result: Path) -> None:
    """A trace of some steps, once all requests are being answered."""
    requests, length, tokens = asked["requests"], asked["input"], asked["output"]
    async with engine(asked["engine"]) as made:
        await wave(made, "warm", requests, length, 16)
        started = Started(requests)
        running = asyncio.create_task(wave(made, "traced", requests, length, tokens, started))
        await started.all.wait()
        await made.start_profile()
        await running
        await made.stop_profile()
    result.write_text("{}\n")


def rank_answers(rank: int, asked: Asked, port: int, prompts: list[str], said: Any) -> None:
    """One data-parallel rank's texts, greedily, on the queue `said`."""
    size = asked["ranks"]
    if size > 1:
        place = {"RANK": rank, "RANK_LOCAL": rank, "SIZE": size}
        place |= {"MASTER_IP": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {f"VLLM_DP_{name}": str(value) for name, value in place.items()}
    from vllm import LLM, SamplingParams

    wait_for_turn()
    model = LLM(**asked["engine"])
    greedy = SamplingParams(temperature=0, max_tokens=64, stop=["\n"])
    found = model.generate(prompts, greedy, use_tqdm=False)
    said.put((rank, [each.outputs[0].text for each in found]))


def answers(asked: Asked, result: Path) -> None:
    """The texts of some prompts, dealt to ranks in turns."""
    from job import free_port

    prompts, size = asked["prompts"], asked["ranks"]
    spawn = multiprocessing.get_context("spawn")
    said, texts, port = spawn.Queue(), [""] * len(prompts), free_port()
    ranks = [
        spawn.Process(target=rank_answers, args=(rank, asked, port, prompts[rank::size], said))
        for rank in range(size)
    ]
    for each in ranks:
        each.start()
    missing, end = set(range(size)), time.monotonic() + asked["timeout"]
    try:
        while missing:
            gone = [rank for rank in missing if ranks[rank].exitcode is not None]
            try:
                rank, found = said.get(timeout=1.0)
            except Empty:
                if gone or time.monotonic() > end:
                    sys.exit(f"ranks {gone or sorted(missing)} gave no answers")
                continue
            texts[rank::size] = found
            missing.discard(rank)
    finally:
        for each in ranks:
            each.join(30)
            each.kill()
    result.write_text(json.dumps(texts) + "\n")


def main() -> None:
    """What is asked for."""
    what, asked, result = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    if what == "answers":
        answers(asked, result)
    else:
        asyncio.run({"decode": decode, "profile": profile}[what](asked, result))


if __name__ == "__main__":
    main()
