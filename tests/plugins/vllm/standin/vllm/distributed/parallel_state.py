# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks."""

from __future__ import annotations

from typing import Any


class GroupCoordinator:
    of_experts: GroupCoordinator

    def __init__(self, cpu_group: Any) -> None:
        self.cpu_group = cpu_group
