# SPDX-License-Identifier: Apache-2.0
"""Compute a token alone and among others, and compare its bits.

    python examples/batch_invariance.py [--ranks 4] [--device cpu]

Every rank computes its first token in a batch of its own, and again in batches of other sizes, with
the low-latency and the throughput layer. All results have the same bits.
"""

import argparse

import torch

import weft
from weft.moe import Expert, ExpertWeights, MoEConfig, Routing

CONFIG = MoEConfig(hidden=512, intermediate=256, routing=Routing(16, 4))


def rank(group: weft.Group) -> int:
    """Return the number of batches compared with the token alone."""

    def load(local: tuple[int, ...]) -> ExpertWeights:
        experts = [Expert.seeded(CONFIG, expert) for expert in local]
        return ExpertWeights.stack(CONFIG, experts, group.device)

    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(64, 512, generator=generator).bfloat16().to(group.device)
    logits = torch.randn(64, 16, generator=generator).to(group.device)

    # --8<-- [start:layers]
    decode = weft.MoE(
        group, CONFIG, load, max_tokens=8, mode="low_latency", batch_invariant=True, timeout=30
    )
    prefill = weft.MoE(
        group, CONFIG, load, max_tokens=64, mode="throughput", batch_invariant=True, timeout=30
    )
    # --8<-- [end:layers]
    # --8<-- [start:compare]
    alone = decode(x[:1], logits[:1])
    batches = (decode, 8), (prefill, 1), (prefill, 17), (prefill, 64)
    for layer, tokens in batches:
        batch = layer(x[:tokens], logits[:tokens])
        assert torch.equal(batch[:1], alone)
        layer.check()
    # --8<-- [end:compare]
    decode.close()
    prefill.close()
    return len(batches)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    print(weft.launch(rank, ranks=options.ranks, device=options.device))
