# SPDX-License-Identifier: Apache-2.0
"""Which ranks are alive, as SGLang keeps it; 0.5.23 alone."""

from __future__ import annotations

import torch

from sglang.srt.runtime_context import STATE


class ElasticEPState:
    def __init__(self, ranks: int) -> None:
        self.active_ranks = torch.ones(ranks, dtype=torch.int32)
        self.last_active_ranks = self.active_ranks.clone()
        self.active_ranks_cpu = self.active_ranks.clone()

    def snapshot_active_to_last(self) -> None:
        self.last_active_ranks = self.active_ranks.clone()

    def sync_active_to_cpu(self) -> None:
        self.active_ranks_cpu = self.active_ranks.clone()


class ElasticEPStateManager:
    _instance: ElasticEPState | None = None

    @classmethod
    def instance(cls) -> ElasticEPState:
        if cls._instance is None:
            cls._instance = ElasticEPState(STATE.parallel.tp_size)
        return cls._instance
