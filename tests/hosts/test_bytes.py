# SPDX-License-Identifier: Apache-2.0
"""Bytes that a host sends in a round, counted at its link: the slots, and little else."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import weft
from tests.hosts.network import Network
from tests.hosts.spanning import campaign
from tests.hosts.test_faults import needs_links
from tests.rounds import Round
from weft.hosts.config import HostSpan
from weft.moe import Expert, ExpertWeights, MoEConfig, Routing

TOKENS, HIDDEN, MANY, FEW = 256, 2048, 22, 2
CPU = torch.device("cpu")
FP8 = HIDDEN + HIDDEN // 128 * 4  # bytes of a row
CASE = Round(tokens=(TOKENS,) * 6, experts=24, hidden=HIDDEN)


def made(config: MoEConfig, experts: tuple[int, ...]) -> ExpertWeights:
    """Return random weights."""
    return ExpertWeights.stack(config, [Expert.seeded(config, e) for e in experts], CPU)


def rail_bytes(span: HostSpan) -> tuple[int, int]:
    """Return the bytes of TOKENS rows that a rank sends to each other host, and of their sums."""
    returned = FP8 if span.returns_fp8 else span.hidden * span.dtype.itemsize
    return TOKENS * sum(span.row_bytes) + 4 * span.count_meta_words(TOKENS), TOKENS * returned


def rounds(group: weft.Group, _folder: Path, count: int, quantize: str | None) -> tuple[int, int]:
    """Run rounds; return the expected bytes that a rank sends to each other host per round."""
    x, ids, weights, _ = CASE.inputs_of(group.rank, group.device)
    sizes = {"max_tokens": TOKENS, "top_k": CASE.top_k, "num_experts": CASE.experts}
    if quantize == "low latency":
        with weft.LowLatencyAllToAll(group, hidden=HIDDEN, **sizes) as low:  # type: ignore[arg-type]
            for _ in range(count):
                got = low.dispatch(x, ids, weights)
                low.combine(got.x.to(x.dtype), ids, weights, got.handle)
            assert low.config.span is not None
            return rail_bytes(low.config.span)
    if quantize == "layer":
        config = MoEConfig(HIDDEN, 32, Routing(CASE.experts, CASE.top_k))
        inputs = partial(made, config)
        with weft.MoE(group, config, inputs, max_tokens=2 * TOKENS, mode="throughput") as layer:
            for _ in range(count):
                layer(x, topk_ids=ids, topk_weights=weights, rows=TOKENS)
            span = layer.exchange.config.span
        assert span is not None
        return rail_bytes(span)
    with weft.AllToAll(group, hidden=HIDDEN, quantize=quantize, **sizes) as a2a:  # type: ignore[arg-type]
        for _ in range(count):
            a2a.dispatch(x, ids, weights)
            a2a.combine()
        assert a2a.config.span is not None
        return rail_bytes(a2a.config.span)


@campaign
@needs_links
@pytest.mark.parametrize(
    ("hosts", "quantize"), [(2, None), (3, "fp8"), (2, "low latency"), (2, "layer")]
)
def test_a_round_sends_its_slots_to_each_other_host_once(hosts, quantize):
    row = FP8 if quantize in ("fp8", "low latency") else 2 * HIDDEN
    with Network(hosts) as network:
        sent = []
        for count in (FEW, MANY):
            before = network.sent(0)
            out, home = network.run(2, f"{__name__}:rounds", count, quantize)[0]
            sent.append(network.sent(0) - before)
        each = (sent[1] - sent[0]) / (MANY - FEW) / 2 / (hosts - 1)
    assert out <= 1.02 * TOKENS * row, "ids and weights"
    assert home == TOKENS * 2 * HIDDEN
    assert out + home <= each <= 1.05 * TOKENS * (row + 2 * HIDDEN)
