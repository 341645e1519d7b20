# SPDX-License-Identifier: Apache-2.0
"""Reference of expert grouping as plain loops, and inboxes that tests fill by hand."""

from dataclasses import dataclass

import pytest
import torch

import weft
from tests.rounds import bits, synchronize
from weft.alltoall.received import Received
from weft.errors import TokenOverflow
from weft.grouping.operator import ExpertGroups

MARK = 0xA5  # bytes that no kernel may write
PAYLOADS = [
    weft.Payload((24,), torch.bfloat16),
    weft.Payload((5,), torch.float32),
    weft.Payload((7,), torch.uint8),
]


@dataclass(frozen=True)
class Want:
    """Expected position of each entry; None if the buffer is full."""

    starts: list[int]
    counts: list[int]
    rows: dict[tuple[int, int, int], int | None]  # (source, token, k): row
    needed: int  # contiguous: rows with padding; masked: the first group's that is too large
    overflows: bool


def entries(received: Received, experts: int) -> list[list[tuple[int, int, int]]]:
    ids, counts = received.ids.tolist(), received.counts.tolist()
    result: list[list[tuple[int, int, int]]] = [[] for _ in range(experts)]
    for source, rows in enumerate(ids):
        count = counts[source] if 0 <= counts[source] <= len(rows) else len(rows)
        for token in range(count):
            for k, expert in enumerate(rows[token]):
                if 0 <= expert < experts:
                    result[expert].append((source, token, k))
    return result


def want(received: Received, experts: int, max_rows: int, align: int, layout: str) -> Want:
    starts, counts, rows, begin = [], [], {}, 0
    needed, overflows = 0, False
    for expert, group in enumerate(entries(received, experts)):
        if layout == "masked":
            start, limit = expert * max_rows, (expert + 1) * max_rows
            if len(group) > max_rows and not overflows:
                needed, overflows = len(group), True
        else:
            start, limit = min(begin, max_rows), max_rows
        starts.append(start)
        counts.append(min(len(group), limit - start))
        for i, entry in enumerate(group):
            rows[entry] = start + i if start + i < limit else None
        begin += -(-len(group) // align) * align
    if layout == "masked":
        starts.append(experts * max_rows)
    else:
        needed, overflows = begin, begin > max_rows
        starts.append(min(begin, max_rows))
    return Want(starts, counts, rows, needed, overflows)


def host(received: Received) -> Received:
    return Received(
        tuple(p.cpu() for p in received.payloads),
        received.ids.cpu(),
        received.weights.cpu(),
        received.counts.cpu(),
    )


def check_round(a2a: weft.AllToAll, groups: ExpertGroups, received: Received) -> None:
    d, experts, tokens = a2a.group.device, a2a.num_local_experts, a2a.max_tokens
    for rows in groups.buffers.rows:
        rows.view(torch.uint8).fill_(MARK)
    grouped, inputs = groups.gather(received), host(received)
    expected = want(inputs, experts, groups.max_rows, groups.align, groups.layout)
    assert grouped.offsets.tolist() == expected.starts
    assert grouped.counts.tolist() == expected.counts
    slot = torch.full((grouped.slot.numel(),), -1, dtype=torch.int32)
    weight = torch.zeros(grouped.slot.numel())
    planes = []
    for payload, got in zip(inputs.payloads, grouped.rows, strict=True):
        whole = bits(payload).view(a2a.ep_size * tokens, -1)
        plane = torch.full((slot.numel(), whole.shape[1]), MARK, dtype=torch.uint8)
        for (source, token, k), row in expected.rows.items():
            if row is not None:
                plane[row] = whole[source * tokens + token]
                slot[row] = source * tokens + token
                weight[row] = inputs.weights[source, token, k]
        for start, count in zip(expected.starts, expected.counts, strict=False):
            plane[start + count : start + -(-count // groups.align) * groups.align] = 0
        planes.append((bits(got.cpu()).view(plane.shape), plane))
    assert torch.equal(grouped.slot.cpu().flatten(), slot)
    assert torch.equal(bits(grouped.weight.cpu().flatten()), bits(weight))
    for got_bytes, plane in planes:
        assert torch.equal(got_bytes, plane)
    check_scatter(a2a, groups, inputs, expected)
    synchronize(d)
    if expected.overflows:
        with pytest.raises(TokenOverflow) as caught:
            a2a.check()
        assert str(expected.needed) in str(caught.value)
        assert str(groups.max_rows) in str(caught.value)
    a2a.check()


def check_scatter(a2a: weft.AllToAll, groups: ExpertGroups, given: Received, w: Want) -> None:
    d = a2a.group.device
    y = torch.randn(groups.y_shape, generator=torch.Generator().manual_seed(5)).to(a2a.dtype)
    flat = y.view(-1, y.shape[-1])
    out = torch.full(a2a.output().shape, 77.0, dtype=a2a.dtype)
    a2a.output().copy_(out)
    total = {(s, t): torch.zeros(y.shape[-1]) for s, t, _ in w.rows}
    for s, t, k in sorted(w.rows):
        row = w.rows[s, t, k]
        if row is not None:
            total[s, t] = total[s, t] + given.weights[s, t, k] * flat[row].float()
    for (s, t), value in total.items():
        out[s, t] = value.to(a2a.dtype)
    groups.scatter(y.to(d))
    assert torch.equal(bits(a2a.output().cpu()), bits(out))


def make(group: weft.Group, **changes: object) -> weft.AllToAll:
    sizes: dict[str, object] = {"max_tokens": 150, "top_k": 3, "hidden": 24, "payloads": PAYLOADS}
    sizes["num_experts"] = 5 * group.size
    return weft.AllToAll(group, **{**sizes, **changes})  # type: ignore[arg-type]


def empty_round(a2a: weft.AllToAll) -> Received:
    d, top_k = a2a.group.device, a2a.config.shape.top_k
    sent = a2a.config.inputs
    x = [torch.zeros((0, *p.shape), dtype=p.dtype, device=d) for p in sent]
    return a2a.dispatch(x, torch.zeros((0, top_k), dtype=torch.int32, device=d))


def fill(received: Received, ids: torch.Tensor, counts: list[int], seed: int) -> None:
    """Write ids and counts into the inbox, and payloads with distinct rows."""
    generator = torch.Generator().manual_seed(seed)
    received.ids.copy_(ids)
    received.counts.copy_(torch.tensor(counts, dtype=torch.int32))
    received.weights.copy_(torch.rand(ids.shape, generator=generator) * 2 - 1)
    for payload in received.payloads:
        size = (*payload.shape[:2], payload[0, 0].numel() * payload.element_size())
        raw = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        payload.copy_(raw.view(payload.dtype).view(payload.shape))


def random_ids(shape: torch.Size, experts: int, seed: int, holes: float, wild: float):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand((*shape[:2], max(experts, shape[2])), generator=generator)
    ids = ids.topk(shape[2], dim=2).indices.int()
    ids = torch.where(ids < experts, ids, -1)
    ids = torch.where(torch.rand(shape, generator=generator) < holes, -1, ids)
    odd = torch.tensor([experts, experts + 1, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
    pick = torch.randint(0, len(odd), shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < wild, odd[pick], ids)


VARIANTS: dict[str, dict[str, object]] = {
    "contiguous": {},
    "aligned": {"align": 16},
    "far aligned": {"align": 128},
    "masked": {"layout": "masked"},
    "masked, aligned": {"layout": "masked", "align": 16, "max_rows": 304},
    "too few rows": {"max_rows": 100},
    "too few aligned rows": {"max_rows": 96, "align": 16},
    "too few masked rows": {"layout": "masked", "max_rows": 21},
}
