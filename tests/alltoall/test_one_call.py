# SPDX-License-Identifier: Apache-2.0
"""One call at a time, from one process; abort and close from any thread."""

import contextlib
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.operators import KINDS, Operator
from tests.ranks import on_ranks
from weft.errors import Aborted, OutOfOrder, PeerLeft

OPERATORS = ["pull", "receiver", "oneshot"]


@pytest.mark.parametrize("name", OPERATORS)
@on_ranks(2, "cpu")
def test_two_threads_get_right_results_or_errors(group, name):
    """Call from two threads on rank 0: every result is right, or the call raises OutOfOrder."""
    seen: Counter[str] = Counter()
    with KINDS[name].open(group) as op:
        stale = op.begin(1.0)
        op.end(stale)
        group.barrier()
        if group.rank == 0:
            done = threading.Event()
            with ThreadPoolExecutor(2) as pool:
                calls = [pool.submit(play_rounds, op, 1, seen)]
                calls[0].add_done_callback(lambda _: done.set())
                # Two dispatches of low latency may be under way, so there the other thread only
                # ends a round that is over.
                if name == "receiver":
                    calls.append(pool.submit(end_again, op, stale, done, seen))
                else:
                    calls.append(pool.submit(play_rounds, op, 5, seen))
            for call in calls:
                call.result()
            assert set(seen) == {"right", "refused"}, seen
        else:
            with contextlib.suppress(PeerLeft, OutOfOrder):  # rank 0 has closed
                while True:
                    op.round(3.0)


def play_rounds(op: Operator, value: int, seen: Counter[str]) -> None:
    expected = value + 3.0 if op.kind.name == "allreduce" else value * 2.0
    got = None  # of a round that this thread has begun
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


def end_again(op: Operator, stale: object, done: threading.Event, seen: Counter[str]) -> None:
    while not done.is_set():
        with pytest.raises(OutOfOrder):
            op.end(stale)
        seen["refused"] += 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", OPERATORS)
@on_ranks(2, "cpu")
def test_a_forked_child_does_not_act_for_its_parent(group, name):
    with KINDS[name].open(group) as op:
        op.round()
        group.barrier()
        if group.rank == 0:
            used, closed = in_a_child(op)
            assert used.startswith("OutOfOrder: ")
            assert "a forked child: this " in used
            assert closed == "done"  # it frees nothing, and notifies no rank
        assert bool((op.round(2.0) == 4.0).all())


def in_a_child(op: Operator) -> list[str]:
    """Return what a forked child raises when it uses and closes the parent's object."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        words = []
        for use in (lambda: op.round(7.0), lambda: op.operator.close()):
            try:
                use()
                words.append("done")
            except BaseException as error:
                words.append(f"{type(error).__name__}: {error}")
        os.write(writer, "\n".join(words).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        reported = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return reported.split("\n")


@pytest.mark.parametrize("name", OPERATORS)
@on_ranks(2, "threads")
def test_any_thread_may_close_while_a_call_waits(group, name):
    """Aborts are in tests/runtime/test_culprits.py; on a GPU only these end a wait."""
    op = KINDS[name].open(group)
    op.round()
    if group.rank:
        group.barrier()
        with pytest.raises(PeerLeft, match="rank 0"):
            op.rounds(2)  # what rank 0 had sent may be enough for a first one
        op.operator.close()
        return

    def watchdog() -> None:
        while not op.operator._busy.locked():
            pass
        op.operator.close()

    thread = threading.Thread(target=watchdog)
    thread.start()
    with pytest.raises((Aborted, OutOfOrder), match="this rank"):
        op.round()  # rank 1 does not come
    thread.join()
    with pytest.raises((Aborted, OutOfOrder), match="closed"):
        op.round()
    group.barrier()
