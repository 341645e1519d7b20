"""A rank of an all-reduce is late, absent, dead, makes another call or stops: a typed error."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import weft
from tests.patience import hurry
from tests.sums import BACKENDS, Sum, play, settle
from weft.errors import Aborted, GeometryMismatch, GroupError, PeerDied, PeerTimeout, RankFailed
from weft.memory.header import HEADER_BYTES, Fault, Header

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ENTER, AFTER_ROWS, BEFORE_ROWS, BEFORE_MOMENTS = 8, 9, 10, 11
JITTER, STAY_AWAY = 2, 5
ANY_PEER, ANY_EPOCH = 32, (1 << 64) - 1
CASE = Sum(5, 128)


def make(group: weft.Group, timeout: float = 600.0, epilogue_at: str = "owner") -> weft.AllReduce:
    return weft.AllReduce(
        group,
        max_tokens=8,
        hidden=CASE.hidden,
        epilogue_at=epilogue_at,
        timeout=timeout,
        first_timeout=600.0,
        _defines=("WEFT_FAULTS=1",),
    )


def plan_fault(ar: weft.AllReduce, point: int, action: int, argument: int = 0) -> None:
    fault = Fault(point=point, action=action, peer=ANY_PEER, epoch=ANY_EPOCH, argument=argument)
    raw = torch.frombuffer(bytearray(fault), dtype=torch.uint8)
    view = ar.heap.tensor((HEADER_BYTES,), torch.uint8)
    view[Header.fault.offset : Header.fault.offset + len(raw)].copy_(raw)


def one_call(ar: weft.AllReduce, tokens: int = 5, backend: str = "twoshot", **more: object) -> None:
    x = CASE.next(tokens=tokens).rows(ar.group.rank, ar.group.device)
    ar.fused(x, backend=backend, **more)  # type: ignore[arg-type]
    settle(ar.group)
    ar.check()


def disturbed(group: weft.Group, calls: int, longest_ns: int, epilogue_at: str) -> None:
    case = CASE.next(differ=epilogue_at == "receiver")
    with make(group, epilogue_at=epilogue_at) as ar:
        for point in (ENTER, AFTER_ROWS, BEFORE_ROWS, BEFORE_MOMENTS):
            if group.rank == point % group.size:
                plan_fault(ar, point, JITTER, argument=longest_ns)
            for seed in range(calls):
                play(ar, case.next(seed=seed, tokens=1 + seed % 8), BACKENDS[seed % 3])


@pytest.mark.parametrize("epilogue_at", ["owner", "receiver"])
@pytest.mark.parametrize("kind", [*KINDS, "threads"])
def test_delays_change_no_bit(ranks, kind, epilogue_at):
    ranks(3, kind)(disturbed, 18, 300_000, epilogue_at)


def absent(group: weft.Group, backend: str, epilogue_at: str) -> tuple[float, str]:
    with make(group, epilogue_at=epilogue_at) as ar:
        one_call(ar, backend=backend)
        hurry(ar, 2.0)
        if group.rank == 1:
            plan_fault(ar, ENTER, STAY_AWAY)
        group.barrier()
        start, text = time.monotonic(), ""
        try:
            one_call(ar, backend=backend)
        except PeerTimeout as error:
            text = str(error)
            with pytest.raises(PeerTimeout):  # a broken group stays broken
                one_call(ar, backend=backend)
        waited = time.monotonic() - start
        group.barrier()  # closing would show the others that this rank has left
        return waited, text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("backend", "epilogue_at"),
    [*((backend, "owner") for backend in BACKENDS), ("twoshot", "receiver")],
)
def test_an_absent_rank_is_named_within_the_deadline(ranks, kind, backend, epilogue_at):
    results = ranks(3, kind)(absent, backend, epilogue_at)
    for rank in (0, 2):
        waited, text = results[rank]
        assert waited > 0.5
        seen = (
            f"rank {rank}, all-reduce, epoch 2: the " in text and "did not come from rank 1" in text
        )
        told = f"rank {rank}, all-reduce: rank {2 - rank} waited in vain for rank 1" in text
        assert seen or told, text


def killed(group: weft.Group, folder: str) -> None:
    """Survivors write down what they raised, because the launch itself fails."""
    with make(group, timeout=600.0) as ar:
        one_call(ar)
        group.barrier()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerDied) as caught:
            one_call(ar)
        assert [r.epoch for r in ar.history(1)] == [1]
        Path(folder, str(group.rank)).write_text(str(caught.value))


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_peer_ends_in_an_error(ranks, kind, tmp_path):
    with pytest.raises(RankFailed) as caught:
        ranks(3, kind)(killed, str(tmp_path))
    assert "rank 1" in str(caught.value)
    for rank in (0, 2):
        text = (tmp_path / str(rank)).read_text()
        assert f"rank {rank}, all-reduce: rank 1 died" in text


def differing(group: weft.Group, how: str) -> str:
    odd = group.rank == 1
    residual, weight = CASE.shared(group.device)
    with make(group) as ar:
        one_call(ar)
        try:
            match how:
                case "tokens":
                    one_call(ar, tokens=4 if odd else 5)
                case "many tokens":
                    one_call(ar, tokens=8 if odd else 5, backend="oneshot")
                case "backend":
                    one_call(ar, backend="oneshot" if odd else "twoshot")
                case "residual":
                    one_call(ar, residual=residual if odd else None, out=True)
                case "constants":
                    one_call(ar, weight=weight, eps=1e-5 if odd else 1e-6)
        except GeometryMismatch as error:
            return str(error)
        except GroupError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["tokens", "many tokens", "backend", "residual", "constants"])
def test_another_call_is_noticed_and_both_are_named(ranks, kind, how):
    texts = ranks(2, kind)(differing, how)
    # A rank that comes late may first hear that its peer has noticed, and left.
    named = [text for text in texts if "Make the same call on every rank" in text]
    told = [text for text in texts if "called with other arguments" in text]
    assert named, texts
    assert len(named) + len(told) == 2, texts
    for word in {
        "tokens": ("4 tokens", "5 tokens"),
        "many tokens": ("8 tokens", "5 tokens"),
        "backend": ("oneshot", "twoshot"),
        "residual": ("with the sum wanted", "residual and the sum wanted"),
    }.get(how, ("constants",)):
        assert all(word in text for text in named)


def third(group: weft.Group, backends: tuple[str, str, str]) -> str:
    """One token, whose owner is rank 0: who waits for its sum has nothing to get from rank 2."""
    with make(group) as ar:
        one_call(ar)
        try:
            one_call(ar, tokens=1, backend=backends[group.rank])
        except GroupError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"


@pytest.mark.parametrize("kind", [*KINDS, "threads"])
@pytest.mark.parametrize("backend", ["twoshot", "twoshot_bulk"])
def test_a_call_that_a_third_rank_waits_for_in_vain_is_named_too(ranks, kind, backend):
    for rank, text in enumerate(ranks(3, kind)(third, (backend, backend, "oneshot"))):
        assert text.startswith(f"GeometryMismatch: rank {rank}, all-reduce: rank "), text
        assert "1 tokens by oneshot" in text
        assert f"1 tokens by {backend}" in text


def stopped(group: weft.Group) -> str:
    with make(group) as ar:
        one_call(ar)
        group.barrier()
        if group.rank == 0:
            threading.Timer(0.3, ar.abort).start()
            time.sleep(1.0)
            with pytest.raises(Aborted):
                one_call(ar)
            return ""
        start = time.monotonic()
        with pytest.raises(Aborted) as caught:
            one_call(ar)
        assert time.monotonic() - start < 100
        return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_abort_gets_every_rank_out_of_its_wait(ranks, kind):
    texts = ranks(3, kind)(stopped)
    for rank in (1, 2):
        assert f"rank {rank}, all-reduce" in texts[rank]
        assert "rank 0 called abort()" in texts[rank]


def different_sizes(group: weft.Group) -> str:
    try:
        weft.AllReduce(group, max_tokens=8 + group.rank, hidden=128)
    except GeometryMismatch as error:
        return str(error)
    return ""


def test_different_sizes_are_refused_at_creation(ranks):
    for text in ranks(2, "threads")(different_sizes):
        assert "all-reduce geometry differs" in text
        assert "tokens=8" in text
        assert "tokens=9" in text
