# SPDX-License-Identifier: Apache-2.0
"""Rounds of the low-latency all-to-all whose every byte is known, for all device kinds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import weft
from tests.rounds import Round, bits, drop_dead_ids, synchronize
from weft.gemm.reference import push_rows
from weft.lowlatency import reference as low
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.results import ExpertRows
from weft.reference import dequantize


@dataclass(frozen=True)
class Mode:
    quantize: str | None = "fp8"
    group_size: int = 128
    scale: str = "fp32_row"
    reduce: str = "receiver"
    combine: str = "push"
    combine_dtype: str | None = None
    recipe: str = "weft"
    more: dict[str, object] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "quantize": self.quantize,
            "combine": self.combine,
            "combine_dtype": self.combine_dtype,
            "group_size": self.group_size,
            "scale": self.scale,
            "reduce": self.reduce,
            "slots": 1 if self.combine == "gemm_push" else 2,
            "_recipe": self.recipe,
        }

    def make(self, group: weft.Group, case: Round, max_tokens: int) -> LowLatencyAllToAll:
        options: dict[str, Any] = self.options | self.more
        return LowLatencyAllToAll(group, **case.sizes(max_tokens), dtype=case.dtype, **options)


def dequantized_rows(
    x: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    return (x if scales is None else dequantize(x, scales)).to(dtype)


def apply_expert(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    factor = (1 + (experts % 7) / 8)[..., None]
    return (rows.float() * factor + experts[..., None] / 16).to(rows.dtype)


def expert_results(a2a: LowLatencyAllToAll, got: ExpertRows) -> torch.Tensor:
    """Return every expert's results, with NaN in unused rows, which no combine may read."""
    shape = a2a.config.shape
    scales = None if got.scales is None else low.unpack_scales(got.scales, shape.blocks)
    experts = torch.tensor(a2a.local_experts, device=got.x.device)[:, None]
    y = apply_expert(dequantized_rows(got.x, scales, a2a.dtype), experts.expand(got.x.shape[:2]))
    there = torch.arange(shape.rows, device=y.device)[None] < got.counts[:, None]
    return torch.where(there[..., None], y, torch.full((), float("nan"), dtype=y.dtype).to(y))


def store_at_owners(a2a: LowLatencyAllToAll, got: ExpertRows, y: torch.Tensor) -> None:
    """Store experts' results at their owners, as a grouped GEMM would."""
    assert got.dst_addr is not None
    assert got.abort_flag is not None
    there = torch.arange(y.shape[1], device=y.device)[None] < got.counts[:, None]
    if y.device.type == "cpu":
        rows = torch.where(there, got.dst_addr, 0).flatten()
        push_rows(rows, y.flatten(0, 1), got.abort_flag)
        return
    heap, layout, shape = a2a.heap, a2a.config.offsets, a2a.config.shape
    words = y.view(torch.int32)  # each is there at once
    size = (shape.tokens * shape.top_k, words.shape[2])
    for owner in range(a2a.ep_size):
        own = there & (got.source // shape.tokens == owner)
        place = heap.tensor(size, torch.int32, offset=layout.back, rank=owner)
        back = heap.address(owner) + layout.back
        place[(got.dst_addr[own] - back) // (4 * size[1])] = words[own]


def expected_out(
    a2a: LowLatencyAllToAll, mode: Mode, case: Round, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    x, ids, weights, add = inputs
    sent = low.compute_delivered_rows(x, mode.quantize, mode.group_size, mode.scale, mode.recipe)
    rows = dequantized_rows(*sent, x.dtype)
    chosen = low.mask_invalid_ids(ids, case.experts)
    each = rows[:, None].expand(-1, case.top_k, -1)
    return low.combine(
        apply_expert(each, chosen.clamp(min=0)),
        ids,
        weights if case.weighted else None,
        a2a.placement,
        reduce=mode.reduce,
        combine_dtype=mode.combine_dtype,
        add=add if case.add else None,
        hosts=a2a.group.host_ranks,
    )


def check_rows(
    a2a: LowLatencyAllToAll,
    mode: Mode,
    inputs: list[tuple[torch.Tensor, ...]],
    got: ExpertRows,
    *,
    poisoned: bool,
) -> None:
    """Compare every received row, and check that other rows are unchanged."""
    expected = low.dispatch(
        [inputs[source][0] for source in a2a.sources],
        [inputs[source][1] for source in a2a.sources],
        a2a.placement,
        rank=a2a.rank,
        max_tokens=a2a.max_tokens,
        quantize=mode.quantize,
        group_size=mode.group_size,
        scale=mode.scale,
        recipe=mode.recipe,
    )
    assert torch.equal(got.counts, expected.counts), (got.counts, expected.counts)
    if a2a.group.hosts == 1:
        assert torch.equal(got.ranges, expected.ranges)
    rows = torch.arange(got.x.shape[1], device=got.x.device)
    there = rows[None] < expected.counts[:, None]
    assert torch.equal(got.source[there], expected.source[there])
    assert torch.equal(bits(bytes_of(got.x)[there]), bits(bytes_of(expected.x)[there]))
    if got.scales is not None:
        assert expected.scales is not None
        scales = low.unpack_scales(got.scales, expected.scales.shape[2])
        assert torch.equal(bits(scales[there]), bits(expected.scales[there]))
    if poisoned:
        assert bool((bytes_of(got.x)[~there] == 0xFF).all()), "a row that carries no token changed"


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def play(
    a2a: LowLatencyAllToAll,
    mode: Mode,
    case: Round,
    *,
    poison: bool = True,
    split_phase: bool = False,
    living: Sequence[int] | None = None,
    checks: bool = True,
) -> torch.Tensor:
    """Run one round, compare everything that is defined, and return combine's result.

    living: the ranks that take part; default all.
    checks: call `check`, which raises what was refused.
    """
    group = a2a.group
    living = range(group.size) if living is None else living
    inputs = [case.living(living).inputs_of(rank, group.device) for rank in range(group.size)]
    x, ids, weights, add = inputs[group.rank]
    sent = [(i[0], drop_dead_ids(i[1], a2a.placement.ranks, living), *i[2:]) for i in inputs]
    if poison:
        for slot in a2a.result_buffers:
            slot.x.view(torch.uint8).fill_(0xFF)
    passed = weights if case.weighted else None
    if split_phase:
        a2a.dispatch_send(x, ids, passed)
        got = a2a.dispatch_recv()
    else:
        got = a2a.dispatch(x, ids, passed)
    synchronize(group.device)
    if checks:
        a2a.check()
    check_rows(a2a, mode, sent, got, poisoned=poison)
    y = expert_results(a2a, got)
    out = torch.full_like(x, float("nan"))
    more = add if case.add else None
    if mode.combine == "gemm_push":
        store_at_owners(a2a, got, y)
        a2a.combine(None, ids, passed, got.handle, out, more)
        assert got.dst_addr is not None
        assert not got.dst_addr.any(), "a row has an address when it is no longer awaited there"
    elif split_phase:
        a2a.combine_send(y, ids, passed, got.handle, out, more)
        a2a.combine_recv()
    else:
        a2a.combine(y, ids, passed, got.handle, out, more)
    synchronize(group.device)
    if checks:
        a2a.check()
    expected = expected_out(a2a, mode, case, sent[group.rank])
    wrong = (bits(out) != bits(expected)).nonzero()
    assert wrong.numel() == 0, f"{len(wrong)} wrong bytes, the first at {wrong[0].tolist()}"
    return out
