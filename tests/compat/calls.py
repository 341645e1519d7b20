# SPDX-License-Identifier: Apache-2.0
"""Rounds in flashinfer.comm's calls whose every byte is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.rounds import bits
from weft import leases, reference
from weft.compat.flashinfer import MoeAlltoAll
from weft.compat.moe_workspace import MoeWorkspace

RANKS, MAX, TOP_K, EXPERTS, HIDDEN = 3, 8, 2, 7, 64  # rank 0 holds three experts, 1 and 2 two
INVALID = EXPERTS  # what engines pass whose kernels skip ids at and above their count
PLAIN = (
    weft.Payload((HIDDEN,), torch.bfloat16),
    weft.Payload((TOP_K,), torch.int32),
    weft.Payload((TOP_K,), torch.float32),
)
QUANTISED = (
    weft.Payload((HIDDEN,), torch.float8_e4m3fn),
    weft.Payload((3,), torch.uint8),  # scales, in rows that memory pads
    *PLAIN[1:],
)


@dataclass(frozen=True)
class Mapping:
    """As much of a mapping as is needed."""

    moe_ep_rank: int
    moe_ep_size: int


class Backend:
    """A communication backend over a group's control messages."""

    def __init__(self, group: weft.Group) -> None:
        self.group = group

    def Get_rank(self) -> int:
        return self.group.rank

    def Get_size(self) -> int:
        return self.group.size

    def allgather(self, data: Any) -> list[Any]:
        return self.group.all_gather(data)


def make(group: weft.Group, **changes: Any) -> MoeAlltoAll:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "group": group, **changes}
    return MoeAlltoAll(Mapping(group.rank, group.size), MAX, TOP_K, EXPERTS, **sizes)


def routing(seed: int, rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights): distinct experts, a quarter of them replaced by -1."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    scores = torch.rand((tokens, EXPERTS), generator=generator)
    ids = scores.topk(TOP_K, dim=1).indices.int()
    ids[torch.rand(ids.shape, generator=generator) < 0.25] = -1
    return ids, torch.rand((tokens, TOP_K), generator=generator)


def rows(seed: int, rank: int, tokens: int, wanted: tuple[weft.Payload, ...]) -> list[torch.Tensor]:
    """Payloads of one rank; the last two are its ids and weights."""
    generator = torch.Generator().manual_seed(1000 + 100 * seed + rank)
    tensors = []
    for row in wanted[:-2]:
        noise = torch.randint(0, 127, (tokens, *row.shape), generator=generator)
        tensors.append((noise / 64).to(row.dtype) if row.dtype.is_floating_point else noise.byte())
    return [*tensors, *routing(seed, rank, tokens)]


def experts_of(rank: int) -> torch.Tensor:
    return torch.tensor(weft.Placement.blocks(EXPERTS, RANKS).experts_of(rank))


def check_received(
    received: list[torch.Tensor], sent: list[list[torch.Tensor]], rank: int, runtime_max: int
) -> None:
    """Rows that carry a token are the source's bytes; ids of all others are INVALID."""
    for source, tensors in enumerate(sent):
        ids = tensors[-2]
        mine = torch.isin(ids, experts_of(rank))
        wanted = torch.full((runtime_max, TOP_K), INVALID, dtype=torch.int32)
        carried = mine.any(dim=1)
        wanted[: len(ids)] = torch.where(carried[:, None], ids, INVALID)
        assert torch.equal(received[-2][source], wanted)
        for plane, tensor in enumerate(tensors):
            if plane == len(tensors) - 2:
                continue
            got = received[plane][source, : len(ids)]
            assert got.dtype == tensor.dtype
            assert torch.equal(bits(got[carried]), bits(tensor[carried]))


def identity(received: list[torch.Tensor], mine: torch.Tensor) -> torch.Tensor:
    """Identity experts of a rank, as an engine runs them: by the ids and weights that came.

    mine: the rank's experts. Rows that no token was sent to are NaN, and nobody may read them.
    """
    x, *_, ids, weights = received
    local = torch.where(torch.isin(ids, mine), ids, -1)
    seen: Any = SimpleNamespace(x=x, ids=local, weights=weights)
    return reference.identity_experts(seen, torch.bfloat16)


def play(
    a2a: MoeAlltoAll,
    wanted: tuple[weft.Payload, ...],
    tokens: tuple[int, ...] = (2, 0, 1),
    runtime_max: int = 2,
    way: str = "copied",
    seed: int = 0,
) -> None:
    """One round of all ranks; `way`: how results reach combine."""
    sent = [rows(seed, r, tokens[r], wanted) for r in range(RANKS)]
    mine = sent[a2a.ep_rank]
    received = a2a.dispatch(mine[-2], mine, runtime_max, INVALID, len(mine) - 2)
    assert [t.shape[:2] for t in received] == [(RANKS, runtime_max)] * len(mine)
    assert all(t.is_contiguous() for t in received)
    check_received(received, sent, a2a.ep_rank, runtime_max)
    y, output = identity(received, experts_of(a2a.ep_rank)), None
    if way == "copied":
        payload, output = y, torch.full((len(mine[0]), HIDDEN), float("nan")).bfloat16()
    else:
        payload = a2a.get_combine_payload_tensor_in_workspace(runtime_max, HIDDEN, torch.bfloat16)
        payload.copy_(y)
    a2a.check()
    result = a2a.combine(payload, runtime_max, way == "in place", output=output)
    assert output is None or result is output
    placement = weft.Placement.blocks(EXPERTS, RANKS)
    x = mine[0].bfloat16()
    right = reference.identity_round_trip(x, mine[-2], mine[-1], placement, ranks=RANKS)
    assert torch.equal(bits(result), bits(right))


def workspace_of(a2a: MoeAlltoAll) -> MoeWorkspace:
    assert a2a._workspace is not None
    return a2a._workspace


def held() -> list[MoeWorkspace]:
    """The workspaces that objects of this process share."""
    shared = [each for known in list(leases._of_group.values()) for each in known.values()]
    return [each.operator for each in shared if isinstance(each.operator, MoeWorkspace)]


def refused(error: type[Exception], call: Callable[[], object], *words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"
