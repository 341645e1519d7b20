# SPDX-License-Identifier: Apache-2.0
"""Captured graphs give the same bits after every sleep, which returns the memory to the driver.

CPU ranks rehearse it without graphs; ranks may share one GPU.
"""

import time
from typing import Any

import pytest
import torch

import weft
from tests.baseline import open_files, shares_mapped
from tests.operators import STEPPED, Step, capture_body
from tests.ranks import on_ranks
from tests.recovery import PATIENCE

RANKS, TOKENS = 2, 24
MOST = {"cuda": 4096, "cpu": TOKENS}  # max_tokens
CYCLES = {"cuda": 100, "cpu": 3}
NOISE = 32 << 20  # bytes that the driver may keep for its own use


def open_step(group: weft.Group, name: str) -> Step:
    kind = STEPPED[name]
    sizes: dict[str, Any] = {"max_tokens": MOST[group.device.type], "hidden": 1024}
    sizes |= {"timeout": PATIENCE, "first_timeout": PATIENCE}
    if kind.name == "lowlatency":
        sizes["max_tokens"] = min(sizes["max_tokens"], 256)
    if kind.name != "allreduce":
        sizes |= {"top_k": 4, "num_experts": 16}
    return Step(kind.open(group, **sizes), TOKENS, calls=2)


def free_bytes(group: weft.Group) -> int:
    """Return the free memory of this rank's GPU while no rank allocates or frees."""
    group.barrier()
    if group.device.type == "cpu":
        return -int(shares_mapped())
    torch.cuda.synchronize()
    free = int(torch.cuda.mem_get_info()[0])
    group.barrier()
    return free


@pytest.mark.timeout(300)
@on_ranks(RANKS, "cpu", "cuda")
def test_graphs_continue_after_every_sleep(group: weft.Group) -> None:
    device = group.device.type
    free_before = free_bytes(group)
    steps = [open_step(group, name) for name in STEPPED]
    heaps = [step.op.operator.heap for step in steps]
    replays = [capture_body(group, step) for step in steps]
    before = [heap.address(rank) for heap in heaps for rank in range(RANKS)]
    asleep, seconds = [], {"sleep": 0.0, "wake": 0.0}
    for turn in range(CYCLES[device]):
        awake = free_bytes(group)
        began = time.monotonic()
        group.sleep()
        seconds["sleep"] += time.monotonic() - began
        asleep.append(free_bytes(group))
        began = time.monotonic()
        group.wake()
        seconds["wake"] += time.monotonic() - began
        if device == "cuda":
            assert asleep[-1] - awake >= 0.99 * sum(heap.size for heap in heaps)
        assert [heap.address(rank) for heap in heaps for rank in range(RANKS)] == before
        for step, replay in zip(steps, replays, strict=True):
            step.reset(turn, group.living)
            replay()
            if turn % 10 == 0:
                step()  # an eager call between replays
            step.check()
        if turn == 0:
            files = open_files()
    assert open_files() == files
    assert asleep[0] >= free_before - max(NOISE, free_before // 100)
    # The first turn loads kernels for eager calls and checks, after its sleep.
    assert abs(asleep[-1] - asleep[1]) <= NOISE, asleep
    heap_bytes = sum(heap.size for heap in heaps)
    each = {name: f"{1e3 * total / len(asleep):.1f} ms" for name, total in seconds.items()}
    print(
        f"{len(heaps)} heaps of {heap_bytes / 1e6:.0f} MB: {each}, free {free_before} {asleep[0]}"
    )
    group.barrier()
