# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: forked by a server that has imported torch, and ended without leftovers."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import torch

from weft import logs
from weft.group.group import Group
from weft.group.meeting import Meeting
from weft.launcher.reports import Report, run_and_report

GRACE = 10.0  # seconds for the other ranks to end after one failed
GRACE_MEETING = 1.0  # the same while the ranks still meet: no function runs that needs time
_PRELOAD = ["torch", "weft.public", "weft.launcher.processes"]
_ENVIRON = threading.Lock()  # held while os.environ has the values of the fork server


def _environment() -> dict[str, str]:
    with _ENVIRON:
        return dict(os.environ)


@dataclass(frozen=True, slots=True)
class Job:
    """Input of every rank. `work` is the pickled function and arguments."""

    work: bytes
    meeting: Meeting
    ranks: int
    device: str
    group_timeout: float
    tolerate_deaths: bool = False
    environment: dict[str, str] = field(default_factory=_environment)


@dataclass(slots=True)
class _Rank:
    process: ForkServerProcess
    pipe: Connection
    met: bool = False
    report: Report | None = None


def run_processes(job: Job, timeout: float) -> list[Report]:
    """Run every rank of `job` in its own process and return one report per rank."""
    context = fork_server()
    deadline = time.monotonic() + timeout
    ranks: list[_Rank] = []
    try:
        for rank in range(job.ranks):
            ranks.append(_start(context, job, rank))
        _watch(job, ranks, deadline)
        return [
            each.report or Report(rank, "running", name="ended", timestamp=time.monotonic())
            for rank, each in enumerate(ranks)
        ]
    finally:
        _end(ranks)


def fork_server(more: Sequence[str] = ()) -> ForkServerContext:
    """Return the fork server, which imports `_PRELOAD` and `more` when the first call starts it.

    They come from where this process finds modules. CPython runs the server as `python -c` and
    ignores this process's sys.path meanwhile, so a `weft` in the working directory would be taken
    before the installed one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *more])
    there = {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path),
    }
    with _ENVIRON:
        before = {name: os.environ.get(name) for name in there}
        os.environ.update(there)
        try:
            forkserver.ensure_running()
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
    return context


def _start(context: ForkServerContext, job: Job, rank: int) -> _Rank:
    reader, writer = context.Pipe(duplex=False)
    if rank != job.meeting.hub:  # only the hub gets the listener
        job = replace(job, meeting=Meeting.from_address(job.meeting.address))
    process = context.Process(target=_child, args=(writer, job, rank), name=f"weft-rank-{rank}")
    try:
        process.start()
    except BaseException:
        reader.close()
        raise
    finally:
        writer.close()
    return _Rank(process, reader)


def _watch(job: Job, ranks: Sequence[_Rank], deadline: float) -> None:
    """Collect reports until every rank has one, or until the deadline or the grace period."""
    met = False  # whether all ranks have met; one report suffices
    while True:
        waiting = {r: each for r, each in enumerate(ranks) if each.report is None}
        left = deadline - time.monotonic()
        if not waiting or left <= 0:
            return
        by_handle: dict[Any, int] = {}
        for r, each in waiting.items():
            by_handle[each.pipe] = by_handle[each.process.sentinel] = r
        ready = multiprocessing.connection.wait(list(by_handle), timeout=left)
        for r in sorted({by_handle[handle] for handle in ready}):
            report = _read_report(r, ranks[r])
            met = met or ranks[r].met
            if report is None or report.kind == "returned":
                continue
            if report.kind == "died" and met and job.tolerate_deaths:
                continue
            # After all have met, the others may be in their functions.
            grace = GRACE if ranks[r].met else GRACE_MEETING
            deadline = min(deadline, time.monotonic() + grace)
            if not ranks[r].met:
                abort_rendezvous(job.meeting, r, report)


def abort_rendezvous(meeting: Meeting, rank: int, report: Report) -> None:
    """Report to the other ranks how one failed before all had met."""
    if rank == meeting.hub:  # it can no longer report its failure itself
        meeting.close(report.summary())
    else:
        meeting.abort(report.summary())


def _read_report(rank: int, each: _Rank) -> Report | None:
    """Return the report of a rank, or None. A rank that ended without a report has died."""
    try:
        while each.report is None and each.pipe.poll():
            message = each.pipe.recv_bytes()
            if message == b"met":
                each.met = True
            else:
                each.report = pickle.loads(message)
    except (EOFError, OSError):
        each.process.join(1.0)  # the pipe ends a moment before the process
    if each.report is None and each.process.exitcode is not None:
        each.report = Report(
            rank, "died", name="died", text=_describe_exit(each), timestamp=time.monotonic()
        )
    return each.report


def _describe_exit(rank: _Rank) -> str:
    process, code = rank.process, rank.process.exitcode
    if code is None or code >= 0:
        text = f"process {process.pid} ended with exit code {code} before its function "
        if rank.met:
            return text + "returned: it ended itself (os._exit, or a library that does so)"
        return text + (
            'began; a script that calls launch needs `if __name__ == "__main__":` around the call'
        )
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = "; the kernel may have run out of memory (see dmesg)" if name == "SIGKILL" else ""
    return f"process {process.pid} was ended by {name}{hint}"


def _end(ranks: Sequence[_Rank]) -> None:
    """Kill running processes, join all, and close the pipes."""
    for each in ranks:
        # A rank that has reported gets a moment to end by itself.
        each.process.join(1.0 if each.report is not None else 0.0)
        if each.process.exitcode is None:
            each.process.kill()
    for each in ranks:
        each.process.join(10.0)
        each.pipe.close()
        if each.process.exitcode is not None:
            each.process.close()


def _child(pipe: Connection, job: Job, rank: int) -> None:
    """Run one rank in its process."""
    process = os.getpid()
    threading.Thread(target=_end_with_launcher, name="weft-launcher", daemon=True).start()
    os.environ.clear()  # the server has the environment of the first launch
    os.environ.update(job.environment)
    try:
        logs.configure()
        report = _work(pipe, job, rank)
    except BaseException as error:
        report = Report.from_error(rank, error)
    if os.getpid() != process:  # a child that `fn` forked does not report for the rank
        if report.error is not None:
            raise report.error
        return
    try:
        message = report.to_pickle()
    except BaseException as error:  # the result of `fn` cannot be pickled
        message = Report.from_error(rank, error).to_pickle()
    with contextlib.suppress(BrokenPipeError):  # the launcher is gone
        pipe.send_bytes(message)
    pipe.close()


def _end_with_launcher() -> None:
    """End this rank when the launcher ends; its parent is the fork server, which lives on."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        multiprocessing.connection.wait([launcher.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)


def _work(pipe: Connection, job: Job, rank: int) -> Report:
    device = torch.device("cpu")
    if job.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    fn, args = pickle.loads(job.work)
    group = Group.from_meeting(
        job.meeting, rank=rank, size=job.ranks, device=device, timeout=job.group_timeout
    )
    pipe.send_bytes(b"met")
    return run_and_report(rank, group, lambda: fn(group, *args))
