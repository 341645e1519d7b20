# SPDX-License-Identifier: Apache-2.0
"""The public `launch`: run a function on several ranks of this machine."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from weft.arguments import check_bools, check_callable, check_choice, check_int, check_seconds
from weft.errors import InvalidArgument, SetupError
from weft.group.group import Group
from weft.group.meeting import Meeting
from weft.launcher.processes import GRACE, GRACE_MEETING, Job, abort_rendezvous, run_processes
from weft.launcher.reports import Report, build_launch_error, run_and_report
from weft.shape import MAX_RANKS

T = TypeVar("T")
_DEVICES = ("cpu", "cuda", "threads")
_GROUP_TIMEOUT = 120.0  # seconds; upper bound of the group's timeout


def launch(
    fn: Callable[..., T],
    *args: Any,
    ranks: int = 4,
    device: str = "cpu",
    timeout: float = 600.0,
    tolerate_deaths: bool = False,
) -> list[T]:
    """Run `fn(group, *args)` on several ranks of this machine and return their results.

    If a rank fails, the error has the rank that failed first and its traceback; the rank's
    exception is the `__cause__`. Ranks that wait for it in weft end at once. The others are killed
    after 10 s.

    Args:
        fn: Function that a new process can import. It returns plain values or CPU tensors.
        *args: Further arguments of `fn`.
        ranks: Number of ranks.
        device: "cpu" (processes with one torch thread each), "cuda" (processes, rank i on GPU i
            modulo the number of GPUs) or "threads" (CPU ranks as threads of this process).
        timeout: Seconds until all ranks must have returned.
        tolerate_deaths: Whether the other ranks continue if a process dies after the rendezvous.
            The result of a dead rank is None.

    Returns:
        Results in rank order.

    Raises:
        InvalidArgument: a new process cannot import `fn`, or this process is itself a rank.
        SetupError: the limit of open files is too low, or this process is daemonic.
        RankFailed: a rank raised, died or did not return within `timeout` seconds.
    """
    check_callable("fn", fn, "which every rank calls with its group and args")
    ranks = check_int("ranks", ranks, 1, MAX_RANKS)
    device = check_choice("device", device, _DEVICES)
    timeout = check_seconds("timeout", timeout)
    check_bools(tolerate_deaths=tolerate_deaths)
    if device == "cuda" and torch.cuda.device_count() == 0:
        raise InvalidArgument('device is "cuda" and torch sees no GPU: use device="cpu"')
    _check_not_under_torchrun()
    if device != "threads":
        _check_not_daemonic()
    work = b"" if device == "threads" else _pickle_call(fn, args)
    _check_open_files(ranks, device)
    meeting = Meeting.open()
    try:
        group_timeout = min(timeout, _GROUP_TIMEOUT)
        if device == "threads":
            reports = _run_threads(fn, args, meeting, ranks, timeout, group_timeout)
        else:
            job = Job(work, meeting, ranks, device, group_timeout, tolerate_deaths)
            reports = run_processes(job, timeout)
    finally:
        meeting.close()
    survivors = [report for report in reports if report.kind != "died"]
    error = build_launch_error(
        survivors if tolerate_deaths and survivors else reports, ranks, timeout
    )
    if error is not None:
        raise error
    return [report.value for report in reports]


def _check_not_under_torchrun() -> None:
    """Raise InvalidArgument in a rank of torchrun, since each rank would start a job."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is not None and size is not None:
        raise InvalidArgument(
            f"this process is rank {rank} of the {size} that torchrun (RANK, WORLD_SIZE) started, "
            "and launch would start more ranks in each of them: call init_process_group and "
            "weft.Group.from_torch() instead, or run the script without torchrun"
        )


def _check_not_daemonic() -> None:
    """Raise SetupError in a daemonic process, which cannot start processes."""
    process = multiprocessing.current_process()
    if process.daemon:
        raise SetupError(
            f"this process, {process.name}, is daemonic (a worker of multiprocessing.Pool or of an "
            "engine) and cannot start ranks: start it with daemon=False, call launch "
            'from the main process, or use device="threads"'
        )


def count_open_files(ranks: int, device: str) -> int:
    """Return the number of file descriptors that a launch needs: sockets, pipes and shares."""
    return 16 + (2 * ranks * (ranks + 1) if device == "threads" else 4 * ranks)


def _check_open_files(ranks: int, device: str) -> None:
    """Raise SetupError if the limit of open files is too low for a launch."""
    needed = count_open_files(ranks, device)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    used = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and used + needed > limit:
        raise SetupError(
            f"{ranks} ranks need {needed} open files; this process has {used} open, and its limit "
            f"is {limit}: raise it (ulimit -n {max(1024, used + needed)}), or launch fewer ranks"
        )


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        work = pickle.dumps((fn, args))
    except Exception as error:
        raise InvalidArgument(
            f"{fn!r} and its arguments cannot be sent to another process ({error}): pass a "
            'function at module level and plain arguments, or use device="threads"'
        ) from error
    # A rank imports the script's file, if there is one, and gets `fn` from it by name.
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if main.__spec__ is None and (
        b"__main__" in work if file is None else not os.path.isfile(file)
    ):
        raise InvalidArgument(
            f"{fn!r} is called from a notebook, stdin or -c, so the process of a rank cannot "
            "import it: move the function to a file and import it from there, or use "
            'device="threads"'
        )
    return work


def _run_threads(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    meeting: Meeting,
    ranks: int,
    timeout: float,
    group_timeout: float,
) -> list[Report]:
    """Run every rank in a thread and return one report per rank.

    A thread cannot be killed. At the deadline the groups are aborted. A thread that has not ended
    one second later continues to run.
    """
    groups: dict[int, Group] = {}
    finished: queue.SimpleQueue[Report] = queue.SimpleQueue()

    def run_rank(rank: int) -> None:
        try:
            group = groups[rank] = Group.from_meeting(
                meeting,
                rank=rank,
                size=ranks,
                device=torch.device("cpu"),
                timeout=group_timeout,
                threads=True,
            )
            report = run_and_report(rank, group, lambda: fn(group, *args))
        except BaseException as error:
            report = Report.from_error(rank, error)
            abort_rendezvous(meeting, rank, report)
        finished.put(report)

    deadline = time.monotonic() + timeout
    threads = [
        threading.Thread(target=run_rank, args=(rank,), name=f"weft-rank-{rank}", daemon=True)
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    reports = [Report(rank, "running") for rank in range(ranks)]
    waiting = set(range(ranks))
    late: set[int] = set()  # ranks whose errors only result from the abort
    aborted = False
    while waiting:
        try:
            report = finished.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            if aborted:
                break
            aborted = True
            if all(reports[rank].kind == "returned" for rank in set(range(ranks)) - waiting):
                late = set(waiting)
            for group in list(groups.values()):
                group.abort("the launch ended this group: a rank failed or ran too long")
            deadline = time.monotonic() + 1.0
            continue
        waiting.remove(report.rank)
        if report.rank not in late:
            reports[report.rank] = report
        if report.kind == "raised" and not aborted:
            grace = GRACE if report.rank in groups else GRACE_MEETING
            deadline = min(deadline, time.monotonic() + grace)
    for rank in set(range(ranks)) - waiting - late:
        threads[rank].join(1.0)
    return reports
