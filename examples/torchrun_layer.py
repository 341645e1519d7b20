# SPDX-License-Identifier: Apache-2.0
"""Run one expert-parallel MoE layer under torchrun.

    torchrun --nproc-per-node 4 examples/torchrun_layer.py

The ranks use their GPUs if there are any, else the CPU.
"""

import os

import torch
import torch.distributed as dist

import weft
from weft.moe import Expert, ExpertWeights, MoEConfig, Routing, router_logits


def main() -> None:
    # --8<-- [start:group]
    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpus else "gloo")
    group = weft.Group.from_torch()
    # --8<-- [end:group]

    # --8<-- [start:layer]
    config = MoEConfig(hidden=512, intermediate=256, shared=256, routing=Routing(16, 4))

    def load(local: tuple[int, ...]) -> ExpertWeights:  # global ids of this rank's experts
        experts = [Expert.seeded(config, e) for e in local]
        return ExpertWeights.stack(config, experts, group.device)

    shared = Expert.seeded(config, 99, shared=True).to(group.device)
    gate = torch.randn(16, 512, generator=torch.Generator().manual_seed(7)).to(group.device)
    x = torch.randn(5 + group.rank, 512, device=group.device).bfloat16()
    with weft.MoE(group, config, load, max_tokens=16, shared=shared) as layer:
        out = layer(x, router_logits(x, gate))  # route, dispatch, experts, combine
        if gpus:
            torch.cuda.synchronize()
        layer.check()
    # --8<-- [end:layer]

    every = load(tuple(range(16)))
    routed = weft.moe.route(config.routing, router_logits(x, gate))
    expected = weft.reference.moe_layer(
        x, routed.ids, routed.weights, every.gate_up, every.down, shared=shared(x)
    )
    error = float((out.float() - expected).abs().max() / expected.abs().max())
    assert error < 0.02, error
    print(f"rank {group.rank} of {group.size}: {tuple(out.shape)}, relative error {error:.4f}")
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
