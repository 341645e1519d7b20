# SPDX-License-Identifier: Apache-2.0
"""Give a layer's memory to a trainer between two rollouts, and take it back.

    python examples/sleep.py [--ranks 2] [--device cpu]

On GPUs the rollout is a CUDA graph, which stays valid. The ranks may share one GPU.
"""

import argparse

import torch

import weft
from weft.bench import harness
from weft.moe import Expert, ExpertWeights, MoEConfig, Routing

CONFIG = MoEConfig(hidden=512, intermediate=256, routing=Routing(16, 4))


def rank(group: weft.Group, cycles: int) -> str:
    def load(local: tuple[int, ...]) -> ExpertWeights:
        experts = [Expert.seeded(CONFIG, e) for e in local]
        return ExpertWeights.stack(CONFIG, experts, group.device)

    layer = weft.MoE(group, CONFIG, load, max_tokens=1024)
    x = torch.randn(4, 512, device=group.device).bfloat16()
    logits = torch.randn(4, 16, device=group.device)
    out = torch.empty_like(x)

    def rollout() -> None:
        layer(x, logits, out=out)

    rollout()
    expected = out.clone()
    replay = harness.capture(rollout).replay if group.device.type == "cuda" else rollout
    for _ in range(cycles):
        # --8<-- [start:sleep]
        replay()  # the last step of a rollout
        layer.check()
        group.sleep()  # collective: the memory of all layers goes back to the driver
        assert group.asleep
        # Train: other processes may allocate the memory.
        group.wake()  # collective: new memory at the same addresses
        replay()  # the same graph
        # --8<-- [end:sleep]
        assert torch.equal(out, expected)
    layer.close()
    return f"slept {cycles} times; the result has the same bits"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    texts = weft.launch(rank, options.cycles, ranks=options.ranks, device=options.device)
    for number, text in enumerate(texts):
        print(f"rank {number}: {text}")
