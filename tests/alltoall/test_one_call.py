# SPDX-License-Identifier: Apache-2.0
"""One call at a time, from one process; abort and close from any thread."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest

import weft
from tests.operators import KINDS, Operator
from weft.errors import Aborted, OutOfOrder, PeerLeft

OPERATORS = ["pull", "receiver", "oneshot"]


def from_two_threads(group: weft.Group, kind: str) -> dict[str, int]:
    """Call from two threads on rank 0: every result is right, or the call raises OutOfOrder."""
    seen = {"right": 0, "wrong": 0, "refused": 0}
    with KINDS[kind].open(group) as op:
        stale = op.begin(1.0)
        op.end(stale)
        group.barrier()
        if group.rank == 0:
            errors: list[BaseException] = []
            done = threading.Event()
            # Two dispatches of low latency may be under way, so there the other thread only ends
            # a round that is over.
            other = (meddle, stale, done) if kind == "receiver" else (hammer, 5)
            threads = [
                threading.Thread(target=each, args=(op, *args, seen, errors))
                for each, *args in ((hammer, 1), other)
            ]
            for thread in threads:
                thread.start()
            threads[0].join()
            done.set()
            threads[1].join()
            assert not errors, errors
        else:
            try:
                while True:
                    op.round(3.0)
            except (PeerLeft, OutOfOrder):
                pass  # rank 0 has closed
    return seen


def hammer(op: Operator, value: int, seen: dict[str, int], errors: list[BaseException]) -> None:
    sums = op.kind.name == "allreduce"
    expected = value + 3.0 if sums else value * 2.0
    got = None  # of a round that this thread has begun
    try:
        for _ in range(200):
            try:
                if got is None:
                    got = op.begin(float(value))
                result = op.end(got)
            except OutOfOrder:
                seen["refused"] += 1
                continue
            got = None
            seen["right" if bool((result == expected).all()) else "wrong"] += 1
        while got is not None:  # the peer counts on it
            with contextlib.suppress(OutOfOrder):
                op.end(got)
                got = None
    except BaseException as error:
        errors.append(error)


def meddle(
    op: Operator,
    stale: object,
    done: threading.Event,
    seen: dict[str, int],
    errors: list[BaseException],
) -> None:
    try:
        while not done.is_set():
            with pytest.raises(OutOfOrder):
                op.end(stale)
            seen["refused"] += 1
    except BaseException as error:
        errors.append(error)


@pytest.mark.parametrize("kind", OPERATORS)
def test_two_threads_get_right_results_or_errors(ranks, kind):
    seen = ranks(2, "cpu")(from_two_threads, kind)[0]
    assert seen["wrong"] == 0, seen
    assert seen["refused"] > 0, seen
    assert seen["right"] > 0, seen


def forked(group: weft.Group, kind: str) -> tuple[str, bool]:
    with KINDS[kind].open(group) as op:
        op.round()
        group.barrier()
        reported = ""
        if group.rank == 0:
            reported = in_a_child(op)
        result = op.round(2.0)
        return reported, bool((result == result[0, 0]).all()) and float(result[0, 0]) == 4.0


def in_a_child(op: Operator) -> str:
    """Return what a forked child raises when it uses, aborts and closes the parent's object."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        words = []
        for use in (lambda: op.round(7.0), lambda: op.made.close()):
            try:
                use()
                words.append("done")
            except OutOfOrder as error:
                words.append(f"OutOfOrder: {error}")
            except BaseException as error:
                words.append(f"{type(error).__name__}: {error}")
        os.write(writer, "\n".join(words).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        reported = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return reported


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kind", OPERATORS)
def test_a_forked_child_does_not_act_for_its_parent(ranks, kind):
    (reported, right), (_, right_too) = ranks(2, "cpu")(forked, kind)
    used, closed = reported.split("\n")
    assert used.startswith("OutOfOrder: ")
    assert "a forked child: this " in used
    assert closed == "done"  # it frees nothing, and notifies no rank
    assert right
    assert right_too


def closed_from_a_thread(group: weft.Group, kind: str, aborts: bool) -> str:
    """Close an object from a watchdog thread while the main thread waits in it."""
    op = KINDS[kind].open(group)
    op.round()
    reported = ""
    if group.rank == 0:

        def watchdog() -> None:
            while group.device.type == "cpu" and not op.made._busy.locked():
                pass
            if aborts:
                op.made.abort()
            op.made.close()

        thread = threading.Thread(target=watchdog)
        thread.start()
        with pytest.raises((Aborted, OutOfOrder)) as caught:  # a GPU's call may return before
            op.round()  # rank 1 does not come
        reported = str(caught.value)
        thread.join()
        with pytest.raises((Aborted, OutOfOrder), match="closed"):
            op.round()
        group.barrier()
    else:
        group.barrier()
        with pytest.raises(Aborted if aborts else PeerLeft, match="rank 0"):
            op.rounds(2)  # what rank 0 had sent may be enough for a first one
        op.made.close()
    return reported


# On a GPU a call has returned when its kernel waits, and a close lets what is enqueued come to its
# end; so there only an abort ends it.
@pytest.mark.parametrize(
    ("device", "aborts"),
    [
        ("threads", True),
        ("threads", False),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("kind", OPERATORS)
def test_any_thread_may_close_while_a_call_waits(ranks, kind, device, aborts):
    reported = ranks(2, device)(closed_from_a_thread, kind, aborts)[0]
    assert "this rank" in reported
    assert "called abort()" in reported or not aborts
