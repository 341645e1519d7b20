# SPDX-License-Identifier: Apache-2.0
"""The whole grid of sizes on all GPUs, bitwise equal to the reference."""

import pytest
import torch

import weft
from tests.rounds import Round, play

pytestmark = pytest.mark.gpu

TOKENS = (0, 1, 3, 8, 64, 127, 128, 512, 2048)
ROUTERS = ("random", "perfect", "zipf", "one-hot")
TOP_K = (1, 2, 4, 6, 8, 9, 16)
HIDDEN = (2048, 2880, 4096, 5120, 7168)


def grid(group: weft.Group, hidden: int) -> int:
    done = 0
    for top_k in TOP_K:
        a2a = weft.AllToAll(
            group, max_tokens=2048, top_k=top_k, num_experts=256, hidden=hidden, timeout=20.0
        )
        with a2a:
            for tokens in TOKENS:
                for router in ROUTERS:
                    # Ranks differ in their counts, but for the sizes that fill all slots.
                    counts = tuple(
                        tokens if tokens in (0, 2048) else max(0, tokens - r % 3)
                        for r in range(group.size)
                    )
                    case = Round(
                        tokens=counts,
                        top_k=top_k,
                        experts=256,
                        hidden=hidden,
                        router=router,
                        seed=done,
                        add=done % 2 == 0,
                    )
                    play(a2a, case, poison=done % 4 == 0)
                    done += 1
            a2a.check()
    return done


@pytest.mark.timeout(600)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_bitwise_over_the_grid(ranks, hidden):
    count = min(8, torch.cuda.device_count())
    done = ranks(count, "cuda")(grid, hidden, timeout=580.0)
    assert done == [len(TOP_K) * len(TOKENS) * len(ROUTERS)] * count
