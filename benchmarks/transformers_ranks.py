# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a small random Qwen3-MoE in transformers, with weft and its own ways.

Usage: transformers_ranks.py OUT.json [--ranks N] [--device cpu|cuda] [--turns N]

All ways run in turns, so that a busy machine slows all of them. The best turn counts, and the
median is recorded as well. Logits are compared with those of one process before timing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import weft
import weft.plugins.transformers
from weft.bench.harness import synchronize_ranks

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "eos_token_id": None,
}
WAYS = {
    "one batch on all ranks": ("tp_size", ("weft", "all_reduce", "all_to_all")),
    "a batch of its own on every rank": ("fsdp_size", ("weft", "all_to_all")),
}
SEQUENCES, PROMPT, STEPS = 4, 128, 16


def measure(group: weft.Group, folder: str, turns: int) -> list[dict[str, Any]]:
    """Return rows of tokens per second, all ranks together."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    os.environ["LOCAL_RANK"] = str(group.rank)
    group.process_group()
    weft.plugins.transformers.register()
    alone = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(group.device)
    rows = []
    for batch, (axis, ways) in WAYS.items():
        own = axis == "fsdp_size"
        generator = torch.Generator().manual_seed(group.rank if own else 0)
        ids = torch.randint(0, 512, (SEQUENCES, PROMPT), generator=generator).to(group.device)
        models, seconds = {}, {}
        for way in ways:
            config = DistributedConfig(
                **{axis: group.size}, ep_size=group.size, ep_implementation=way
            )
            models[way] = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, distributed_config=config
            ).eval()
            with torch.no_grad():
                torch.testing.assert_close(
                    models[way](ids).logits, alone(ids).logits, rtol=1e-3, atol=1e-3
                )
            seconds[way] = []
        for _ in range(turns):
            for way, model in models.items():
                seconds[way].append(list(times(group, model, ids)))
        tokens = SEQUENCES * (group.size if own else 1)
        for way, taken in seconds.items():
            for phase, count, which in (("prefill", PROMPT, 0), ("decode", STEPS, 1)):
                rate = [tokens * count / each[which] for each in taken]
                rates = {"best": max(rate), "median": statistics.median(rate)}
                rows.append({"batch": batch, "way": way, "phase": phase, "tokens_per_s": rates})
    weft.plugins.transformers.close()
    return rows


@torch.no_grad()
def times(group: weft.Group, model: Any, ids: torch.Tensor) -> Iterator[float]:
    """Yield seconds of a prompt, then of decode steps, until the last rank is done."""
    model(ids[:, :8])
    for steps in (0, STEPS):
        cache = model(ids, use_cache=True).past_key_values if steps else None
        synchronize_ranks(group)
        start = time.perf_counter()
        if not steps:
            model(ids, use_cache=True)
        for _ in range(steps):
            cache = model(ids[:, :1], past_key_values=cache, use_cache=True).past_key_values
        synchronize_ranks(group)
        yield time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(**SIZES)
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
        results = weft.launch(
            measure, folder, args.turns, ranks=args.ranks, device=args.device, timeout=3000.0
        )
    record = {
        "what": __doc__.split("\n")[0],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "ranks": args.ranks,
        "device": args.device,
        "processors": os.cpu_count(),
        "load": os.getloadavg(),
        "model": SIZES,
        "sequences": SEQUENCES,
        "prompt": PROMPT,
        "steps": STEPS,
        "turns": args.turns,
        "rows": results[0],
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    for row in results[0]:
        print(row)


if __name__ == "__main__":
    main()
