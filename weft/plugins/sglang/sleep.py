# SPDX-License-Identifier: Apache-2.0
"""Sleep of weft's groups between release_memory_occupation and resume_memory_occupation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.group import Group
from weft.plugins import sleep
from weft.plugins.engine_api import ExpectedAPI
from weft.plugins.sglang.hooks import SRT, Hook

_UPDATER = SRT + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def create_hooks(get_group: Callable[[], Group | None]) -> tuple[Hook, ...]:
    """Return hooks that put a group to sleep while SGLang has released memory of any tag.

    SGLang runs no forward pass before all tags are resumed.
    """

    def release(result: object, updater: Any, recv_req: object) -> None:
        group = get_group()
        if group is not None and updater.offload_tags:
            sleep.sleep(group)

    def resume(result: object, updater: Any, recv_req: object) -> None:
        group = get_group()
        if group is not None and not updater.offload_tags:
            sleep.wake(group)

    return (
        Hook(
            f"{_UPDATER}.release_memory_occupation",
            "self, recv_req",
            function=release,
            kind="AFTER",
        ),
        Hook(
            f"{_UPDATER}.resume_memory_occupation", "self, recv_req", function=resume, kind="AFTER"
        ),
    )


EXPECTED_API = (ExpectedAPI(_UPDATER, attributes="offload_tags"),)
