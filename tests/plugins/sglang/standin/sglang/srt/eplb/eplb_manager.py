# SPDX-License-Identifier: Apache-2.0
"""What moves experts."""

from __future__ import annotations


class EPLBManager:
    reason: str | None = None

    def disable_rebalance(self, reason: str) -> None:
        self.reason = reason
