# SPDX-License-Identifier: Apache-2.0
"""Rounds with flashinfer.comm's calls whose every byte is known."""

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
INVALID = EXPERTS  # SGLang passes the number of experts, whose kernels skip ids from there on
PLAIN = (
    weft.Payload((HIDDEN,), torch.bfloat16),
    weft.Payload((TOP_K,), torch.int32),
    weft.Payload((TOP_K,), torch.float32),
)
FP8 = weft.Payload((HIDDEN,), torch.float8_e4m3fn)
QUANTISED = (FP8, weft.Payload((3,), torch.uint8), *PLAIN[1:])  # scales in rows that memory pads
MXFP8 = (FP8, weft.Payload((HIDDEN // 32,), torch.uint8), *PLAIN[1:])
NVFP4 = (*(weft.Payload((HIDDEN // n,), torch.uint8) for n in (2, 16)), *PLAIN[1:])


@dataclass(frozen=True)
class Mapping:
    """The part of a mapping that weft reads."""

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
    """Return (ids, weights): distinct experts, a quarter of them replaced by -1."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    scores = torch.rand((tokens, EXPERTS), generator=generator)
    ids = scores.topk(TOP_K, dim=1).indices.int()
    ids[torch.rand(ids.shape, generator=generator) < 0.25] = -1
    return ids, torch.rand((tokens, TOP_K), generator=generator)


def rows(seed: int, rank: int, tokens: int, kinds: tuple[weft.Payload, ...]) -> list[torch.Tensor]:
    """Return the payloads of one rank; the last two are its ids and weights."""
    generator = torch.Generator().manual_seed(1000 + 100 * seed + rank)
    tensors = []
    for row in kinds[:-2]:
        noise = torch.randint(0, 127, (tokens, *row.shape), generator=generator)
        tensors.append((noise / 64).to(row.dtype) if row.dtype.is_floating_point else noise.byte())
    return [*tensors, *routing(seed, rank, tokens)]


def experts_of(rank: int) -> torch.Tensor:
    return torch.tensor(weft.Placement.blocks(EXPERTS, RANKS).experts_of(rank))


def values(x: torch.Tensor) -> torch.Tensor:
    """Return payload rows as experts read them, in bfloat16; two NVFP4 numbers are in a byte."""
    if x.dtype == torch.uint8:
        x = torch.stack([x & 15, x >> 4], dim=-1).flatten(-2)
    return x.bfloat16()


def check_received(
    received: list[torch.Tensor],
    sent: list[list[torch.Tensor]],
    rank: int,
    runtime_max: int,
    invalid: int,
) -> None:
    """Assert that rows with a token equal the source's, and other rows have id `invalid`."""
    for source, tensors in enumerate(sent):
        ids = tensors[-2]
        carried = torch.isin(ids, experts_of(rank)).any(dim=1)
        want = torch.full((runtime_max, TOP_K), invalid, dtype=torch.int32)
        want[: len(ids)] = torch.where(carried[:, None], ids, invalid)
        assert torch.equal(received[-2][source].cpu(), want)
        for plane, tensor in enumerate(tensors):
            got = received[plane][source, : len(ids)].cpu()
            assert got.dtype == tensor.dtype
            assert torch.equal(bits(got[carried]), bits(tensor[carried]))


def identity(received: list[torch.Tensor], local: torch.Tensor) -> torch.Tensor:
    """Run identity experts of a rank on the received ids and weights, as an engine does.

    local: the rank's experts. Rows that no token was sent to are NaN, and must not be read.
    """
    x, *_, ids, weights = received
    ids = torch.where(torch.isin(ids, local), ids, -1)
    seen: Any = SimpleNamespace(x=values(x), ids=ids, weights=weights)
    return reference.identity_experts(seen, torch.bfloat16)


def play(
    a2a: MoeAlltoAll,
    kinds: tuple[weft.Payload, ...],
    tokens: tuple[int, ...] = (2, 0, 1),
    runtime_max: int = 2,
    way: str = "copied",
    seed: int = 0,
    invalid: int = INVALID,
) -> None:
    """Play one round of all ranks.

    way: how results reach combine: "copied", as vLLM does it, "in place", as SGLang does it, or
        "in place, unsaid".
    """
    device = a2a.group.device
    sent = [rows(seed, r, tokens[r], kinds) for r in range(RANKS)]
    own = [t.to(device) for t in sent[a2a.ep_rank]]
    received = a2a.dispatch(
        token_selected_experts=own[-2],
        input_payloads=own,
        runtime_max_tokens_per_rank=runtime_max,
        invalid_token_expert_id=invalid,
        expert_id_payload_index=len(own) - 2,
    )
    assert [t.shape[:2] for t in received] == [(RANKS, runtime_max)] * len(own)
    assert all(t.is_contiguous() for t in received)
    check_received(received, sent, a2a.ep_rank, runtime_max, invalid)
    y, output = identity(received, experts_of(a2a.ep_rank).to(device)), None
    if way == "copied":
        payload, output = y, torch.full((len(own[0]), HIDDEN), float("nan")).bfloat16().to(device)
    else:
        payload = a2a.get_combine_payload_tensor_in_workspace(runtime_max, HIDDEN, torch.bfloat16)
        payload.copy_(y)
    a2a.check()
    result = a2a.combine(
        payload=payload,
        runtime_max_tokens_per_rank=runtime_max,
        payload_in_workspace=way == "in place",
        output=output,
    )
    assert output is None or result is output
    placement = weft.Placement.blocks(EXPERTS, RANKS)
    x, *_, ids, weights = sent[a2a.ep_rank]
    want = reference.identity_round_trip(values(x), ids, weights, placement, ranks=RANKS)
    assert torch.equal(bits(result.cpu()), bits(want))


def workspace_of(a2a: MoeAlltoAll) -> MoeWorkspace:
    assert a2a._workspace is not None
    return a2a._workspace


def held() -> list[MoeWorkspace]:
    """Return the workspaces that objects of this process share."""
    shared = [each for known in list(leases._leases_by_group.values()) for each in known.values()]
    return [each.operator for each in shared if isinstance(each.operator, MoeWorkspace)]


def refused(error: type[Exception], call: Callable[[], object], *words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"
