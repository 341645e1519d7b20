"""Few SMs: the bulk copy engine moves the rows, and every byte is the same."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.rounds import Round, play

pytestmark = pytest.mark.gpu


def on_a_budget(group: weft.Group, num_sms: int) -> None:
    ranks = group.size
    cases = (
        Round(tokens=(128, 3, 0, 64, 127, 1, 128, 77)[:ranks], top_k=8, experts=256, hidden=7168),
        Round(tokens=(33,) * ranks, top_k=9, experts=32, hidden=2880, router="holes"),
        Round(tokens=(128,) * ranks, top_k=4, experts=64, hidden=1024, dtype=torch.float32),
    )
    for case in cases:
        a2a = weft.AllToAll(
            group,
            max_tokens=128,
            top_k=case.top_k,
            num_experts=case.experts,
            hidden=case.hidden,
            dtype=case.dtype,
            num_sms=num_sms,
            timeout=20.0,
        )
        with a2a:
            for seed in range(6):
                tokens = case.tokens[seed:] + case.tokens[:seed]
                play(a2a, case.next(seed=seed, tokens=tokens, add=seed % 2 == 0))
            a2a.check()


@pytest.mark.parametrize("num_sms", [1, 8, 64])
def test_rounds_on_few_sms(ranks, num_sms):
    ranks(min(8, max(2, torch.cuda.device_count())), "cuda")(on_a_budget, num_sms)
