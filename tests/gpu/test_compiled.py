# SPDX-License-Identifier: Apache-2.0
"""Compiled graphs on GPUs, with inductor and its CUDA graphs, give the bits of eager calls."""

from typing import Any

import pytest
import torch

import weft
from tests.compiled import (
    PATIENT,
    assert_same,
    compare_all_reduces,
    compare_all_to_all,
    compare_layers,
    compare_low_latency,
    compile_body,
)
from tests.ranks import on_ranks
from tests.rounds import Round, synchronize

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
INDUCTOR: dict[str, Any] = {"backend": "inductor"}
CAPTURED: dict[str, Any] = {"mode": "reduce-overhead"}
# A size is warmed up, captured, then replayed, each rank for itself: here one rank replays while
# the other captures, or calls eagerly.
STAGGERED = ((5, 3), (5, 8), (5, 3), (5, 3), (5, 8), (4, 3), (5, 8), (4, 3), (0, 8), (4, 0))
SAME = (5, 5, 5, 5, 8, 8, 8, 8, 5, 1)


def run(group: weft.Group, options: dict[str, Any], part: str) -> None:
    captured = options is CAPTURED or "mode" in options
    turns = STAGGERED if captured else ((5, 3), (0, 8), (4, 4), (6, 0))
    if part == "reduces":
        sizes = SAME if captured else (5, 8, 0, 1, 3)
        compare_all_reduces(group, options, ("none", "static", "token", "group", "ue8m0"), sizes)
    elif part == "rank":
        compare_all_to_all(group, options, turns)
    elif part == "low":
        compare_low_latency(group, options, ("fp8", "plain", "ue8m0", "reduced"), turns)
    elif part == "layer":
        compare_layers(group, options, {"overlap": "shared_expert"}, turns)
    else:
        built = {"mode": "low_latency", "overlap": "shared_expert"}
        compare_layers(group, options, built, turns)


PARTS = ("reduces", "rank", "low", "layer", "layer by expert")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("count", "options"), [(2, INDUCTOR), (2, CAPTURED), (1, CAPTURED)])
def test_compiled_calls_have_the_bits_of_eager_ones(ranks, count, options, part):
    if (count, part) != (1, "reduces"):  # an all-reduce takes two ranks
        ranks(count, "cuda")(run, options, part, timeout=850.0)


@on_ranks(2, "cuda", timeout=850.0)
def test_replays_run_without_the_host(group):
    """The host's count of rounds is constant during replays; the device's increases."""
    case = Round((5, 3), top_k=3, experts=8, hidden=128)
    x, ids, weights, _ = case.next(tokens=case.tokens[: group.size]).inputs_of(
        group.rank, group.device
    )
    sizes: dict[str, Any] = {"max_tokens": 8, "top_k": 3, "num_experts": 8, "hidden": 128}
    with weft.AllToAll(group, **sizes, **PATIENT) as a2a:

        def body(x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            received = a2a.dispatch(x * 2, ids, weights)
            return (a2a.combine(received.x) + 1,)

        expected, traced = body(x), compile_body(body, CAPTURED)
        for _ in range(3):  # compiled and warmed up, captured, replayed
            assert_same(traced(x), expected)
        synchronize(group.device)
        host, device = a2a.round_number, a2a.history()[-1].epoch
        for _ in range(5):
            assert_same(traced(x), expected)
        synchronize(group.device)
        assert a2a.round_number == host
        assert a2a.history()[-1].epoch == device + 5
        assert_same(body(x), expected)
        a2a.check()
