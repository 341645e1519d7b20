# SPDX-License-Identifier: Apache-2.0
"""Sleep of a plug-in's groups while an engine's memory is released."""

from __future__ import annotations

import logging

from weft.group import Group

_log = logging.getLogger(__name__)


def sleep(group: Group) -> None:
    """Free the memory of a group, unless it is asleep. Collective.

    A group of several hosts cannot sleep: it keeps its memory, with a warning.
    """
    if group.hosts > 1:
        if group.rank == 0:
            _log.warning("weft keeps its memory: a group of several hosts cannot sleep")
    elif not group.asleep:
        group.sleep()


def wake(group: Group) -> None:
    """Allocate the memory of a group again, unless it is awake. Collective."""
    if group.asleep:
        group.wake()
