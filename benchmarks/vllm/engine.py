# SPDX-License-Identifier: Apache-2.0
"""Run one vLLM engine in its own process: answers, time between tokens, or a trace of decode.

    engine.py answers|decode|profile REQUEST.json RESULT.json

This folder's other scripts start it in a variant's environment. It imports first, and waits for the
file SERVER_GATE before it uses a GPU. Tokens come from vLLM's asynchronous engine, without HTTP and
without detokenization.
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

Request = dict[str, Any]
FIRST, LAST = 3, 259  # ids of bytes in the vocabulary of weft's tokenizers


def wait_for_turn() -> None:
    """Wait until the file that SERVER_GATE names exists."""
    gate = os.environ.get("SERVER_GATE")
    while gate and not Path(gate).exists():
        time.sleep(0.1)


@asynccontextmanager
async def engine(arguments: dict[str, Any]) -> AsyncIterator[Any]:
    """Yield vLLM's asynchronous engine, whose core is another process."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    wait_for_turn()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        yield llm
    finally:
        llm.shutdown()


class Started:
    """An event that is set once all requests have their first token."""

    def __init__(self, requests: int) -> None:
        self.missing, self.all = requests, asyncio.Event()

    def one(self) -> None:
        """Count a request's first token."""
        self.missing -= 1
        if self.missing == 0:
            self.all.set()


async def ask(
    llm: Any, name: str, ids: list[int], tokens: int, started: Started
) -> list[tuple[float, int]]:
    """Generate `tokens` tokens greedily; return the arrival times and counts of tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    greedy.output_kind = RequestOutputKind.DELTA
    seen = []
    async for each in llm.generate({"prompt_token_ids": ids}, greedy, name):
        if count := len(each.outputs[0].token_ids):
            if not seen:
                started.one()
            seen.append((time.perf_counter(), count))
    return seen


async def wave(
    llm: Any,
    name: str,
    requests: int,
    length: int,
    tokens: int,
    started: Started | None = None,
) -> dict[str, Any]:
    """Send requests of random prompts at once; return seconds and arrival times of tokens."""
    started, rng = started or Started(requests), random.Random(name)
    prompts = [[rng.randrange(FIRST, LAST) for _ in range(length)] for _ in range(requests)]
    start = time.perf_counter()
    request = (ask(llm, f"{name}-{i}", ids, tokens, started) for i, ids in enumerate(prompts))
    seen = await asyncio.gather(*request)
    gaps, firsts, count = [], [], 0
    for one in seen:
        firsts.append(one[0][0] - start)
        gaps += [(b - a) / n for (a, _), (b, n) in zip(one, one[1:], strict=False)]
        count += sum(n for _, n in one)
    return {"seconds": time.perf_counter() - start, "gaps": gaps, "firsts": firsts, "count": count}


def summed(waves: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Return statistics of waves, named as in the engines' own benchmarks."""
    gaps = [1e3 * gap for each in waves for gap in each["gaps"]]
    firsts = [1e3 * first for each in waves for first in each["firsts"]]
    return {
        "completed": sum(each["count"] for each in waves) // tokens,
        "median_itl_ms": median(gaps),
        "mean_itl_ms": mean(gaps),
        "p99_itl_ms": quantiles(gaps, n=100)[-1],
        "median_ttft_ms": median(firsts),
        # The median wave, because kernels may still be compiled in the first one.
        "output_throughput": median(each["count"] / each["seconds"] for each in waves),
        "wave_s": [each["seconds"] for each in waves],
    }


async def decode(request: Request, result: Path) -> None:
    """Measure each level of load after a warm-up wave, and write a line per level."""
    length, tokens = request["input"], request["output"]
    async with engine(request["engine"]) as llm:
        for requests in request["requests"]:
            await wave(llm, f"warm-{requests}", requests, length, tokens)
            names = [f"timed-{requests}-{turn}" for turn in range(request["waves"])]
            waves = [await wave(llm, name, requests, length, tokens) for name in names]
            with open(result, "a") as file:
                file.write(json.dumps({"requests": requests, **summed(waves, tokens)}) + "\n")


async def profile(request: Request, result: Path) -> None:
    """Trace some steps, once all requests have their first token."""
    requests, length, tokens = request["requests"], request["input"], request["output"]
    async with engine(request["engine"]) as llm:
        await wave(llm, "warm", requests, length, 16)
        started = Started(requests)
        running = asyncio.create_task(wave(llm, "traced", requests, length, tokens, started))
        await started.all.wait()
        await llm.start_profile()
        await running
        await llm.stop_profile()
    result.write_text("{}\n")


def rank_answers(rank: int, request: Request, port: int, prompts: list[str], queue: Any) -> None:
    """Put one data-parallel rank's greedy texts on the queue."""
    size = request["ranks"]
    if size > 1:
        from job import SHARED_GPU

        shared = SHARED_GPU if request["shares_gpu"] else {}
        os.environ |= shared
        place = {"RANK": rank, "RANK_LOCAL": 0 if shared else rank, "SIZE": size}
        place |= {"MASTER_IP": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {f"VLLM_DP_{name}": str(value) for name, value in place.items()}
    from vllm import LLM, SamplingParams

    wait_for_turn()
    model = LLM(**request["engine"])
    greedy = SamplingParams(temperature=0, max_tokens=64, stop=["\n"])
    outputs = model.generate(prompts, greedy, use_tqdm=False)
    queue.put((rank, [each.outputs[0].text for each in outputs]))


def answers(request: Request, result: Path) -> None:
    """Write the texts of prompts that are dealt to ranks in turns."""
    from job import free_port

    prompts, size = request["prompts"], request["ranks"]
    spawn = multiprocessing.get_context("spawn")
    queue, texts, port = spawn.Queue(), [""] * len(prompts), free_port()
    ranks = [
        spawn.Process(target=rank_answers, args=(rank, request, port, prompts[rank::size], queue))
        for rank in range(size)
    ]
    for each in ranks:
        each.start()
    missing, end = set(range(size)), time.monotonic() + request["timeout"]
    try:
        while missing:
            exited = [rank for rank in missing if ranks[rank].exitcode is not None]
            try:
                rank, rank_texts = queue.get(timeout=1.0)
            except Empty:
                if exited or time.monotonic() > end:
                    sys.exit(f"ranks {exited or sorted(missing)} returned no answers")
                continue
            texts[rank::size] = rank_texts
            missing.discard(rank)
    finally:
        for each in ranks:
            each.join(30)
            each.kill()
    result.write_text(json.dumps(texts) + "\n")


def main() -> None:
    """Run the requested measurement."""
    what, request, result = (
        sys.argv[1],
        json.loads(Path(sys.argv[2]).read_text()),
        Path(sys.argv[3]),
    )
    if what == "answers":
        answers(request, result)
    else:
        asyncio.run({"decode": decode, "profile": profile}[what](request, result))


if __name__ == "__main__":
    main()
