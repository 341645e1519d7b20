"""A rank is late, absent, lying, dead or wants to stop: a typed error in time, never a hang."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

import weft
from tests.patience import hurry
from tests.rounds import Round, play
from weft.errors import Aborted, GeometryMismatch, GroupError, PeerDied, PeerTimeout, RankFailed
from weft.memory.header import HEADER_BYTES, Fault, Header

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DISPATCH_ENTER, AFTER_PAYLOAD, BEFORE_FLAG, BEFORE_POLL = 1, 2, 3, 4
COMBINE_ENTER, BEFORE_READY, BEFORE_READ = 5, 6, 7
DELAY, JITTER, DROP, LIE, STAY_AWAY, DIE = 1, 2, 3, 4, 5, 6
LONG = 600.0  # seconds: a deadline that no test waits for
ANY_PEER, ANY_EPOCH = 32, (1 << 64) - 1
CASE = Round(tokens=(8, 3, 8))


def make(group: weft.Group, *, timeout: float = LONG, first_timeout: float = LONG) -> weft.AllToAll:
    return weft.AllToAll(
        group,
        max_tokens=8,
        top_k=CASE.top_k,
        num_experts=CASE.experts,
        hidden=CASE.hidden,
        timeout=timeout,
        first_timeout=first_timeout,
        _defines=("WEFT_FAULTS=1",),
    )


def plan_fault(
    a2a: weft.AllToAll,
    point: int,
    action: int,
    *,
    peer: int = ANY_PEER,
    epoch: int = ANY_EPOCH,
    argument: int = 0,
) -> None:
    fault = Fault(point=point, action=action, peer=peer, epoch=epoch, argument=argument)
    offset = Header.fault.offset
    view = a2a.heap.tensor((HEADER_BYTES,), torch.uint8)
    raw = torch.frombuffer(bytearray(fault), dtype=torch.uint8)
    view[offset : offset + len(raw)].copy_(raw)


def one_round(a2a: weft.AllToAll) -> None:
    x, ids, weights, _ = CASE.of(a2a.rank, a2a.group.device)
    a2a.dispatch(x, ids, weights)
    a2a.combine()
    if a2a.group.device.type == "cuda":
        torch.cuda.synchronize()
    a2a.check()


def disturbed(group: weft.Group, rounds: int, longest_ns: int) -> None:
    with make(group) as a2a:
        for point in range(DISPATCH_ENTER, BEFORE_READ + 1):
            if group.rank == point % group.size:
                plan_fault(a2a, point, JITTER, argument=longest_ns)
            for seed in range(rounds):
                play(a2a, CASE.next(seed=seed), poison=seed % 8 == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_delays_at_every_point_change_no_byte(ranks, kind):
    ranks(3, kind)(disturbed, 24, 400_000)


def absent(group: weft.Group, point: int) -> tuple[float, str]:
    with make(group) as a2a:
        one_round(a2a)
        hurry(a2a, 2.0)
        if group.rank == 1:
            plan_fault(a2a, point, STAY_AWAY)
        group.barrier()
        start, text = time.monotonic(), ""
        try:
            one_round(a2a)
        except PeerTimeout as error:
            text = str(error)
            with pytest.raises(PeerTimeout):  # a broken group stays broken
                one_round(a2a)
        waited = time.monotonic() - start
        group.barrier()  # closing would show the others that this rank has left
        return waited, text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("point", "phase"), [(DISPATCH_ENTER, "dispatch"), (COMBINE_ENTER, "combine")]
)
def test_an_absent_rank_is_named_within_the_deadline(ranks, kind, point, phase):
    results = ranks(3, kind)(absent, point)
    found_out = 0
    for rank in (0, 2):
        waited, text = results[rank]
        assert waited > 0.5
        told = f"rank {rank}, {phase}: rank {2 - rank} waited in vain for rank 1 and left the group"
        seen = f"rank {rank}, {phase}: rank 1 did not publish epoch 2"
        assert seen in text or told in text, text
        assert told in text or "its flag shows epoch 1" in text
        found_out += seen in text
    assert found_out >= 1


def absent_from_the_start(group: weft.Group) -> float:
    with make(group, first_timeout=2.0) as a2a:
        group.barrier()
        start = time.monotonic()
        if group.rank != 1:
            with pytest.raises(PeerTimeout, match="rank 1 did not publish epoch 1|for rank 1"):
                one_round(a2a)
        waited = time.monotonic() - start
        group.barrier()
        return waited


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_round_has_a_deadline_of_its_own(ranks, kind):
    waited = ranks(3, kind)(absent_from_the_start)
    assert all(waited[rank] > 0.5 for rank in (0, 2))


def deceived(group: weft.Group) -> tuple[str, str]:
    with make(group) as a2a:
        one_round(a2a)
        if group.rank == 2:
            plan_fault(a2a, BEFORE_FLAG, LIE, peer=0)
        try:
            one_round(a2a)
        except GroupError as error:
            return type(error).__name__, str(error)
        return "", ""


@pytest.mark.parametrize("kind", KINDS)
def test_another_geometry_is_noticed_in_band(ranks, kind):
    kind_of_error, text = ranks(3, kind)(deceived)[0]
    assert kind_of_error == GeometryMismatch.__name__
    assert "rank 2 called with geometry" in text


def aborted(group: weft.Group, asker_waits: bool) -> tuple[float, str]:
    """Rank 0 asks all to stop: while it waits itself, from a thread, or while only others wait."""
    with make(group) as a2a:
        one_round(a2a)
        group.barrier()
        start = time.monotonic()
        if group.rank == 2:  # nobody can finish without it
            group.barrier()
        elif group.rank == 0 and not asker_waits:
            time.sleep(0.3)
            a2a.abort()
            group.barrier()
        else:
            timer = threading.Timer(0.3, a2a.abort)
            if group.rank == 0:
                timer.start()
            with pytest.raises(Aborted):
                one_round(a2a)
            group.barrier()
        waited = time.monotonic() - start
        with pytest.raises(Aborted) as caught:
            one_round(a2a)
        return waited, str(caught.value)


@pytest.mark.parametrize("asker_waits", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_abort_ends_the_waits_of_all_ranks_at_once(ranks, kind, asker_waits):
    results = ranks(3, kind)(aborted, asker_waits)
    assert all(0.2 < waited < 100.0 for waited, _ in results), results
    texts = [text for _, text in results]
    assert "called abort()" in texts[0]
    assert "this rank" in texts[0]
    assert "because rank 0 called abort()" in texts[1]
    assert "because rank 0 called abort()" in texts[2]


def killed(group: weft.Group) -> None:
    with make(group, timeout=LONG) as a2a:
        for _ in range(3):
            one_round(a2a)
        group.barrier()
        if group.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerDied) as caught:
            one_round(a2a)
        assert "rank 2 died" in str(caught.value)
        assert "its part of epoch 4" in str(caught.value)
        last = [r for r in a2a.history(2) if r.phase == 2][-1]
        assert last.epoch == 3
        assert last.end_ns >= last.start_ns > 0


def test_a_killed_rank_is_named_and_its_ring_can_be_read(ranks):
    with pytest.raises(RankFailed) as caught:
        ranks(3, "cpu")(killed)
    assert "rank 2" in str(caught.value)
    assert "Traceback" not in str(caught.value), caught.value


def compile_failure(group: weft.Group) -> str:
    defines = ("weft=,",) if group.rank == 1 else ()
    with pytest.raises(weft.errors.CreationFailed) as caught:
        weft.AllToAll(group, max_tokens=8, top_k=2, num_experts=4, hidden=16, _defines=defines)
    return str(caught.value)


def test_one_rank_that_cannot_compile_stops_all(ranks):
    texts = ranks(2, "cpu")(compile_failure)
    assert len(set(texts)) == 1
    assert "rank 1" in texts[0]
    assert "CompileError" in texts[0]
