# SPDX-License-Identifier: Apache-2.0
"""Counts, ranks of tokens and local ids of deep_ep's normal mode, without copies to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from weft.compat.normal_mode import WORDS
from weft.compat.rank_layout import announcement, dispatch_layout, localize

RANKS, EXPERTS, TOP_K = 3, 12, 5
NUMBERS = range(7, 7 + len(WORDS))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [0, 1, 300])
def test_entries_are_counted_and_become_local(tokens, dtype):
    """Ids name experts, none, or neither, which counts as refused."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-3, EXPERTS + 3, (tokens, TOP_K), generator=generator, dtype=dtype)
    if tokens > 1:
        ids[1, :2] = torch.tensor([torch.iinfo(dtype).max, torch.iinfo(dtype).min])
    rows = [[i for i in row if 0 <= i < EXPERTS] for row in ids.tolist()]
    entries = [i for row in rows for i in row]
    flags = [[any(i // 4 == rank for i in row) for rank in range(RANKS)] for row in rows]
    goes = [sum(row[rank] for row in flags) for rank in range(RANKS)]
    layout = dispatch_layout(ids, EXPERTS, RANKS)
    assert [each.dtype for each in layout] == [torch.int32, torch.int32, torch.bool]
    assert layout.in_rank.shape == (tokens, RANKS)
    assert all(each.is_contiguous() for each in layout)
    assert layout.in_rank.tolist() == flags
    assert layout.per_rank.tolist() == goes
    assert layout.per_expert.tolist() == [entries.count(i) for i in range(EXPERTS)]
    bad = sum(i < -1 or i >= EXPERTS for i in ids.flatten().tolist())
    for given, wrong in ((ids, bad), (None, 0)):
        refused = torch.tensor([5], dtype=torch.int32)
        numbers, ranks = announcement(NUMBERS, given, layout, refused)
        assert numbers.dtype == ranks.dtype == torch.int32
        expected = [*NUMBERS, wrong, *goes, *goes, *layout.per_expert.tolist()]
        assert numbers.tolist() == expected
        assert announcement(NUMBERS, given, layout, None)[0].tolist() == expected
        assert ranks.tolist() == [[r if row[r] else -1 for r in range(RANKS)] for row in flags]
        assert int(refused) == 5 + wrong
    weights, local = torch.rand(ids.shape), (ids >= 4) & (ids < 8)
    topk = ids.clone(), weights.clone()
    localize(*topk, 4, 4)
    assert torch.equal(topk[0], torch.where(local, ids - 4, -1))
    assert torch.equal(topk[1], torch.where(local, weights, 0.0))


class NoCopies(TorchFunctionMode):
    """Raises where host and device could pass numbers to each other."""

    COPIES = (
        torch.tensor,
        torch.as_tensor,
        torch.from_numpy,
        *(getattr(torch.Tensor, name) for name in ("to", "cpu", "cuda", "copy_", "__setitem__")),
    )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in self.COPIES:
            raise AssertionError(f"{func.__name__} in a capture")
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_on_the_host():
    """Tensors of device meta have no values: reading one raises, as in a capture."""
    ids = torch.empty((9, TOP_K), dtype=torch.int64, device="meta")
    refused = torch.empty(1, dtype=torch.int32, device="meta")
    with pytest.raises(AssertionError, match="tensor in a capture"), NoCopies():
        torch.tensor([7], device="meta")
    with NoCopies():
        layout = dispatch_layout(ids, EXPERTS, RANKS)
        numbers, ranks = announcement(NUMBERS, ids, layout, refused)
        localize(ids, torch.empty(ids.shape, device="meta"), 4, 4)
    assert numbers.shape == (len(WORDS) + 1 + 2 * RANKS + EXPERTS,)
    assert ranks.shape == (9, RANKS)
