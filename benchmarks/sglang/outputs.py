"""Chaos or a mistake: how far servers with random weights part, layer by layer and token by token.

Fixed prompts are asked one by one, again, and all together, of stock SGLang and of weft's ways, in
models of few layers. A right server differs from another as stock differs from itself in other
batches, and parts where two tokens are nearly as likely; a wrong one differs in its first MoE
layer. Stock and weft get the same weights.
"""

from __future__ import annotations

import concurrent.futures
import json
import random
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from job import OUT, Job, Variant, chosen, in_servers, post
from layer_outputs import name_of
from server import NO_PREFILL_GRAPHS, arguments, begin, data_parallel, job_of
from variants import VARIANTS

COUNT, TOKENS = 64, 32
WAYS = ("one by one", "again", "together")


def prompts() -> list[list[int]]:
    """The same ones always, of different lengths."""
    draw = random.Random(7)
    return [[draw.randrange(3, 259) for _ in range(16 + 11 * (i % 16))] for i in range(COUNT)]


def answer(address: str, ids: list[int]) -> dict[str, Any]:
    """Greedy tokens with their log-probabilities.

    top: the first token's five likeliest.   gaps: between the two likeliest of each step.
    """
    greedy = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": greedy, "return_logprob": True}
    info = post(address, "/generate", {**body, "top_logprobs_num": 5})["meta_info"]
    steps = info["output_token_logprobs"]
    likely = info["output_top_logprobs"]
    return {
        "ids": [s[1] for s in steps],
        "logprobs": [s[0] for s in steps],
        "top": {str(one[1]): one[0] for one in likely[0]},
        "gaps": [step[0][0] - step[1][0] for step in likely],
    }


def asked(address: str, folder: Path) -> dict[str, Any]:
    """All prompts in each of the ways, with the layers' outputs of each."""
    found: dict[str, Any] = {}
    for way in WAYS:
        workers = COUNT if way == "together" else 1
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            found[way] = list(pool.map(lambda ids: answer(address, ids), prompts()))
        if folder.is_dir():
            folder.rename(folder.with_name(f"{folder.name}-{way.replace(' ', '-')}"))
    return found


def parting(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> dict[str, Any]:
    """How far two sets of answers agree."""
    parted: dict[int, tuple[int, float]] = {}  # the prompt: which token, and its gap in a
    apart: list[float] = []
    for prompt, (x, y) in enumerate(zip(a, b, strict=True)):
        pairs = zip(x["ids"], y["ids"], strict=True)
        first = next((i for i, (s, t) in enumerate(pairs) if s != t), TOKENS)
        if first < TOKENS:
            parted[prompt] = first, x["gaps"][first]
        apart += [abs(v - y["top"][t]) for t, v in x["top"].items() if t in y["top"]]
    lost = sum(TOKENS - first for first, _ in parted.values())
    return {
        "equal": len(a) - len(parted),
        "of": len(a),
        "tokens_before": 1 - lost / (len(a) * TOKENS),
        "parted": parted,
        "gap_most": max((gap for _, gap in parted.values()), default=None),
        "logprob_median": statistics.median(apart) if apart else None,
        "logprob_most": max(apart) if apart else None,
    }


def layers(a: Path, b: Path) -> list[float] | None:
    """Median over prompts of |a - b| / |a| of every layer's output; None without files."""
    relative = []
    for ids in prompts():
        one, other = (sorted(folder.glob(f"{name_of(ids)}-*.npy")) for folder in (a, b))
        if not one or not other:
            continue
        x, y = np.load(one[0]), np.load(other[0])
        relative.append(np.linalg.norm(x - y, axis=1) / np.linalg.norm(x, axis=1))
    if not relative:
        return None
    return [float(each) for each in np.median(np.stack(relative), 0)]


def compare(job: Job, found: dict[str, dict[str, Any]], folders: Path, count: int) -> None:
    """Stock against itself, and every other variant against stock."""
    pairs = [("stock", "one by one", "stock", way) for way in WAYS[1:]]
    for name in found:
        if name != "stock":
            pairs += [("stock", "one by one", name, way) for way in ("one by one", "together")]
            pairs += [(name, "one by one", name, "together")]
    for left, left_way, right, right_way in pairs:
        if left not in found or right not in found:
            continue
        result: dict[str, Any] = parting(found[left][left_way], found[right][right_way])
        places = [
            folders / f"{name}-{way.replace(' ', '-')}"
            for name, way in ((left, left_way), (right, right_way))
        ]
        result["layers"] = layers(*places)
        against = f"{left}, {left_way} / {right}, {right_way}"
        job.record(VARIANTS[right], result, layers=count, against=against)


def main() -> int:
    """One server for each variant and number of layers."""
    parser = arguments(str(__doc__), "qwen3-30b-a3b", ["stock", "weft"])
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4, 8], help="of layers")
    parser.add_argument("--dtype", default="bfloat16", help="or float16, or float32")
    given = parser.parse_args()
    failed, end = 0, None
    for count in given.counts:
        given.layers = count
        job = job_of(
            given,
            *data_parallel(given.gpus),
            *("--disable-cuda-graph", NO_PREFILL_GRAPHS, "--dtype", given.dtype),
        )
        end = job.end = end or job.end
        compare_all(job, chosen(given.variants, VARIANTS), count, f"-{count}-{given.dtype}")
        failed |= job.done()
    return failed


def compare_all(job: Job, variants: list[Variant], count: int, suffix: str) -> None:
    """Answers of so many layers, of all variants."""
    folder = OUT / f"layers{suffix}"
    found: dict[str, dict[str, Any]] = {}

    def start(variant: Variant, name: str) -> None:
        begin(job, variant, name, LAYER_OUTPUTS=str(folder / variant.name))

    def measure(variant: Variant, name: str, address: str) -> None:
        found[variant.name] = asked(address, folder / variant.name)

    in_servers(job, variants, start, measure, suffix=suffix)
    (OUT / f"outputs{suffix}.json").write_text(json.dumps(found))
    compare(job, found, folder, count)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
