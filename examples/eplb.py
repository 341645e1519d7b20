# SPDX-License-Identifier: Apache-2.0
"""Replicate busy experts and move them while the layer runs (EPLB).

    python examples/eplb.py [--ranks 4] [--steps 12] [--device cpu]

The engine counts how often each expert is chosen. Every few steps it computes a new placement, and
the weights move between ranks. Captured CUDA graphs stay valid.
"""

import argparse

import torch

import weft
from weft.moe import Expert, ExpertWeights, MoEConfig, Replicas, Routing, balance

EXPERTS = 16
CONFIG = MoEConfig(hidden=512, intermediate=256, routing=Routing(EXPERTS, 4))


def rank(group: weft.Group, steps: int) -> list[float]:
    """Return the imbalance of the ranks' loads before and after each relocation."""
    experts = [Expert.seeded(CONFIG, e) for e in range(EXPERTS)]
    every = ExpertWeights.stack(CONFIG, experts, group.device)

    def load(local: tuple[int, ...]) -> ExpertWeights:
        return ExpertWeights.stack(CONFIG, [experts[e] for e in local], group.device)

    # --8<-- [start:place]
    # The number of physical experts must be a multiple of the number of ranks.
    extra = group.size - EXPERTS % group.size
    loads = torch.zeros(EXPERTS, dtype=torch.int64)  # tokens of each expert since the last move
    replicas = balance(loads, group.size, replicas=extra)
    layer = weft.MoE(group, CONFIG, load, max_tokens=16, replicas=replicas)
    # --8<-- [end:place]

    # --8<-- [start:move]
    def forward(x: torch.Tensor, topk_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        loads.add_(weft.reference.expert_load(topk_ids, EXPERTS).cpu())
        return layer(x, topk_ids=topk_ids, topk_weights=weights)  # ids of logical experts

    def rebalance() -> tuple[Replicas, torch.Tensor]:  # between two steps, on every rank
        total = torch.tensor(group.all_gather(loads.tolist())).sum(0)
        layer.relocate(balance(total, group.size, replicas=extra))
        loads.zero_()
        assert layer.replicas is not None
        return layer.replicas, total

    # --8<-- [end:move]

    random = torch.Generator().manual_seed(group.rank)
    busy = torch.arange(EXPERTS).pow(1.5) / 8  # the last experts are chosen most often
    imbalance: list[float] = []
    for number in range(steps):
        tokens = int(torch.randint(0, 17, (), generator=random))
        x = torch.randn(tokens, 512, generator=random).bfloat16().to(group.device)
        logits = torch.randn(tokens, EXPERTS, generator=random) + busy
        weights, ids = logits.to(group.device).softmax(1).topk(4)
        out = forward(x, ids, weights)
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        layer.check()
        if tokens:
            expected = weft.reference.moe_layer(x, ids, weights, every.gate_up, every.down)
            error = float((out.float() - expected).abs().max())
            assert error < 0.02 * float(expected.abs().max()), error
        if number % 4 == 3:
            before = layer.replicas
            assert before is not None
            after, total = rebalance()
            imbalance += [round(each.imbalance(total), 2) for each in (before, after)]
    layer.close()
    assert imbalance[1] <= imbalance[0], imbalance
    return imbalance


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    result = weft.launch(rank, options.steps, ranks=options.ranks, device=options.device)
    print("busiest rank over the mean, before and after each move:", result[0])
