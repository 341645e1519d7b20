# SPDX-License-Identifier: Apache-2.0
"""Kill a rank while a layer runs, and let a new process take its number.

    python examples/replacement.py [--ranks 4] [--kill 2] [--device cpu]

The survivors run the layer without the rank, until the new process has loaded.
"""

import argparse
import os
import signal
import subprocess
import sys

import torch

import weft
from weft.moe import Expert, ExpertWeights, MoEConfig, Replicas, Routing

CONFIG = MoEConfig(hidden=512, intermediate=256, routing=Routing(16, 4))
EXPERTS = [Expert.seeded(CONFIG, e) for e in range(16)]
STEPS = 5  # after the replacement


def build(group: weft.Group) -> weft.MoE:
    """Build the layer, in an old or a new process alike."""

    def load(local: tuple[int, ...]) -> ExpertWeights:
        return ExpertWeights.stack(CONFIG, [EXPERTS[e] for e in local], group.device)

    replicas = Replicas((*range(16), *range(16)), group.size)
    return weft.MoE(group, CONFIG, load, max_tokens=8, replicas=replicas, missing="drop")


def draw(group: weft.Group) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(3 + group.rank, 512, device=group.device).bfloat16()
    return x, torch.randn(len(x), 16, device=group.device)


def step(group: weft.Group, layer: weft.MoE) -> None:
    """Run the layer, and compare the result with the reference."""
    x, logits = draw(group)
    out = layer(x, logits)
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    layer.check()
    every = ExpertWeights.stack(CONFIG, EXPERTS, group.device)
    ids, weights = weft.moe.route(CONFIG.routing, logits)
    expected = weft.reference.moe_layer(x, ids, weights, every.gate_up, every.down)
    assert float((out.float() - expected).abs().max()) < 0.02 * float(expected.abs().max())


def rank(group: weft.Group, victim: int) -> str:
    layer, process, alone = build(group), None, 0
    step(group, layer)
    group.barrier()
    if group.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            step(group, layer)
    except weft.errors.GroupError:
        group.recover(timeout=30.0)
    # --8<-- [start:survivor]
    meeting = group.open_meeting()
    if group.rank == meeting.hub:
        process = start(meeting.address, victim, group)
    ready = False
    while not ready:
        step(group, layer)  # the survivors go on
        alone += 1
        waiting = meeting.find_waiting_ranks()  # empty on all ranks but meeting.hub
        ready = any(group.all_gather(victim in waiting))
    group.replace(meeting)
    # --8<-- [end:survivor]
    for _ in range(STEPS):
        step(group, layer)
    group.barrier()
    if process is not None and process.wait():
        raise SystemExit("the new process failed")
    return f"{alone} steps without rank {victim}, then {STEPS} with its replacement"


def start(address: str, victim: int, group: weft.Group) -> "subprocess.Popen[bytes]":
    """Start the new process; only processes of this user that know the address can join."""
    place = ["--join", address, "--kill", str(victim), "--ranks", str(group.size)]
    return subprocess.Popen([sys.executable, __file__, *place, "--device", group.device.type])


def newcomer(address: str, victim: int, ranks: int, device: str) -> None:
    if device == "cuda":
        device = f"cuda:{victim % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    # --8<-- [start:newcomer]
    group = weft.Group.for_replacement(rank=victim, size=ranks, device=device)
    layer = build(group)
    layer(*draw(group))  # alone: compiles, and drops rows for other ranks
    group.join(address)
    # --8<-- [end:newcomer]
    for _ in range(STEPS):
        step(group, layer)
    group.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kill", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--join", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.join:
        newcomer(options.join, options.kill, options.ranks, options.device)
    else:
        sizes = {"ranks": options.ranks, "device": options.device}
        texts = weft.launch(rank, options.kill, tolerate_deaths=True, **sizes)
        for number, text in enumerate(texts):
            print(f"rank {number}: {text or 'killed'}")
