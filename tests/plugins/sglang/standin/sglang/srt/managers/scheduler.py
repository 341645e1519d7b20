# SPDX-License-Identifier: Apache-2.0
"""The loop of a rank."""

from __future__ import annotations

from typing import Any

from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager


class Scheduler:
    """reported: what the tokenizer was told of the ranks."""

    def __init__(self) -> None:
        self.reported: list[list[int]] = []

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> str:
        return "batch"

    def _maybe_report_active_ranks(self) -> None:
        self.reported.append(ElasticEPStateManager.instance().active_ranks_cpu.tolist())
