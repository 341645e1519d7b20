# SPDX-License-Identifier: Apache-2.0
"""The low-latency all-to-all over several hosts: every byte as its reference has it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.emulator.operators import EmulatedLow, compile_low
from tests.hosts.spanning import across, campaign, lying, on_hosts
from tests.rounds import Round, bits
from weft.errors import BadExpertId, InvalidArgument
from weft.hosts.rail import Slots
from weft.lowlatency import reference
from weft.lowlatency.config import LowLatencyConfig

TOKENS = 8
Way = dict[str, Any]


def answers(rows: torch.Tensor, experts: tuple[int, ...]) -> torch.Tensor:
    """What expert e makes of its rows `[experts, ...]`: (e + 1) / 8 times them."""
    factors = torch.tensor(experts, dtype=torch.float32, device=rows.device).add(1).div(8)
    return (rows.float() * factors.view(-1, *[1] * (rows.dim() - 1))).bfloat16()


def sent(low: weft.LowLatencyAllToAll, case: Round, way: Way) -> tuple[Any, ...]:
    """Dispatch a round; what arrives is checked."""
    group = low.group
    inputs = [case.of(r, group.device) for r in range(group.size)]
    x, ids, weights, _ = inputs[group.rank]
    if way.get("split_phase"):
        _, receive = low.dispatch_send(x, ids, weights)
        receive()
        got = low.slots[(low._number - 1) % low.config.slots].rows(
            low.find_handle(low._number)  # type: ignore[arg-type]
        )
    else:
        got = low.dispatch(x, ids, weights)
    quantize = way.get("quantize", "fp8")
    want = reference.dispatch(
        [inputs[s][0] for s in low.sources],
        [inputs[s][1] for s in low.sources],
        low.placement,
        rank=group.rank,
        max_tokens=TOKENS,
        quantize=quantize,
        group_size=way.get("group_size", 128),
        scale=way.get("scale", "fp32_row"),
    )
    scales = None
    if got.scales is not None:
        assert want.scales is not None
        scales = reference.unpack_scales(got.scales, want.scales.shape[2])
    assert torch.equal(got.counts, want.counts)
    for e, count in enumerate(got.counts.tolist()):
        assert torch.equal(got.source[e, :count], want.source[e, :count])
        assert torch.equal(bits(got.x[e, :count]), bits(want.x[e, :count]))
        if scales is not None:
            assert want.scales is not None
            assert torch.equal(scales[e, :count], want.scales[e, :count])
    numbers = got.x.float()
    if scales is not None:
        numbers = weft.reference.dequantize(got.x, scales)
    y = answers(numbers.bfloat16(), low.local_experts)
    return inputs[group.rank], got.handle, y


def combined(low: weft.LowLatencyAllToAll, round_: tuple[Any, ...], case: Round, way: Way) -> None:
    """Combine it; the sums are checked."""
    (x, ids, weights, add), handle, y = round_
    more = add if case.add else None
    if way.get("split_phase"):
        out, receive = low.combine_send(y, ids, weights, handle, add=more)
        receive()
    else:
        out = low.combine(y, ids, weights, handle, add=more)
    how = way.get("group_size", 128), way.get("scale", "fp32_row")
    numbers, scales = reference.delivered_rows(x, way.get("quantize", "fp8"), *how)
    if scales is not None:
        numbers = weft.reference.dequantize(numbers, scales).bfloat16()
    every = answers(numbers.expand(case.experts, *x.shape), tuple(range(case.experts)))
    chosen = torch.where(ids >= 0, ids, 0).long()
    rows = every[chosen, torch.arange(len(x), device=x.device)[:, None]]
    want = reference.combine(
        rows,
        ids,
        weights,
        low.placement,
        reduce=way.get("reduce", "receiver"),
        combine_dtype=way.get("combine_dtype"),
        add=more,
        hosts=low.group.host_ranks,
    )
    assert torch.equal(bits(out), bits(want))


WAYS: dict[str, Way] = {
    "fp8": {},
    "plain": {"quantize": None},
    "sender": {"reduce": "sender", "combine_dtype": "fp8"},
    "by column, of 32": {"scale": "fp32_col", "group_size": 32},
    "powers of two": {"scale": "ue8m0", "reduce": "sender"},
    "halves": {"split_phase": True},
}


@campaign
@across(2)
def test_hosts_meet_the_reference(group: weft.Group) -> None:
    for number, way in enumerate(WAYS.values()):
        case = Round(tokens=(5, 0, 8, 2), hidden=256, add=True, router="holes", seed=number)
        with weft.LowLatencyAllToAll(group, **case.sizes(TOKENS), **way) as low:
            for seed in range(2):
                each = case.next(seed=10 * number + seed)
                combined(low, sent(low, each, way), each, way)
            # Two results alive: each is combined with its own ids.
            first, second = case.next(seed=98), case.next(seed=99, tokens=(1, 8, 0, 3))
            alive = [sent(low, each, way) for each in (first, second)]
            for each, one in zip((first, second), alive, strict=True):
                combined(low, one, each, way)
            low.check()


SMALL = Round(tokens=(2, 2, 2, 2), top_k=2, experts=4, hidden=128)


@across(2)
def test_weights_and_bad_ids_are_refused_in_words(group: weft.Group) -> None:
    """Also ids that rank 3's host would not send."""
    x, ids, weights, _ = SMALL.of(group.rank, group.device)
    with weft.LowLatencyAllToAll(group, **SMALL.sizes(2)) as low:
        got = low.dispatch(x, ids)
        y = torch.zeros((*got.x.shape[:2], 128), dtype=torch.bfloat16)
        with pytest.raises(InvalidArgument, match="pass the same tensor to both"):
            low.combine(y, ids, weights, got.handle)
        low.combine(y, ids, None, got.handle)
        wrong = torch.tensor([[0, 9], [1, 1]]) if group.rank == 3 else ids
        got = low.dispatch(x, wrong)
        low.combine(y, wrong, None, got.handle)
        if group.rank == 3:
            with pytest.raises(BadExpertId, match=r"topk_ids\[0, 1\] is 9; .*2 reports"):
                low.check()
        low.check()
        for lie in (4, -9):

            def tell(slots: Slots, own: int, lie: int = lie) -> None:
                slots.ids[own, 1, 0] = lie

            with lying(low, tell) if group.rank == 3 else contextlib.nullcontext():
                got = low.dispatch(x, ids, weights)
            low.combine(y, ids, weights, got.handle)
            if group.rank == 1:
                text = rf"^rank 3: topk_ids\[1, 0\] is {lie} \(rank 1 found it out\); "
                with pytest.raises(BadExpertId, match=text):
                    low.check()
            low.check()


# A row is 132 vectors of 16 bytes: two pieces of a warp, and four vectors of the third.
LONG: Way = {"max_tokens": TOKENS, "top_k": 4, "num_experts": 16, "hidden": 2048}


def emulated(group: weft.Group, library: str) -> None:
    with weft.LowLatencyAllToAll(group, timeout=600.0, **LONG) as low:
        low._kernels = EmulatedLow(Path(library), low.config.shape)
        for seed in range(2):
            case = Round(tokens=(5, 0, 8, 2), hidden=2048, router="holes", seed=seed)
            combined(low, sent(low, case, {}), case, {})
        low.check()


@campaign
def test_kernels_forward_quantised_rows_as_they_came(ranks):
    config = LowLatencyConfig.from_args(ranks=2, **LONG, _hosts=((0, 1), (2, 3)))
    ranks(4, "cpu")(on_hosts, 2, emulated, str(compile_low(config.shape)))
