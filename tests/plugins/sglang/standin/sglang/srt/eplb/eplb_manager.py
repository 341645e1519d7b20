"""What moves experts."""

from __future__ import annotations


class EPLBManager:
    """Of one process."""

    reason: str | None = None

    def disable_rebalance(self, reason: str) -> None:
        """No more."""
        self.reason = reason
