# SPDX-License-Identifier: Apache-2.0
"""How ranks tell each other what batches they have."""

from __future__ import annotations

from typing import Any

import torch


class MLPSyncBatchInfo:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def _get_fallback_tensor(self, device: Any, dtype: Any = torch.int64) -> torch.Tensor:
        return torch.tensor([0, 0, 1], device=device, dtype=dtype)

    def all_gather(self, active: torch.Tensor) -> torch.Tensor:
        """What the ranks tell, who all have 7 tokens; of one that is not active, the fallback."""
        fallback = self._get_fallback_tensor("cpu")
        said = fallback.expand(self.ranks, fallback.numel()).contiguous()
        said.copy_(torch.tensor([7, 7, 0]))
        said[active == 0] = fallback
        return said


def exchange_sync_rows(global_flat: torch.Tensor, local_row: torch.Tensor, group: Any) -> None:
    """What 0.5.23's ranks tell each other, by collectives that outlive no rank."""
    raise AssertionError("SGLang's own exchange ran")


def exchange(local: list[int], ranks: int) -> list[list[int]]:
    """Every rank's row, as a pass begins; of a rank that says nothing, an idle one's."""
    found = torch.tensor([[0, 0, 1]]).repeat(ranks, 1)
    exchange_sync_rows(found.flatten(), torch.tensor(local), None)
    return found.tolist()
