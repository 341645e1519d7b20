# SPDX-License-Identifier: Apache-2.0
"""The tokenizer's control messages."""

from __future__ import annotations


class TokenizerControlMixin:
    fan_out = 0

    def update_control_communicator_fan_out(self, worker_count: int) -> None:
        self.fan_out = worker_count
