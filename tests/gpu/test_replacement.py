# SPDX-License-Identifier: Apache-2.0
"""A killed rank is replaced by a new process; the survivors replay the graph that they had.

Ranks may share one GPU. Times are printed (`pytest -s`).
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import weft
from tests.gpu.test_recovery import KINDS, RANKS, Captured, opened, until_it_raises
from tests.group.test_replacement import start
from weft.errors import GroupError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
VICTIM, SECONDS = 2, 100.0


def newcomer(address: str, rank: int, kind: str) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = weft.Group.join(address, rank=rank, size=RANKS, device=device, timeout=SECONDS)
    made = opened(group, kind)
    group.enter(timeout=SECONDS)
    captured = Captured(kind, made)
    captured.check(3, list(range(RANKS)))
    group.barrier()


def survive(group: weft.Group, kind: str) -> dict[str, float] | None:
    captured = Captured(kind, opened(group, kind))
    captured.check(1, list(range(RANKS)))
    group.barrier()
    if group.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(GroupError):
        until_it_raises(captured.replay)
    found = group.recover(timeout=SECONDS)
    assert found.dead == (VICTIM,)
    captured.check(2, list(found.living))
    meeting = group.open_meeting()
    began = time.monotonic()
    process = start(newcomer, meeting.address, VICTIM, kind) if group.rank == 0 else None
    group.replace(meeting, timeout=SECONDS)
    took = time.monotonic() - began
    captured.draw(0)
    captured.rounds()  # the new process warms up
    torch.cuda.synchronize()
    group.barrier()
    group.barrier()  # and captures its graph
    captured.check(3, list(range(RANKS)))
    group.barrier()
    assert process is None or process.wait(SECONDS) == 0
    return {"recover": found.seconds, "replace": took}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_graph_is_right_with_a_replacement(kind: str) -> None:
    results = weft.launch(
        survive, kind, ranks=RANKS, device="cuda", tolerate_deaths=True, timeout=250.0
    )
    assert results[VICTIM] is None
    print(kind, results)
