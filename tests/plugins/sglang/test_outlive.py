# SPDX-License-Identifier: Apache-2.0
"""A server of the stand-in continues after one of its ranks is killed."""

import os
import signal
import time
from functools import partial
from typing import Any

import pytest

import weft
from tests.plugins.sglang.server import leave, sglang
from tests.plugins.sglang.test_elastic import replicated
from tests.plugins.standins import CLOSE, Kept, tokens
from weft.errors import SetupError
from weft.launcher.launch import launch
from weft.plugins.faults import SETTLE_SECONDS, Watch
from weft.plugins.sglang import engine

run = partial(launch, tolerate_deaths=True, timeout=3000.0)


def outlive_rank(group: weft.Group, form: str, way: str, when: str) -> dict[str, Any]:
    """Rank 1 is killed before, in or after a pass, or stops; the others continue."""
    os.environ["WEFT_SGLANG_TIMEOUT"] = "1.5" if when == "stopped" else "600"
    server = replicated(group, form=form, ep_dispatch_algorithm=way)
    scheduler, errors = sglang().Scheduler(), []

    def die(*now: str) -> None:
        if when in now and group.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP if when == "stopped" else signal.SIGKILL)

    for number in range(6):
        assert scheduler.get_next_batch_to_run(None, None) == "batch"
        faulty, count = number == 1, (number + group.rank) % 4
        die(*["exchange"] * faulty)
        counts = [row[0] for row in sglang().exchange([count, 7, 0], group.size)]
        die(*["pass", "stopped"] * faulty)
        if faulty:
            server.runner.model.blocks[1].register_forward_pre_hook(lambda *_: die("layer"))
        errors.append(server.distance(tokens(count, 10 * number + group.rank), counts, "qwen3"))
        die(*["after"] * faulty)
    blocks = engine._blocks
    assert blocks is not None
    assert blocks.watch is not None
    assert max(errors) < CLOSE
    result = {
        "active": sglang().ElasticEPStateManager.instance().active_ranks_cpu.tolist(),
        "reported": scheduler.reported,
        "moved": server.runner.eplb_manager.reason,
        "watched": blocks.watch._thread.is_alive(),
    }
    leave()
    return result


@pytest.mark.parametrize(
    ("form", "way", "when"),
    [
        *(("block", "static", when) for when in ("exchange", "pass", "after", "stopped")),
        ("block", "dynamic", "layer"),
        ("dispatcher", "static", "layer"),
    ],
)
def test_a_server_outlives_a_rank(form: str, way: str, when: str) -> None:
    """The others' tokens are as without a death, also in the interrupted pass.

    A rank that stops in a pass is killed by the others after the deadline.
    """
    active = [1, 0, 1, 1]
    expected = {"active": active, "reported": [active], "moved": "rank 1 has died", "watched": True}
    result = run(outlive_rank, form, way, when, ranks=4)
    assert result == [expected, None, expected, expected]


def shrink(group: weft.Group) -> str:
    """Ranks 0 and 2 have the only replicas of half of the experts."""
    server = replicated(group)
    for victim in (0, 2):
        if group.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for number in range(3):
                counts = [row[0] for row in sglang().exchange([2, 7, 0], group.size)]
                assert server.distance(tokens(2, number), counts, "qwen3") < CLOSE
        except SetupError as error:
            return f"{victim}: {error}"
    return "served"


def test_experts_that_died_with_both_replicas_end_the_server() -> None:
    result = run(shrink, ranks=4)
    text = "2: without rank 0, 2, 8 experts have no replica: 0 of layer 0,"
    assert [result[rank].startswith(text) for rank in (1, 3)] == [True, True]


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


def outlast(group: weft.Group) -> list[str]:
    """Rank 1 is killed; the engine ends this rank before the server gives up."""
    kept = Kept()
    watch = Watch(group, end_server=lambda: None)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + SETTLE_SECONDS
    while not kept.lines and time.monotonic() < end:
        time.sleep(0.01)
    lines = list(kept.lines)
    watch.close()
    return lines


def lose_parent(group: weft.Group) -> list[str]:
    """vLLM's EngineCore is killed while its worker, which is the rank, still runs."""
    kept, watch = Kept(), Watch(group, end_server=lambda: None)
    watch._parent = 1 << 30
    watch._thread.join(10)
    return kept.lines


def test_the_process_that_ended_first_is_named_at_once() -> None:
    """vLLM ends all engine cores as soon as one has died, and does not name it."""
    assert run(outlast, ranks=2)[0] == ["rank 0 of 2: the process of rank 1 has ended"]
    ((line,),) = launch(lose_parent, ranks=1, device="threads")
    assert f"process {1 << 30}, which started this rank, has ended" in line
