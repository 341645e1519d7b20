# SPDX-License-Identifier: Apache-2.0
"""Run an MoE layer over two hosts.

On two machines, with --node-rank 0 and 1:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr 10.0.0.1 \
        --master-port 29500 examples/two_hosts.py

On one machine the first half of the ranks plays one host and the second half the other:

    torchrun --nproc-per-node 4 examples/two_hosts.py --pretend
"""

import os
import sys

import torch
import torch.distributed as dist

import weft
from weft.moe import Expert, ExpertWeights, MoEConfig, Routing


def main() -> None:
    if "--pretend" in sys.argv:  # ranks with different values of WEFT_HOST are on different hosts
        second = 2 * int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"])
        os.environ["WEFT_HOST"] = "b" if second else "a"
    # --8<-- [start:group]
    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpus else "gloo")
    group = weft.Group.from_torch()  # finds the hosts by itself
    print(f"rank {group.rank}: host {group.host} of {group.hosts}, ranks {group.host_ranks}")
    # --8<-- [end:group]

    config = MoEConfig(hidden=512, intermediate=256, routing=Routing(16, 4))

    def load(local: tuple[int, ...]) -> ExpertWeights:
        return ExpertWeights.stack(config, [Expert.seeded(config, e) for e in local], group.device)

    # --8<-- [start:layer]
    x = torch.randn(3 + group.rank, 512, device=group.device).bfloat16()
    logits = torch.randn(len(x), 16, device=group.device)
    with weft.MoE(group, config, load, max_tokens=16, mode="throughput") as layer:
        most = 3 + group.size  # rows that cross to each other host, equal on all ranks
        out = layer(x, logits, rows=min(most, 16))
        if gpus:
            torch.cuda.synchronize()
        layer.check()
    # --8<-- [end:layer]

    every = load(tuple(range(16)))
    ids, weights = weft.moe.route(config.routing, logits)
    expected = weft.reference.moe_layer(x, ids, weights, every.gate_up, every.down)
    error = float((out.float() - expected).abs().max() / expected.abs().max())
    assert error < 0.02, error
    print(f"rank {group.rank}: {tuple(out.shape)}, relative error {error:.4f}")
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
