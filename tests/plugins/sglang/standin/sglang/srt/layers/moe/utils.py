# SPDX-License-Identifier: Apache-2.0
"""Backends of the all-to-all."""

from __future__ import annotations

from enum import Enum
from typing import Any

from sglang.srt.runtime_context import STATE


class MoeA2ABackend(Enum):
    NONE = "none"
    DEEPEP = "deepep"
    FLASHINFER = "flashinfer"
    CUSTOMIZED = "customized"

    @classmethod
    def _missing_(cls, value: Any) -> Any:
        if value is None:
            return cls.NONE
        raise ValueError(f"No {cls.__name__} member for value {value}")

    def is_none(self) -> bool:
        return self is MoeA2ABackend.NONE

    def is_customized(self) -> bool:
        return self is MoeA2ABackend.CUSTOMIZED


def initialize_moe_config(server_args: Any) -> None:
    """Take the backend of the flags; this GPU is a Hopper."""
    STATE.backend = MoeA2ABackend(server_args.moe_a2a_backend)
    if server_args.enable_single_batch_overlap:
        raise ValueError("SBO (single batch overlap) is not supported on SM90 GPUs")


def get_moe_a2a_backend() -> MoeA2ABackend:
    return MoeA2ABackend(STATE.backend)
