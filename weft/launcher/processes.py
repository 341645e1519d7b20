# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes, forked by a server that has imported torch, and their cleanup."""

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
GRACE_MEETING = 1.0  # the same during the rendezvous, when no user function is running
_PRELOAD = ["torch", "weft.public", "weft.launcher.processes"]
_ENVIRON = threading.Lock()  # held while os.environ has the fork server's values


def _copy_environment() -> dict[str, str]:
    with _ENVIRON:
        return dict(os.environ)


@dataclass(frozen=True, slots=True)
class Job:
    """Arguments of a launch, sent to every rank. `work` is the pickled function and arguments."""

    work: bytes
    meeting: Meeting
    ranks: int
    device: str
    group_timeout: float
    tolerate_deaths: bool = False
    environment: dict[str, str] = field(default_factory=_copy_environment)


@dataclass(slots=True)
class _Rank:
    process: ForkServerProcess
    pipe: Connection
    connected: bool = False  # whether all ranks have connected, as this rank reported
    report: Report | None = None


def run_processes(job: Job, timeout: float) -> list[Report]:
    """Run every rank of `job` in its own process and return one report per rank."""
    context = start_fork_server()
    deadline = time.monotonic() + timeout
    ranks: list[_Rank] = []
    try:
        for rank in range(job.ranks):
            ranks.append(_start_rank(context, job, rank))
        _watch(job, ranks, deadline)
        return [
            state.report or Report(rank, "running", name="ended", timestamp=time.monotonic())
            for rank, state in enumerate(ranks)
        ]
    finally:
        _terminate(ranks)


def start_fork_server() -> ForkServerContext:
    """Return the context of the fork server, which preloads `_PRELOAD` at its start.

    The server searches this process's sys.path. By default CPython runs it as `python -c` without
    that path, so a `weft` in the working directory would take precedence over the installed one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    overrides = {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
    }
    with _ENVIRON:
        before = {name: os.environ.get(name) for name in overrides}
        os.environ.update(overrides)
        try:
            forkserver.ensure_running()
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
    return context


def _start_rank(context: ForkServerContext, job: Job, rank: int) -> _Rank:
    reader, writer = context.Pipe(duplex=False)
    if rank != job.meeting.hub:  # only the hub gets the listener
        job = replace(job, meeting=Meeting.from_address(job.meeting.address))
    process = context.Process(
        target=_run_in_process, args=(writer, job, rank), name=f"weft-rank-{rank}"
    )
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
    connected = False  # whether all ranks have connected; the report of one rank suffices
    while True:
        waiting = {r: rank for r, rank in enumerate(ranks) if rank.report is None}
        left = deadline - time.monotonic()
        if not waiting or left <= 0:
            return
        by_handle: dict[Any, int] = {}
        for r, rank in waiting.items():
            by_handle[rank.pipe] = by_handle[rank.process.sentinel] = r
        ready = multiprocessing.connection.wait(list(by_handle), timeout=left)
        for r in sorted({by_handle[handle] for handle in ready}):
            report = _read_report(r, ranks[r])
            connected = connected or ranks[r].connected
            if report is None or report.kind == "returned":
                continue
            if report.kind == "died" and connected and job.tolerate_deaths:
                continue
            # After the rendezvous, the other ranks may be running the user's function.
            grace = GRACE if ranks[r].connected else GRACE_MEETING
            deadline = min(deadline, time.monotonic() + grace)
            if not ranks[r].connected:
                abort_rendezvous(job.meeting, r, report)


def abort_rendezvous(meeting: Meeting, rank: int, report: Report) -> None:
    """Abort the rendezvous of the other ranks with the failure of `rank`."""
    if rank == meeting.hub:  # the hub can no longer report its failure itself
        meeting.close(report.summary())
    else:
        meeting.abort(report.summary())


def _read_report(rank: int, state: _Rank) -> Report | None:
    """Return the report of a rank, or None. A rank that ended without a report has died."""
    try:
        while state.report is None and state.pipe.poll():
            message = state.pipe.recv_bytes()
            if message == b"connected":
                state.connected = True
            else:
                state.report = pickle.loads(message)
    except (EOFError, OSError):
        state.process.join(1.0)  # the pipe closes shortly before the process ends
    if state.report is None and state.process.exitcode is not None:
        text = _describe_exit(state)
        state.report = Report(rank, "died", name="died", text=text, timestamp=time.monotonic())
    return state.report


def _describe_exit(rank: _Rank) -> str:
    process, code = rank.process, rank.process.exitcode
    if code is None or code >= 0:
        text = f"process {process.pid} ended with exit code {code} before its function "
        if rank.connected:
            return text + "returned: it called os._exit, or a library did"
        return text + (
            'began; a script that calls launch needs `if __name__ == "__main__":` around the call'
        )
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = "; the kernel may have run out of memory (see dmesg)" if name == "SIGKILL" else ""
    return f"process {process.pid} was ended by {name}{hint}"


def _terminate(ranks: Sequence[_Rank]) -> None:
    """Kill running processes, join all, and close the pipes."""
    for rank in ranks:
        # A rank that has sent its report may exit by itself.
        rank.process.join(1.0 if rank.report is not None else 0.0)
        if rank.process.exitcode is None:
            rank.process.kill()
    for rank in ranks:
        rank.process.join(10.0)
        rank.pipe.close()
        if rank.process.exitcode is not None:
            rank.process.close()


def _run_in_process(pipe: Connection, job: Job, rank: int) -> None:
    """Run one rank in its process."""
    process = os.getpid()
    threading.Thread(target=_exit_with_launcher, name="weft-launcher", daemon=True).start()
    os.environ.clear()  # inherited from the server: the environment of the first launch
    os.environ.update(job.environment)
    try:
        logs.configure()
        report = _run_job(pipe, job, rank)
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
    with contextlib.suppress(BrokenPipeError):  # the launcher has exited
        pipe.send_bytes(message)
    pipe.close()


def _exit_with_launcher() -> None:
    """Kill this rank when the launcher exits; the fork server, its parent, keeps running."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        multiprocessing.connection.wait([launcher.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)


def _run_job(pipe: Connection, job: Job, rank: int) -> Report:
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
    pipe.send_bytes(b"connected")
    return run_and_report(rank, group, lambda: fn(group, *args))
