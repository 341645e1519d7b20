# SPDX-License-Identifier: Apache-2.0
"""A rank is killed in the middle of a replayed graph: the others notice it soon.

The deadline is a minute, so an error within a second has not waited for it. What was measured is
printed (`pytest -s`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import weft
from tests.operators import KINDS, Kind
from weft.bench.harness import capture, settle
from weft.errors import PeerDied, RankFailed
from weft.grouping.operator import ExpertGroups

pytestmark = pytest.mark.gpu
CALLS = 50
SEND = Kind("alltoall", {"combine": "push", "split_phase": True})  # and ExpertGroups


def captured(op, group: weft.Group) -> torch.cuda.CUDAGraph:
    """A graph of `CALLS` rounds."""
    if op.kind is SEND:
        op.groups = groups = ExpertGroups(op.made)  # as long as the graph
        y = torch.ones(groups._y_shape, dtype=torch.bfloat16, device=group.device)

    def rounds(count: int) -> None:
        for _ in range(count):
            got = op.begin(1.0)
            if op.kind is not SEND:
                op.end(got)
                continue
            groups.gather(got)
            groups.send(y)
            op.made.combine_recv()

    rounds(1)
    settle(group)
    graph = capture(lambda: rounds(CALLS))
    settle(group)
    return graph


def killed(group: weft.Group, kind: str, folder: str) -> None:
    with (KINDS | {"send": SEND})[kind].open(group, timeout=60.0, first_timeout=60.0) as op:
        graph = captured(op, group)
        moment = Path(folder, "moment")
        if group.rank == 1:

            def end() -> None:
                moment.write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)

            threading.Timer(1.0, end).start()
        with pytest.raises(PeerDied) as caught:
            replay_for_ever(op, graph)
        waited = time.monotonic() - float(moment.read_text())
        text = str(caught.value)
        Path(folder, str(group.rank)).write_text(f"{waited} {text}")
    # The context is whole, and a new group of the living is right.
    assert float(torch.ones(4, device=group.device).sum()) == 4.0


def replay_for_ever(op, graph: torch.cuda.CUDAGraph) -> None:
    while True:
        graph.replay()
        torch.cuda.synchronize()
        op.made.check()


@pytest.mark.parametrize(
    "kind", ["pull", "fp8", "send", "receiver", "sender", "oneshot", "twoshot"]
)
def test_a_rank_that_is_killed_in_a_replay_is_named_within_a_tenth_of_a_second(
    ranks, kind, tmp_path
):
    count = max(2, min(4, torch.cuda.device_count()))
    with pytest.raises(RankFailed, match=f"rank 1 of {count} died"):
        ranks(count, "cuda")(killed, kind, str(tmp_path))
    for rank in {*range(count)} - {1}:
        waited, text = (tmp_path / str(rank)).read_text().split(" ", 1)
        print(f"{kind}: rank {rank} of {count} raised {float(waited) * 1e3:.1f} ms after the kill")
        assert "rank 1 died" in text
        assert float(waited) < 1.0
