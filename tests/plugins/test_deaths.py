# SPDX-License-Identifier: Apache-2.0
"""A dead rank is reported, and ends the server of either engine's stand-in."""

import os
import re
import signal
import time
from functools import partial
from typing import Any

import pytest

import weft
from tests.plugins.sglang.server import Server
from tests.plugins.standins import Kept, error_of, tokens
from tests.plugins.vllm.workers import Worker
from weft.launcher.launch import launch
from weft.plugins import faults
from weft.plugins.faults import SETTLE_SECONDS, Watch
from weft.plugins.sglang import engine as sglang
from weft.plugins.vllm import engine as vllm

run = partial(launch, tolerate_deaths=True, timeout=3000.0)


def lose_last_rank(group: weft.Group, name: str, hosts: int) -> dict[str, Any]:
    """Kill the last rank between two steps."""
    os.environ[f"WEFT_{name.upper()}_TIMEOUT"] = "600"
    os.environ["WEFT_HOST"] = f"{hosts * group.rank // group.size}"
    ended: list[bool] = []
    end_server = lambda: ended.append(True)  # noqa: E731
    setattr(sglang, "create_server_terminator", lambda parent: end_server)  # noqa: B010
    setattr(vllm, "end_worker", end_server)  # noqa: B010
    faults.GRACE_SECONDS = 0.0
    server: Any = Server(group, "glm4") if name == "sglang" else Worker(group, "block")
    engine: Any = {"sglang": sglang, "vllm": vllm}[name]
    kept, last, counts = Kept(), group.size - 1, [2] * group.size
    server.step(tokens(2, group.rank), counts)
    if group.rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    blocks, error = engine._blocks, ""
    near = last in blocks.group.host_ranks[blocks.group.host]
    if name == "vllm":  # also while no code of weft runs
        blocks.watch._thread.join()
    while not error:
        error = error_of(server.step, tokens(2, group.rank), counts)
    if near:
        blocks.watch._thread.join()
        assert ended == [True]
    return {"error": error, "broken": bool(blocks.is_broken), "lines": kept.lines}


@pytest.mark.parametrize(
    ("name", "hosts", "count"), [("sglang", 1, 2), ("sglang", 2, 4), ("vllm", 1, 2)]
)
def test_a_dead_rank_is_reported_and_ends_the_server(name: str, hosts: int, count: int) -> None:
    """Long before the deadline steps raise, a log line names the rank, and the server ends.

    Of two hosts, one sees the process end, and the other one the rail.
    """
    *others, near, _ = run(lose_last_rank, name, hosts, ranks=count)
    assert any(f"the process of rank {count - 1} has ended" in line for line in near["lines"])
    assert near["broken"]
    if hosts == 1:
        assert near["error"].startswith("PeerDied: rank 0, dispatch: rank 1 died")
    for result in others:
        assert re.match("RailFailed.*rank 3|PeerLeft.*rank 3", result["error"])


def wait_for_recovery(group: weft.Group) -> tuple[int, list[str], list[bool]]:
    """Rank 1 is killed, and no other rank makes a failing call for some time."""
    ended: list[bool] = []
    kept = Kept()

    def watch(grace_seconds: float) -> Watch:
        end = lambda: ended.append(True)  # noqa: E731
        return Watch(group, end_server=end, grace_seconds=grace_seconds, can_recover=True)

    patient, hasty = watch(3000.0), watch(0.5)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hasty._thread.join()
    group.recover()
    later = watch(0.0)
    group.barrier()
    time.sleep(2 * SETTLE_SECONDS)
    alive = [each._thread.is_alive() for each in (patient, later)]
    for each in (patient, hasty, later):
        each.close()
    return len(ended), kept.lines, alive


def test_a_server_that_does_not_recover_is_ended() -> None:
    """A rank may wait in another library's collective; a rank that continued is left alone."""
    first, _, last = run(wait_for_recovery, ranks=3)
    for ended, lines, alive in (first, last):
        assert (ended, alive) == (1, [True, True])
        assert any("and the other ranks have 0.5 s to recover" in line for line in lines)


def lose_parent(group: weft.Group) -> list[str]:
    """vLLM's EngineCore is killed while its worker, which is the rank, still runs."""
    kept, watch = Kept(), Watch(group, end_server=lambda: None)
    watch._parent = 1 << 30
    watch._thread.join()
    return kept.lines


def test_an_ended_parent_is_named() -> None:
    """vLLM ends all engine cores as soon as one has died, and does not name it."""
    ((line,),) = launch(lose_parent, ranks=1, device="threads")
    assert f"process {1 << 30}, which started this rank, has ended" in line
