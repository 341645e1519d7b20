# SPDX-License-Identifier: Apache-2.0
"""A server of the stand-in goes on when one of its ranks is killed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

import weft
from tests.plugins.sglang.server import alone, leave, tokens
from tests.plugins.sglang.test_elastic import replicated
from tests.plugins.standins import CLOSE, Kept, far
from weft.errors import SetupError
from weft.memory.launch import launch
from weft.plugins.faults import PAUSE, Watch


def lasting(group: weft.Group, form: str, way: str, when: str) -> dict[str, Any]:
    """Rank 1 is killed before, in or after a pass, or stops; the others go on, and see the same."""
    os.environ["WEFT_SGLANG_TIMEOUT"] = "3" if when == "stopped" else "600"
    server = replicated(group, form=form, ep_dispatch_algorithm=way)
    from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.dp_attn import exchange

    scheduler, errors = Scheduler(), []

    def die(how: signal.Signals = signal.SIGKILL) -> None:
        if group.rank == 1:
            os.kill(os.getpid(), how)

    def serve(number: int, fault: str = "") -> None:
        assert scheduler.get_next_batch_to_run(None, None) == "batch"
        count = (number + group.rank) % 4
        if fault == "exchange":
            die()
        counts = [row[0] for row in exchange([count, 7, 0], group.size)]
        if fault == "pass":
            die()
        if fault == "stopped":
            die(signal.SIGSTOP)
        if fault == "layer":
            server.runner.model.blocks[1].register_forward_pre_hook(lambda *_: die())
        x = tokens(count, 10 * number + group.rank)
        errors.append(far(server.step(x, counts), alone(x, "qwen3")))
        if fault == "after":
            die()

    serve(0)
    serve(1, when)
    for number in range(2, 6):
        serve(number)
    from weft.plugins.sglang import engine

    assert engine._blocks is not None
    assert engine._blocks.watch is not None
    found = {
        "far": max(errors),
        "passes": len(errors),
        "active": ElasticEPStateManager.instance().active_ranks_cpu.tolist(),
        "reported": scheduler.reported,
        "moved": server.runner.eplb_manager.reason,
        "watched": engine._blocks.watch._thread.is_alive(),
    }
    leave()
    return found


@pytest.mark.parametrize(
    ("form", "way", "when"),
    [
        ("block", "static", "exchange"),
        ("block", "static", "pass"),
        ("block", "dynamic", "layer"),
        ("block", "static", "after"),
        ("block", "static", "stopped"),
        ("dispatcher", "static", "layer"),
    ],
)
def test_a_server_outlives_a_rank(form: str, way: str, when: str) -> None:
    """The others' tokens are what they are without a death, in the pass that broke, too.

    A rank that stops in a pass is killed by the others after the deadline.
    """
    found = launch(lasting, form, way, when, ranks=4, tolerate_deaths=True, timeout=3000.0)
    assert found[1] is None
    for said in (found[0], *found[2:]):
        assert said["far"] < CLOSE
        assert said["passes"] == 6
        assert said["active"] == [1, 0, 1, 1]
        assert said["reported"] == [[1, 0, 1, 1]]
        assert said["moved"] == "rank 1 has died"
        assert said["watched"]


def shrinking(group: weft.Group) -> str:
    """Ranks 0 and 2 have the only replicas of half of the experts."""
    server = replicated(group)
    from sglang.srt.managers.scheduler_components.dp_attn import exchange

    for victim in (0, 2):
        if group.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for number in range(3):
                counts = [row[0] for row in exchange([2, 7, 0], group.size)]
                x = tokens(2, number)
                assert far(server.step(x, counts), alone(x, "qwen3")) < CLOSE
        except SetupError as error:
            return str(error)
    return "served"


def test_experts_that_died_with_both_replicas_end_the_server() -> None:
    """In words; the first of the two deaths did not."""
    found = launch(shrinking, ranks=4, tolerate_deaths=True, timeout=3000.0)
    for said in (found[1], found[3]):
        assert said.startswith("with rank 0, 2 gone no replica is left of 8 experts: 0 of layer 0,")


def unrecovered(group: weft.Group) -> dict[str, Any]:
    """Rank 1 is killed, and the others make no call that fails for a while."""
    ended: list[bool] = []
    kept = Kept()
    end = lambda: ended.append(True)  # noqa: E731
    patient = Watch(group, end=end, grace=3000.0, recovers=True)
    hasty = Watch(group, end=end, grace=0.5, recovers=True)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hasty._thread.join()
    group.recover()
    later = Watch(group, end=end, grace=0.0, recovers=True)
    group.barrier()
    time.sleep(4 * PAUSE)
    found = {"ended": len(ended), "lines": kept.lines, "watch": patient._thread.is_alive()}
    found["later"] = later._thread.is_alive()
    for each in (patient, hasty, later):
        each.close()
    return found


def test_a_server_that_does_not_recover_is_ended() -> None:
    """A rank may wait in a collective of another library; one that went on is left alone."""
    found = launch(unrecovered, ranks=3, tolerate_deaths=True, timeout=3000.0)
    for said in (found[0], found[2]):
        assert said["ended"] == 1
        assert any(
            "and the others have 0.5 s to go on without it" in line for line in said["lines"]
        )
        assert said["watch"]
        assert said["later"]


def ended_soon(group: weft.Group) -> list[str]:
    """Rank 1 is killed; the engine ends this rank long before the server is given up."""
    kept = Kept()
    watch = Watch(group, end=lambda: None)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + PAUSE
    while not kept.lines and time.monotonic() < end:
        time.sleep(0.01)
    lines = list(kept.lines)
    watch.close()
    return lines


def test_the_rank_that_ended_first_is_named_at_once() -> None:
    """vLLM ends all engine cores as soon as one is gone, and none would say which it was."""
    found = launch(ended_soon, ranks=2, tolerate_deaths=True, timeout=600.0)
    assert found[0] == ["rank 0 of 2: the process of rank 1 has ended"]


def test_a_rank_whose_parent_ended_names_itself() -> None:
    """vLLM's EngineCore may be killed while its worker, which is the rank, still runs."""

    def body(group: weft.Group) -> list[str]:
        kept = Kept()
        watch = Watch(group, end=lambda: None)
        watch._parent = 1 << 30
        watch._thread.join(10)
        return kept.lines

    (lines,) = launch(body, ranks=1, device="threads")
    assert lines == [
        f"rank 0 of 1: process {1 << 30}, which started this rank, has ended; the engine ends this "
        "rank with it"
    ]
