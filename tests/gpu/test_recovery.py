# SPDX-License-Identifier: Apache-2.0
"""A rank is killed during graph replay: its peers name it soon, and the same graph works again.

CPU ranks rehearse it without graphs; ranks may share one GPU.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.group.test_replacement import start
from tests.operators import STEPPED, Step, capture_body
from tests.ranks import on_ranks
from tests.recovery import PATIENCE, Survivors
from weft.errors import BadExpertId, GroupError

RANKS, ORDER = 4, (2, 0)  # the ranks die in this order
KINDS = ("pull", "push", "fp8", "send", "receiver", "sender", "oneshot")
SIZES = {"hidden": 512, "timeout": 60.0, "first_timeout": 60.0}


def runs(*rehearsed: str) -> list[Any]:
    gpu = [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in KINDS]
    return [*(("cpu", name) for name in rehearsed), *gpu]


def opened(group: weft.Group, name: str, **more: Any) -> Step:
    kind, sizes = STEPPED[name], {"max_tokens": 24, **SIZES, **more}
    if kind.name != "allreduce":
        sizes |= {"top_k": 4, "num_experts": 16}
    elif name == "oneshot":
        sizes |= {"missing": "drop"}
    return Step(kind.open(group, **sizes).__enter__(), 24, calls=20)


def die_during_replay(step: Step, replay: Callable[[], None], rank: int, folder: Path) -> float:
    """Kill `rank` during replay; return the time of death after the others noticed it."""
    group, moment = step.op.operator.group, folder / f"moment {rank}"
    group.barrier(timeout=PATIENCE)
    if group.rank == rank:

        def end() -> None:
            moment.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Timer(0.3, end).start()
    with pytest.raises(GroupError) as caught:
        replay_until(time.monotonic() + PATIENCE, step, replay)
    text, killed = str(caught.value), float(moment.read_text())
    print(f"rank {group.rank} raised {(time.monotonic() - killed) * 1e3:.1f} ms after: {text}")
    assert f"rank {rank} died" in text or "left its calls to recover" in text, text
    if torch.cuda.device_count() >= group.size:
        assert time.monotonic() - killed < 1.0
    return killed


def replay_until(deadline: float, step: Step, replay: Callable[[], None]) -> None:
    while time.monotonic() < deadline:
        replay()
        if step.device.type == "cuda":
            torch.cuda.synchronize()
        step.op.operator.check()


def hold(step: Step, replay: Callable[[], None], turn: int) -> None:
    step.reset(turn, step.op.operator.group.living)
    for _ in range(3):
        replay()
    if step.device.type == "cuda":
        torch.cuda.synchronize()
    assert int(step.wrong) == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("device", "name"), runs("pull", "send", "sender", "oneshot"))
@on_ranks(RANKS, dies=ORDER)
def test_a_graph_works_after_a_recovery(
    group: weft.Group, device: str, name: str, tmp_path: Path
) -> None:
    survivors, step = Survivors(group), opened(group, name)
    with step.op as op:
        replay = capture_body(group, step)
        hold(step, replay, 1)
        op.operator.check()
        for dies in ORDER:
            killed = die_during_replay(step, replay, dies, tmp_path)
            survivors.lose(dies)
            hold(step, replay, 2 + dies)
            print(f"{name}: rank {group.rank} right {time.monotonic() - killed:.3f} s after")
            if name != "oneshot":
                with pytest.raises(BadExpertId, match=f"expert of rank {dies}, which has exited"):
                    op.operator.check()
            hold(step, step, 6 + dies)  # eager calls, between replays
            hold(step, replay, 9 + dies)
            op.operator.check()
        survivors.barrier()


@pytest.mark.timeout(300)
@on_ranks(RANKS, "cpu", "cuda", dies=[2])
def test_a_graph_that_sums_over_all_returns_at_once(group: weft.Group, tmp_path: Path) -> None:
    survivors, step = Survivors(group), opened(group, "twoshot")
    with step.op:
        replay = capture_body(group, step)
        hold(step, replay, 1)
        die_during_replay(step, replay, 2, tmp_path)
        survivors.lose(2)
        began = time.monotonic()
        with pytest.raises(GroupError, match="rank 2 has exited, and this all-reduce sums"):
            replay_until(began + PATIENCE, step, replay)
        assert time.monotonic() - began < 10.0, "a graph that cannot be right waited for a rank"
        survivors.barrier()


VICTIM = 2


def newcomer(address: str, rank: int, name: str, kind: str) -> None:
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    group = weft.Group.for_replacement(rank=rank, size=RANKS, device=device, timeout=PATIENCE)
    step = opened(group, name)
    replay = capture_body(group, step)  # alone
    group.join(address, timeout=PATIENCE)
    hold(step, replay, 3)
    group.barrier()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("device", "name"), runs("pull"))
@on_ranks(RANKS, dies=[VICTIM])
def test_a_graph_works_after_a_replacement(
    group: weft.Group, device: str, name: str, tmp_path: Path
) -> None:
    step = opened(group, name)
    replay = capture_body(group, step)
    hold(step, replay, 1)
    die_during_replay(step, replay, VICTIM, tmp_path)
    result = group.recover(timeout=PATIENCE)
    assert result.dead == (VICTIM,)
    hold(step, replay, 2)
    meeting = group.open_meeting()
    began = time.monotonic()
    process = start(newcomer, meeting.address, VICTIM, name, device) if group.rank == 0 else None
    group.replace(meeting, timeout=PATIENCE)
    print(f"{name}: recovered in {result.seconds} s, replaced in {time.monotonic() - began:.1f} s")
    hold(step, replay, 3)
    group.barrier()
    assert process is None or process.wait(PATIENCE) == 0
