# SPDX-License-Identifier: Apache-2.0
"""Kill a rank while a layer runs, and continue without it.

    python examples/recovery.py [--ranks 4] [--kill 2] [--device cpu]

Every expert has a replica on another rank, so the survivors lose no expert. Under torchrun the
agent ends all ranks when one dies; here `weft.launch(tolerate_deaths=True)` starts them, as an
engine starts its own processes.
"""

import argparse
import os
import signal

import torch

import weft
from weft.moe import Expert, ExpertWeights, MoEConfig, Replicas, Routing

CONFIG = MoEConfig(hidden=512, intermediate=256, routing=Routing(16, 4))


def rank(group: weft.Group, victim: int) -> str:
    experts = [Expert.seeded(CONFIG, e) for e in range(16)]
    every = ExpertWeights.stack(CONFIG, experts, group.device)

    def load(local: tuple[int, ...]) -> ExpertWeights:
        return ExpertWeights.stack(CONFIG, [experts[e] for e in local], group.device)

    # --8<-- [start:replicas]
    # 32 physical experts: expert e is number e and number e + 16, half of the ranks apart.
    replicas = Replicas((*range(16), *range(16)), group.size)
    layer = weft.MoE(group, CONFIG, load, max_tokens=8, replicas=replicas)
    # --8<-- [end:replicas]

    def step() -> bool:
        x = torch.randn(3 + group.rank, 512, device=group.device).bfloat16()
        logits = torch.randn(len(x), 16, device=group.device)
        out = layer(x, logits)
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        layer.check()
        ids, weights = weft.moe.route(CONFIG.routing, logits)
        expected = weft.reference.moe_layer(x, ids, weights, every.gate_up, every.down)
        return float((out.float() - expected).abs().max()) < 0.02 * float(expected.abs().max())

    assert step()
    group.barrier()
    if group.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    text = "no error"
    # --8<-- [start:recover]
    for _ in range(5):
        try:
            right = step()
        except weft.errors.GroupError as error:
            text = f"{type(error).__name__}: {error}"
            result = group.recover(timeout=30.0)  # collective over the survivors
            assert result.dead == (victim,), result
            right = step()  # repeat the step; captured graphs would still be valid
        assert right
    # --8<-- [end:recover]
    layer.close()
    return f"continued with ranks {list(group.living)} after {text.splitlines()[0]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kill", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    sizes = {"ranks": options.ranks, "device": options.device}
    for number, text in enumerate(weft.launch(rank, options.kill, tolerate_deaths=True, **sizes)):
        print(f"rank {number}: {text or 'killed'}")
