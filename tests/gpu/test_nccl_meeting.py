# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet through NCCL, which itself does not report a peer's death."""

import os
import re
import signal
from typing import Any

import pytest

from tests.baseline import call_outcome
from weft.errors import RendezvousFailed
from weft.group import hosts
from weft.group.group import Group
from weft.launcher.launch import launch

pytestmark = pytest.mark.gpu(2)  # NCCL needs a GPU for each rank


def die_on_the_way(group, victim):
    pg = group.process_group()
    if group.rank == victim:
        system: Any = hosts
        system.meet = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    return call_outcome(Group.from_torch, pg, timeout=100.0)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_while_meeting_is_named_at_once(victim):
    reported = launch(die_on_the_way, victim, ranks=2, device="cuda", tolerate_deaths=True)
    assert reported[victim] is None
    kind, text, seconds = reported[1 - victim]
    assert kind == RendezvousFailed.__name__
    assert re.search(rf"rank {victim} \(pid \d+\) died before all ranks had connected", text)
    assert seconds < 40.0
