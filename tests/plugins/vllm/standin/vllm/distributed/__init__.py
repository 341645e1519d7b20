# SPDX-License-Identifier: Apache-2.0
"""The expert-parallel group."""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import GroupCoordinator


def get_ep_group() -> Any:
    return GroupCoordinator.of_experts
