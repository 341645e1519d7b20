"""The trained model of `weft demo` in vLLM on CPU ranks: right answers, and texts equal to stock's.

    python benchmarks/vllm/arithmetic.py --ranks 1 --out stock.json
    export WEFT_VLLM=block
    python benchmarks/vllm/arithmetic.py --ranks 2 --out block.json --like stock.json

Each rank is a data- and expert-parallel one of its own, and answers its part of 200 questions,
greedily and in float32. docs/vllm.md says what has to be installed and set.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
from pathlib import Path
from queue import Empty
from typing import Any

from weft.cli.demo import CHECKPOINT, read_questions


def answer(rank: int, size: int, port: int, prompts: list[str], said: Any) -> None:
    """One rank's texts, on the queue `said`."""
    if size > 1:
        place = {"RANK": rank, "RANK_LOCAL": rank, "SIZE": size}
        place |= {"MASTER_IP": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {f"VLLM_DP_{name}": str(value) for name, value in place.items()}
    from vllm import LLM, SamplingParams

    more: dict[str, Any] = {"enable_expert_parallel": True} if size > 1 else {}
    model = LLM(
        model=str(CHECKPOINT),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        **more,
    )
    greedy = SamplingParams(temperature=0, max_tokens=64, stop=["\n"])
    found = model.generate(prompts, greedy, use_tqdm=False)
    said.put((rank, [each.outputs[0].text for each in found]))


def free_port() -> int:
    """One that no other server has just left."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> int:
    """0 where every answer is right, and equal to those of `--like`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--like", type=Path, help="texts of another run")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a rank's texts")
    given = parser.parse_args()
    questions = read_questions(CHECKPOINT / "questions.jsonl")[: given.questions]
    prompts = [each.prompt for each in questions]
    spawn = multiprocessing.get_context("spawn")
    said, texts = spawn.Queue(), [""] * len(prompts)
    port, size = free_port(), given.ranks
    ranks = [
        spawn.Process(target=answer, args=(rank, size, port, prompts[rank::size], said))
        for rank in range(size)
    ]
    for each in ranks:
        each.start()
    try:
        for _ in ranks:
            rank, found = said.get(timeout=given.timeout)
            texts[rank::size] = found
    except Empty:
        print(f"a rank said nothing for {given.timeout} s", file=sys.stderr)
        return 1
    finally:
        for each in ranks:
            each.join(30)
            each.kill()
    given.out.write_text(json.dumps(texts, indent=0))
    like = json.loads(given.like.read_text()) if given.like else texts
    right = sum(q.is_right(text) for q, text in zip(questions, texts, strict=True))
    equal = sum(a == b for a, b in zip(like, texts, strict=True))
    print(f"{right} of {len(texts)} right, {equal} equal")
    return int(right < len(texts) or equal < len(texts))


if __name__ == "__main__":
    sys.exit(main())
