# SPDX-License-Identifier: Apache-2.0
"""Decode with batches that change in every step, and with idle ranks.

    python examples/decode_loop.py [--ranks 4] [--steps 20] [--device cpu]

One layer object serves prefill, one serves decode; both use the same weights. Ranks without a
request call with zero tokens.
"""

import argparse

import torch

import weft
from weft.moe import Expert, ExpertWeights, MoEConfig, Routing

CONFIG = MoEConfig(hidden=512, intermediate=256, routing=Routing(16, 4))


def rank(group: weft.Group, steps: int) -> int:
    """Return how many tokens this rank has decoded."""
    experts = [Expert.seeded(CONFIG, e) for e in range(16)]
    every = ExpertWeights.stack(CONFIG, experts, group.device)

    # --8<-- [start:layers]
    most = weft.tokens_per_rank(
        max_running_requests=8 * group.size, prefill_tokens=64, data_parallel=group.size
    )

    def load(local: tuple[int, ...]) -> ExpertWeights:
        mine = [experts[e] for e in local]
        return ExpertWeights.stack(CONFIG, mine, group.device)

    prefill = weft.MoE(group, CONFIG, load, max_tokens=most, mode="throughput")
    decode = weft.MoE(group, CONFIG, load, max_tokens=8, mode="low_latency", timeout=30)
    # --8<-- [end:layers]

    random = torch.Generator().manual_seed(group.rank)
    decoded = 0
    # --8<-- [start:loop]
    for _ in range(steps):
        tokens = int(torch.randint(0, 9, (), generator=random))  # this rank's batch; 0: idle
        busiest = max(group.all_gather(tokens))  # an engine knows it from its scheduler
        layer = decode if busiest <= 8 else prefill
        x = torch.randn(tokens, 512, generator=random).bfloat16().to(group.device)
        logits = torch.randn(tokens, 16, generator=random).to(group.device)
        out = layer(x, logits)  # every rank calls, also with zero tokens
        decoded += tokens
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        layer.check()  # once a step, before a result of it is used
        # --8<-- [end:loop]
        ids, weights = weft.moe.route(CONFIG.routing, logits)
        expected = weft.reference.moe_layer(x, ids, weights, every.gate_up, every.down)
        limit = 0.02 * float(expected.abs().max()) if tokens else 0.0
        assert tokens == 0 or float((out.float() - expected).abs().max()) <= limit
    decode.close()
    prefill.close()
    return decoded


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    print(weft.launch(rank, options.steps, ranks=options.ranks, device=options.device))
