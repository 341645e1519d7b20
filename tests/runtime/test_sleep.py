# SPDX-License-Identifier: Apache-2.0
"""A group sleeps and wakes: its memory is freed, and the same objects continue bit by bit."""

import errno
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from tests.baseline import die, raises_soon, resource_counts, shares_mapped
from tests.moe.layers import CONFIGS, Case
from tests.operators import KINDS, STEPPED, Step
from tests.ranks import on_ranks
from tests.recovery import Survivors
from weft.errors import (
    BadExpertId,
    CreationFailed,
    OutOfOrder,
    PeerLeft,
    RendezvousFailed,
    WeftError,
)
from weft.heap import Heap
from weft.heap.cpu import HostShares
from weft.heap.local import MIN_BYTES, allocate_local

RANKS, TOKENS = 3, 6
ASLEEP = r"call group\.wake\(\) first"


def open_step(group: weft.Group, name: str) -> Step:
    kind, sizes = STEPPED[name], dict[str, Any]()
    if kind.name != "allreduce":
        sizes |= {"num_experts": 12}
    elif name == "oneshot":
        sizes |= {"missing": "drop"}
    return Step(kind.open(group, max_tokens=TOKENS, **sizes), TOKENS, calls=3)


def play(step: Step, turn: int) -> None:
    step.reset(turn, step.op.operator.group.living)
    step()
    step.check()


def shares_open() -> int:
    """Return the number of descriptors of shares."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum("weft-share" in os.readlink(link) for link in links if os.path.islink(link))


def addresses(steps: list[Step]) -> list[int]:
    heaps = [step.op.operator.heap for step in steps]
    return [heap.address(rank) for heap in heaps for rank in heap.group.living]


def cycle(group: weft.Group, steps: list[Step], count: int) -> None:
    for turn, step in enumerate(steps):
        play(step, turn)
    before, threads = addresses(steps), threading.active_count()
    files, shares, mappings = resource_counts()
    for turn in range(count):
        group.sleep()
        assert group.asleep
        # With neither mappings nor descriptors in any process, the kernel has freed the memory.
        assert (shares_mapped(), shares_open()) == (0, 0)
        with pytest.raises(OutOfOrder, match=ASLEEP):
            steps[turn % len(steps)]()
        group.wake()
        assert not group.asleep
        assert addresses(steps) == before
        for step in steps:
            play(step, turn)
    counts = resource_counts()
    assert (*counts[:2], threading.active_count()) == (files, shares, threads)
    assert counts[2] - mappings < count / 2  # those of other libraries vary by a few
    group.barrier()


@on_ranks(RANKS, "cpu")
def test_every_operator_continues_after_a_sleep(group: weft.Group) -> None:
    cycle(group, [open_step(group, name) for name in STEPPED], 20)


@pytest.mark.slow
@on_ranks(RANKS, "cpu")
def test_a_thousand_sleeps_leave_nothing(group: weft.Group) -> None:
    cycle(group, [open_step(group, name) for name in ("pull", "sender", "oneshot")], 1000)


def call(method: Callable[[], None], name: str, before: Callable[[], None]) -> Callable[[], None]:
    """Return `method` of a class, preceded by `before`; `name` is only for the error."""

    def run(*args: Any) -> None:
        before()
        method(*args)

    run.__name__ = name
    return run


# Where a rank dies: step of a class, and the call of the others that names it.
PLACES: dict[str, tuple[type[Any] | None, str, str]] = {
    "before sleep": (None, "", "sleep"),
    "during sleep": (HostShares, "release", "sleep"),
    "asleep": (None, "", "wake"),
    "while it allocates": (HostShares, "create", "wake"),
    "while it maps": (HostShares, "map", "wake"),
    "while it initialises": (weft.AllToAll, "_write_share", "wake"),
}


@pytest.mark.parametrize("place", PLACES)
@on_ranks(RANKS, "cpu", dies=[1])
def test_a_rank_that_dies_is_named_and_the_others_go_on(group: weft.Group, place: str) -> None:
    owner, method, fails = PLACES[place]
    steps = [open_step(group, "pull"), open_step(group, "oneshot")]
    for step in steps:
        play(step, 1)
    before = addresses(steps)
    if fails == "wake":
        group.sleep()
    group.barrier()
    if group.rank == 1:
        if owner is None:
            die()
        setattr(owner, method, call(getattr(owner, method), method, die))
    with raises_soon(RendezvousFailed, "rank 1"):
        group.sleep() if fails == "sleep" else group.wake()
    Survivors(group).lose(1)
    # The group is asleep if a survivor was.
    assert len({*filter(None.__ne__, group.all_gather(group.asleep))}) == 1
    assert group.asleep == (place not in ("before sleep", "while it initialises"))
    if group.asleep:
        assert (shares_mapped(), shares_open()) == (0, 0)
        with pytest.raises(OutOfOrder, match=ASLEEP):
            steps[0]()
        group.wake()
    for turn in range(3):
        for step in steps:
            step.reset(turn, group.living)
            step()
            torch.testing.assert_close(int(step.wrong), 0)
        group.sleep()
        group.wake()
    assert addresses(steps) == [at for i, at in enumerate(before) if i % RANKS != 1]


@on_ranks(RANKS, "cpu")
def test_what_a_group_refuses_while_asleep(group: weft.Group) -> None:
    step, heap = open_step(group, "pull"), Heap.create(group, 4096)
    operator = step.op.operator
    with pytest.raises(OutOfOrder, match=r"is awake: call group\.sleep\(\) before"):
        group.wake()
    group.sleep()
    refused: list[Callable[[], object]] = [
        group.sleep,
        lambda: Heap.create(group, 4096),
        lambda: weft.AllReduce(group, max_tokens=1, hidden=128),
        lambda: heap.tensor((1,), torch.uint8),
        lambda: operator.heap.header(0),
        lambda: heap.write(0, 0, b"x"),
        lambda: allocate_local(group, [((MIN_BYTES,), torch.uint8)]),
        operator.history,
        operator.output,
        operator.abort,
        step,
    ]
    for attempt in refused:
        with pytest.raises(OutOfOrder, match=ASLEEP):
            attempt()
    operator.check()
    assert not operator.broken
    assert (operator.count_finished_rounds(), operator.read_progress(0)) == (0, None)
    assert group.all_gather(group.rank) == [0, 1, 2]
    group.wake()
    assert heap.tensor((4096,), torch.uint8).count_nonzero() == 0
    play(step, 1)
    group.barrier()


@on_ranks(RANKS, "cpu")
def test_a_rank_without_memory_is_named_and_wake_can_be_repeated(group: weft.Group) -> None:
    steps = [open_step(group, "pull"), open_step(group, "sender")]
    group.sleep()
    shares: Any = steps[1].op.operator.heap._shares
    create, failures = shares.create, [group.rank == 1]

    def fail() -> None:
        if failures.pop():
            raise OSError(errno.ENOMEM, "no memory")
        create()

    shares.create = fail
    with pytest.raises(CreationFailed, match=r"to wake a heap failed on rank 1 of 3: OSError"):
        group.wake()
    assert group.asleep
    assert (shares_mapped(), shares_open()) == (0, 0)
    del shares.create
    group.wake()
    for step in steps:
        play(step, 1)
    group.barrier()


@on_ranks(RANKS, "cpu")
def test_an_operator_that_a_rank_closed_while_asleep_is_left_by_all(group: weft.Group) -> None:
    kept, closed, gone = (open_step(group, name) for name in ("pull", "sender", "push"))
    heap = Heap.create(group, 4096)
    counts = resource_counts()
    group.sleep()
    gone.op.operator.close()
    if group.rank == 1:
        closed.op.operator.close()
        heap.close()
    group.wake()
    play(kept, 1)
    with pytest.raises(OutOfOrder, match="closed"):
        heap.tensor((1,), torch.uint8)
    heap.close()
    for _ in range(2):  # and again after a recovery and the next sleep
        with pytest.raises(WeftError) as caught:
            closed()
        if group.rank != 1:
            assert isinstance(caught.value, PeerLeft)
            assert "while the group was asleep" in str(caught.value), str(caught.value)
        group.recover(timeout=600.0)
        play(kept, 1)
        group.sleep()
        group.wake()
    play(kept, 2)
    closed.op.operator.close()
    assert resource_counts()[1] == counts[1] - 3 * RANKS
    group.barrier()


@pytest.mark.parametrize("method", ["release", "create"])
@on_ranks(2, "cpu")
def test_objects_that_a_rank_closes_meanwhile_do_not_stop_the_others(
    group: weft.Group, method: str
) -> None:
    kept, *others = (open_step(group, name) for name in ("pull", "push", "oneshot"))
    play(kept, 1)
    group.barrier()

    def close() -> None:
        for step in others:
            step.op.operator.close()

    if group.rank == 1:
        setattr(HostShares, method, call(getattr(HostShares, method), method, close))
    group.sleep()
    group.wake()
    play(kept, 2)
    for _ in range(2):
        with pytest.raises(WeftError):
            others[0]()
        group.sleep()
        group.wake()
    play(kept, 3)
    group.barrier()


@on_ranks(2, "cpu")
def test_a_rank_in_a_call_or_with_a_broken_operator_refuses_for_all(group: weft.Group) -> None:
    step, other = open_step(group, "pull"), open_step(group, "push")
    if group.rank == 0:
        step.op.operator.begin_call("a call in another thread")
    with pytest.raises(WeftError, match=r"Group\.sleep while another thread runs a call"):
        group.sleep()
    if group.rank == 0:
        step.op.operator.end_call()
    play(step, 1)
    group.barrier()
    if group.rank == 0:
        other.op.operator.abort()
    with pytest.raises(WeftError, match=r"called abort\(\)"):
        group.sleep()
    assert not group.asleep
    play(step, 2)
    group.recover(timeout=600.0)
    group.sleep()
    group.wake()
    for each in (step, other):
        play(each, 3)
    group.barrier()


@on_ranks(2, "cpu")
def test_a_layer_in_a_call_refuses_for_all(group: weft.Group) -> None:
    """Its kernels use buffers that a sleep frees, also between two calls of its all-to-all."""
    case = Case(CONFIGS["deepseek"], tokens=(3, 3))
    expert: Any = case.shared(group.device)

    def shared(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(OutOfOrder, match="during a call of an MoE layer"):
            group.sleep()
        result: torch.Tensor = expert(x)
        return result

    x, logits = case.inputs_of(group.rank, group.device)
    correction = case.correction(group.device)
    with case.open(group) as layer:
        weights = case.weights(layer.local_experts, group.device)
        sleepless = layer.sibling(weights, shared=shared, correction=correction)
        expected = layer(x, logits)
        assert torch.equal(sleepless(x, logits), expected)
        sleepless.close()
        group.sleep()
        group.wake()
        assert torch.equal(layer(x, logits), expected)
        group.barrier()


@on_ranks(2, "cpu")
def test_reports_of_bad_ids_survive_a_sleep_and_are_raised_once(group: weft.Group) -> None:
    with KINDS["pull"].open(group) as op:
        ids = op.ids.clone()
        for _ in range(3):
            op.ids[0, 0] = 999
            op.enqueue(1.0)
            group.sleep()
            group.wake()
            with pytest.raises(BadExpertId, match="999"):
                op.operator.check()
            op.operator.check()
            op.ids.copy_(ids)
            op.round()
        group.barrier()


@on_ranks(2, "cpu")
def test_threads_may_read_headers_during_sleeps(group: weft.Group) -> None:
    """Reports of waits read headers of peers in other threads, without a lock of the operator."""
    operator, stop, seen = open_step(group, "pull").op.operator, threading.Event(), set[bool]()

    def read() -> None:
        while not stop.is_set():
            seen.add(operator.read_progress(1 - group.rank) is None)

    reader = threading.Thread(target=read)
    reader.start()
    while min(group.all_gather(len(seen))) < 2:  # asleep, and awake
        group.sleep()
        group.wake()
    stop.set()
    reader.join()
    group.barrier()
