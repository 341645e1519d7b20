"""The tokenizer's control messages."""

from __future__ import annotations


class TokenizerControlMixin:
    """So many ranks answer one."""

    fan_out = 0

    def update_control_communicator_fan_out(self, worker_count: int) -> None:
        """From now on."""
        self.fan_out = worker_count
