# SPDX-License-Identifier: Apache-2.0
"""A rank is killed during graph replay: its peers name it soon, and the same graph works again.

CPU ranks rehearse it without graphs; ranks may share one GPU.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.group.test_replacement import nap, start
from tests.moe.test_batch_invariance import EXPERTS, LAYERS
from tests.operators import STEPPED, Opened, Step, capture_body
from tests.ranks import on_ranks
from tests.recovery import PATIENCE, Survivors
from tests.rounds import bits
from weft.errors import BadExpertId, GroupError
from weft.group.meeting import Meeting
from weft.moe import balance

RANKS, ORDER = 4, (2, 0)  # the ranks die in this order
TOKENS = 24
KINDS = ("pull", "push", "fp8", "send", "receiver", "sender", "oneshot")
MODEL = "model"
SIZES = {"hidden": 512, "timeout": 60.0, "first_timeout": 60.0}
# Each expert is on two ranks, so that one may go.
TWICE = balance([1.0] * EXPERTS, RANKS, replicas=EXPERTS)


def runs(*rehearsed: str) -> list[Any]:
    names = dict.fromkeys((*rehearsed, *KINDS))
    gpu = [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in names]
    return [*(("cpu", name) for name in rehearsed), *gpu]


def opened(group: weft.Group, name: str, calls: int = 20, **more: Any) -> Step:
    kind, sizes = STEPPED[name], {"max_tokens": TOKENS, **SIZES, **more}
    if kind.name != "allreduce":
        sizes |= {"top_k": 4, "num_experts": 16}
    elif name == "oneshot":
        sizes |= {"missing": "drop"}
    return Step(kind.open(group, **sizes).__enter__(), TOKENS, calls=calls)


class Model:
    """Four layers in two workspaces, an exchange and an all-reduce, called one after the other.

    The layers are batch-invariant, so neither a death nor a replacement changes a bit of a token.
    """

    def __init__(self, group: weft.Group) -> None:
        known, device = LAYERS["fp8"], group.device
        own: dict[str, Any] = {
            "shared": known.shared(device),
            "correction": known.correction(device),
        }
        options = {
            **own,
            "fp8": True,
            "batch_invariant": True,
            "replicas": TWICE,
            "missing": "drop",
        }
        options |= {"max_tokens": TOKENS, "timeout": 60.0, "first_timeout": 60.0}

        def weights(experts: tuple[int, ...]) -> weft.moe.ExpertWeights:
            return known.weights(experts, device)

        first = weft.MoE(group, known.config, weights, mode="throughput", **options)
        options |= {"mode": "low_latency"}
        self.leases = [
            weft.lease(group, weft.MoE, known.config, weights, **options) for _ in range(2)
        ]
        leased = [lease.operator for lease in self.leases]
        self.layers = [first, leased[0], first.sibling(weights, **own), leased[1]]
        self.steps = [opened(group, name, calls=2) for name in ("pull", "oneshot")]
        self.op, self.device = Opened(first.exchange), device
        source = torch.Generator().manual_seed(group.rank)
        self.x = torch.randn((TOKENS, known.config.hidden), generator=source)
        self.x = self.x.to(device, torch.bfloat16)
        self.logits = (torch.randn((len(self.layers), TOKENS, EXPERTS), generator=source) * 2).to(
            device
        )
        self.outs = [torch.empty_like(self.x) for _ in self.layers]
        self.expected = []
        rows = self.x
        for logits in self.logits:
            alone = [known.expected(rows[t : t + 1], logits[t : t + 1]) for t in range(TOKENS)]
            rows = torch.stack(alone)
            self.expected.append(rows)

    def reset(self, turn: int, living: Iterable[int]) -> None:
        for step in self.steps:
            step.reset(turn, living)

    def __call__(self) -> None:
        rows = self.x
        for layer, logits, out in zip(self.layers, self.logits, self.outs, strict=True):
            out.fill_(float("nan"))
            rows = layer(rows, logits, out=out)
        for step in self.steps:
            step()

    @property
    def wrong(self) -> int:
        """Return the number of wrong bytes of the last call, and of wrong words since `reset`."""
        pairs = zip(self.outs, self.expected, strict=True)
        wrong = sum(int((bits(out) != bits(expected)).sum()) for out, expected in pairs)
        for layer in self.layers:
            layer.check()
        return wrong + sum(int(step.wrong) for step in self.steps)


def open_subject(group: weft.Group, name: str) -> Step | Model:
    return Model(group) if name == MODEL else opened(group, name)


def die_during_replay(
    step: Step | Model, replay: Callable[[], None], rank: int, folder: Path
) -> float:
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


def replay_until(deadline: float, step: Step | Model, replay: Callable[[], None]) -> None:
    while time.monotonic() < deadline:
        replay()
        if step.device.type == "cuda":
            torch.cuda.synchronize()
        step.op.operator.check()


def hold(step: Step | Model, replay: Callable[[], None], turn: int) -> None:
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
    step = open_subject(group, name)
    replay = capture_body(group, step)  # alone
    group.join(address, timeout=PATIENCE)
    hold(step, replay, 3)
    nap(group)
    hold(step, replay, 4)
    group.barrier()


def replay_until_it_waits(
    group: weft.Group, meeting: Meeting, step: Step | Model, replay: Callable[[], None]
) -> int:
    """Run rounds of the survivors until the new process waits for them; return their number."""
    rounds, deadline = 0, time.monotonic() + PATIENCE
    while True:
        hold(step, replay, 10 + rounds)
        rounds += 1
        waiting = VICTIM in meeting.find_waiting_ranks() if group.rank == meeting.hub else None
        if group.all_gather(waiting)[meeting.hub]:
            return rounds
        assert time.monotonic() < deadline, "the new process has not come"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("device", "name"), runs("pull", MODEL))
@on_ranks(RANKS, dies=[VICTIM])
def test_a_graph_works_after_a_replacement(
    group: weft.Group, device: str, name: str, tmp_path: Path
) -> None:
    """The survivors replay their graph while the new process builds and captures alone."""
    step = open_subject(group, name)
    replay = capture_body(group, step)
    hold(step, replay, 1)
    killed = die_during_replay(step, replay, VICTIM, tmp_path)
    result = group.recover(timeout=PATIENCE)
    assert result.dead == (VICTIM,)
    hold(step, replay, 2)
    right = time.monotonic() - killed
    meeting = group.open_meeting()
    process = start(newcomer, meeting.address, VICTIM, name, device) if group.rank == 0 else None
    rounds = replay_until_it_waits(group, meeting, step, replay)
    began = time.monotonic()
    group.replace(meeting, timeout=PATIENCE)
    paused = time.monotonic() - began
    hold(step, replay, 3)
    nap(group)
    hold(step, replay, 4)
    print(
        f"{name}: rank {group.rank} right {right:.3f} s after the death, {rounds} rounds until the "
        f"new process waited, all ranks {began - killed:.1f} s after it, paused {paused:.3f} s"
    )
    group.barrier()
    assert process is None or process.wait(PATIENCE) == 0
