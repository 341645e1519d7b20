# SPDX-License-Identifier: Apache-2.0
"""Arbitrary words of a peer never cause accesses outside of this rank's memory."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import weft
from tests.headers import HEADER_BYTES
from tests.kinds import ANY, EMULATED
from tests.lowlatency_rounds import Mode, store_at_owners
from tests.rounds import Round, synchronize
from weft.errors import PeerTimeout
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.results import ExpertRows
from weft.runtime.layout import LINE

MOST, HIDDEN, EPOCH = 8, 128, 2
TAGGED_BITS = 24  # of value in a tagged word: tagged_bits in lowlatency/layout.cuh
CASE = Round(tokens=(8, 8), hidden=HIDDEN)
LIES = {
    "tokens": {"tokens": 1 << 20, "chosen": (1 << 24) - 1},
    "more chosen than tokens": {"chosen": (1 << 24) - 1},
    "an expert that is none": {"choice": 2000},
    "a choice that was not told": {"choice": 1},
    "some choices that were not told": {"choice": 1, "chosen": 0b10100110},
}


def words(a2a: LowLatencyAllToAll, offset: int, count: int) -> torch.Tensor:
    """Return `count` 64-bit words of rank 0's share."""
    heap = a2a.heap
    return heap.tensor((count,), torch.int64, offset=offset, rank=0)


def rows_out(a2a: LowLatencyAllToAll) -> torch.Tensor:
    """Return the slots of returned rows in rank 0's inbox."""
    shape, layout = a2a.config.shape, a2a.config.offsets
    return words(a2a, layout.rows, shape.rows * shape.sent_bytes // 8)


def forge_dispatch(
    a2a: LowLatencyAllToAll, *, tokens: int = MOST, chosen: int = 0, choice: int = 0
) -> None:
    """Write what rank 1 sends to rank 0 in its second dispatch."""
    shape, layout = a2a.config.shape, a2a.config.offsets
    tag = EPOCH << TAGGED_BITS
    flags = HEADER_BYTES + LINE
    rows_out(a2a)[MOST * shape.sent_bytes // 8 :] = 0
    words(a2a, layout.choices, shape.rows * shape.top_k)[MOST * shape.top_k :] = tag | choice
    words(a2a, layout.token_masks, 2 * shape.local)[shape.local :] = tag | chosen
    words(a2a, layout.tokens, 2)[1] = tag | tokens
    words(a2a, flags, 2)[1] += 1  # dispatch_begun
    words(a2a, flags + 2 * LINE, 2)[1] += 1  # combined
    synchronize(a2a.group.device)


def receive_invalid_words(group: weft.Group, lie: dict[str, int]) -> None:
    for mode in (Mode(), Mode(combine="gemm_push")):
        lied_to_in(group, replace(mode, more={"timeout": 5.0}), lie)


def lied_to_in(group: weft.Group, mode: Mode, lie: dict[str, int]) -> None:
    with mode.make(group, CASE, MOST) as a2a:
        x, ids, weights, _ = CASE.inputs_of(group.rank, group.device)
        got = a2a.dispatch(x, ids, weights)
        y = torch.zeros_like(got.x, dtype=x.dtype)
        if got.dst_addr is not None:
            store_at_owners(a2a, got, y)
        a2a.combine(y if got.dst_addr is None else None, ids, weights, got.handle)
        group.barrier()
        if group.rank == 1:
            forge_dispatch(a2a, **lie)
        group.barrier()
        if group.rank == 0:
            nobody = torch.full_like(ids, -1)
            got = a2a.dispatch(x, nobody, weights)
            synchronize(group.device)
            a2a.check()
            check_bounds(a2a, got)
            if "choice" in lie:  # a row that is refused is taken out all the same
                assert bool((rows_out(a2a) == -1).all())
        group.barrier()


def check_bounds(a2a: LowLatencyAllToAll, got: ExpertRows) -> None:
    tensors = a2a.result_buffers[got.handle.slot].tensors
    rows = a2a.config.shape.rows
    assert tensors["source_tokens"].tolist() == [MOST, MOST]
    assert bool((got.counts <= rows).all()), got.counts
    assert bool((got.ranges.sum(dim=-1) <= rows).all()), got.ranges
    if got.dst_addr is not None:
        check_addresses(a2a, got, got.dst_addr)
        return
    taken = tensors["position"][tensors["position"] >= 0]
    assert bool((taken < got.counts[taken // rows] + taken // rows * rows).all())
    # No two tokens share a row, whatever was told of them.
    by_token = tensors["position"][1].unique(dim=1)
    seats = by_token[by_token >= 0]
    assert len(seats) == len(seats.unique())


def check_addresses(a2a: LowLatencyAllToAll, got: ExpertRows, address: torch.Tensor) -> None:
    """Every address is a slot of the token's owner, and no two are equal."""
    shape, heap = a2a.config.shape, a2a.heap
    behind = torch.arange(shape.rows, device=address.device)[None] >= got.counts[:, None]
    assert not address[behind].any()
    used = address[address != 0]
    assert len(used) == len(used.unique())
    for rank in range(a2a.ep_size):
        ours = address[(address != 0) & (got.source // MOST == rank)]
        place = ours - heap.address(rank) - a2a.config.offsets.back
        assert not (place % shape.back_bytes).any()
        assert bool(((place >= 0) & (place < MOST * shape.top_k * shape.back_bytes)).all())


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("lie", LIES)
def test_no_word_of_a_peer_causes_a_stray_access(ranks, kind, lie):
    ranks(2, kind)(receive_invalid_words, LIES[lie])


def withhold_word(group: weft.Group, what: str) -> str:
    """Rank 1 announces rows to rank 0 but withholds one word; return rank 0's error."""
    mode = Mode(more={"timeout": 0.6, "first_timeout": 600.0})
    with mode.make(group, CASE, MOST) as a2a:
        x, ids, weights, _ = CASE.inputs_of(group.rank, group.device)
        got = a2a.dispatch(x, ids, weights)
        a2a.combine(torch.zeros_like(got.x, dtype=x.dtype), ids, weights, got.handle)
        group.barrier()
        if group.rank == 1:
            forge_dispatch(a2a, chosen=(1 << MOST) - 1, choice=1)
            shape, layout = a2a.config.shape, a2a.config.offsets
            if what == "row":
                rows_out(a2a)[-1:] = -1
            else:
                words(a2a, layout.choices, shape.rows * shape.top_k)[-2:-1] = -1
            synchronize(group.device)
        group.barrier()
        reported = ""
        if group.rank == 0:
            try:
                a2a.dispatch(x, torch.full_like(ids, -1), weights)
                synchronize(group.device)
                a2a.check()
            except PeerTimeout as error:
                reported = str(error)
        group.barrier()
        return reported


LATE = r"rank 0, dispatch: rank 1 did not publish epoch 2 within .* \(its flag shows epoch 1\)"


@pytest.mark.parametrize("kind", [*ANY, EMULATED])
@pytest.mark.parametrize("what", ["row", "choice"])
def test_a_missing_row_is_named_with_what_arrived(ranks, kind, what):
    assert re.match(LATE, ranks(2, kind)(withhold_word, what)[0])
