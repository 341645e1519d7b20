# SPDX-License-Identifier: Apache-2.0
"""What graphs are captured, by phase."""

from __future__ import annotations

from dataclasses import dataclass


class Backend:
    FULL = "full"
    DISABLED = "disabled"


@dataclass
class PhaseConfig:
    backend: str = Backend.DISABLED
    max_bs: int | None = None
    bs: list[int] | None = None
