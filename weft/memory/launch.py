"""Run a function on every rank of a group of this host."""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from weft.arguments import function, integer, one_of, seconds
from weft.errors import InvalidArgument
from weft.memory.group import Group
from weft.memory.meeting import Meeting
from weft.memory.processes import GRACE, GRACE_MEETING, Job, run_processes
from weft.memory.reports import Report, failure, report_of

T = TypeVar("T")
_DEVICES = ("cpu", "cuda", "threads")
MAX_LAUNCHED = 1024  # ranks of one host: more than any of weft's operators serves
_GROUP_TIMEOUT = 120.0  # seconds, for the group's control messages


def launch(
    fn: Callable[..., T],
    *args: Any,
    ranks: int = 4,
    device: str = "cpu",
    timeout: float = 600.0,
) -> list[T]:
    """Run `fn(group, *args)` on `ranks` ranks and return what it returned, in rank order.

    `device` is "cpu" (processes, one torch thread each), "cuda" (processes, rank i on GPU
    i modulo their number) or "threads" (CPU ranks as threads of this process). For processes, `fn`
    must be a function that a new process can import, and it returns plain values or CPU tensors.

    Raises RankFailed when a rank raises, dies or runs longer than `timeout` seconds. It names the
    rank that failed first and by itself, with its traceback; that rank's exception is its
    `__cause__`. Ranks that wait for it in weft get the reason and end at once. Those that do
    something else have 10 s to end and are then killed (threads: their groups are broken). Where
    ranks waited for one that had returned, the text says so.
    """
    function("fn", fn, "which every rank calls with its group and args")
    ranks = integer("ranks", ranks, 1, MAX_LAUNCHED)
    device = one_of("device", device, _DEVICES)
    timeout = seconds("timeout", timeout)
    if device == "cuda" and torch.cuda.device_count() == 0:
        raise InvalidArgument('device is "cuda" and torch sees no GPU: use device="cpu"')
    work = b"" if device == "threads" else _packed(fn, args)
    meeting = Meeting.open()
    try:
        group_timeout = min(timeout, _GROUP_TIMEOUT)
        if device == "threads":
            reports = _run_threads(fn, args, meeting, ranks, timeout, group_timeout)
        else:
            job = Job(work, meeting, ranks, device, group_timeout)
            reports = run_processes(job, timeout)
    finally:
        meeting.remove()
    error = failure(reports, ranks, timeout)
    if error is not None:
        raise error
    return [report.value for report in reports]


def _packed(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise InvalidArgument(
            f"{fn!r} and its arguments cannot be sent to another process ({error}): give a "
            'function at module level and plain arguments, or use device="threads"'
        ) from error


class _Threads:
    """Ranks as threads: what they share with the launcher."""

    def __init__(self, meeting: Meeting, ranks: int, group_timeout: float) -> None:
        self.meeting = meeting
        self.ranks = ranks
        self.group_timeout = group_timeout
        self.groups: dict[int, Group] = {}
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()

    def run(self, rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """One rank's whole life."""
        try:
            group = Group.from_meeting(
                self.meeting,
                rank=rank,
                size=self.ranks,
                device=torch.device("cpu"),
                timeout=self.group_timeout,
                threads=True,
            )
            self.groups[rank] = group
            report = report_of(rank, group, lambda: fn(group, *args))
        except BaseException as error:
            report = Report.raised(rank, error)
            self.meeting.end(report.line())
        self.reports.put(report)

    def collect(self, deadline: float) -> list[Report]:
        """One report a rank. A thread cannot be killed: one that still runs is left behind."""
        reports: dict[int, Report] = {}
        late: set[int] = set()
        broken = False
        while len(reports) < self.ranks:
            try:
                report = self.reports.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                if broken:
                    break
                broken = True
                if all(each.kind == "returned" for each in reports.values()):
                    late = set(range(self.ranks)) - set(reports)
                for group in list(self.groups.values()):
                    group.abort("the launch ended this group: a rank failed or ran too long")
                deadline = time.monotonic() + 1.0
                continue
            if report.kind == "raised" and not broken:
                grace = GRACE if report.rank in self.groups else GRACE_MEETING
                deadline = min(deadline, time.monotonic() + grace)
            reports[report.rank] = report
        # What a late rank raised when its group was broken says nothing of its own.
        running = {r: Report(r, "running") for r in range(self.ranks)}
        return [
            running[r] if r in late or r not in reports else reports[r] for r in range(self.ranks)
        ]


def _run_threads(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    meeting: Meeting,
    ranks: int,
    timeout: float,
    group_timeout: float,
) -> list[Report]:
    shared = _Threads(meeting, ranks, group_timeout)
    deadline = time.monotonic() + timeout
    threads = [
        threading.Thread(target=shared.run, args=(r, fn, args), name=f"weft-rank-{r}", daemon=True)
        for r in range(ranks)
    ]
    for thread in threads:
        thread.start()
    reports = shared.collect(deadline)
    for thread, report in zip(threads, reports, strict=True):
        if report.kind != "running":
            thread.join(1.0)
    return reports
