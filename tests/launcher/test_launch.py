# SPDX-License-Identifier: Apache-2.0
"""launch: ordered results, the named cause of a failure, and no leftovers."""

import contextlib
import glob
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

import weft
from tests.baseline import die, open_files, raises_soon
from tests.group.test_replacement import fork
from weft.errors import GeometryMismatch, InvalidArgument, PeerTimeout, RankFailed, SetupError
from weft.group.group import Group
from weft.launcher import processes
from weft.launcher.launch import launch
from weft.launcher.reports import Report, build_launch_error

DEVICES = ("threads", "cpu")
BOTH = pytest.mark.parametrize("device", DEVICES)


def leftovers(temporary):
    """Return directories, shared memory and sockets that a job with this $TMPDIR may leave."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    # An abstract address goes with the last descriptor of it; other jobs have theirs.
    own = [line for line in lines if "weft-" in line and str(temporary) in line]
    return sorted([*own, *glob.glob(f"{temporary}/weft-*"), *glob.glob("/dev/shm/*weft-share*")])


def children():
    result, todo = [], [os.getpid()]
    while todo:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{todo.pop()}/task").iterdir():
                kids = [int(kid) for kid in (task / "children").read_text().split()]
                result += kids
                todo += kids
    return sorted(result)


def rank_threads():
    return sum(thread.name.startswith("weft-rank") for thread in threading.enumerate())


def wait_until(there, *, what):
    until = time.monotonic() + 600
    while not there():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def describe(group, word, number):
    reported = group.size, str(group.device), word * number, os.environ.get("WEFT_TEST_NOW")
    return torch.full((3,), group.rank), reported, os.getpid(), torch.get_num_threads()


@BOTH
def test_results_come_in_rank_order_from_the_environment_of_the_call(device, monkeypatch):
    for now in ("one", "two"):
        monkeypatch.setenv("WEFT_TEST_NOW", now)
        results = launch(describe, "ab", 2, ranks=3, device=device)
        for rank, (tensor, reported, _, threads) in enumerate(results):
            assert tensor.tolist() == [rank] * 3
            assert reported == (3, "cpu", "abab", now)
            assert device == "threads" or threads == 1
        pids = {pid for _, _, pid, _ in results}
        assert pids == {os.getpid()} if device == "threads" else len(pids - {os.getpid()}) == 3


def test_launches_of_several_threads_leave_the_environment_alone(monkeypatch):
    monkeypatch.setattr(forkserver, "ensure_running", lambda: time.sleep(0.1))
    before = dict(os.environ)
    with ThreadPoolExecutor(3) as threads:
        started = [threads.submit(processes.start_fork_server) for _ in range(2)]
        time.sleep(0.05)
        assert threads.submit(processes._copy_environment).result() == before
        for each in started:
            each.result()
    assert dict(os.environ) == before


class OddError(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


ERRORS = {
    "value": ValueError("boom 42"),
    "weft": InvalidArgument("top_k is 9 and 8 are possible"),
    "odd": OddError(1, 2),
    "exit": SystemExit(3),
}


def misbehave(group, how):
    group.barrier()
    if group.rank == 1 and how != "return":
        if how in ERRORS:
            raise ERRORS[how]
        if how == "lambda":
            return lambda: None
        os._exit(7) if how == "exit code 7" else os.kill(os.getpid(), getattr(signal, how))
    return group.barrier() if group.rank != 1 and how != "lambda" else None


CLOSED = r"rank [02] of 3 raised RendezvousFailed: rank 1 \(pid \d+\) closed(.|\n)*"
WAYS = [
    *((how, f"rank 1 of 3 raised {type(e).__name__}: {e}") for how, e in ERRORS.items()),
    ("return", rf"{CLOSED}\nRank 1 had returned from its function \d+\.\d\d s before: "),
    ("lambda", "rank 1 of 3 raised .*(pickle|local)"),
    *((how, f"rank 1 of 3 died: .*{how}") for how in ("SIGKILL", "SIGSEGV", "exit code 7")),
]


@pytest.mark.parametrize(
    ("device", "how", "text"),
    [(device, *way) for device in DEVICES for way in WAYS[: 5 if device == "threads" else None]],
)
def test_the_first_cause_is_reported_rather_than_its_echo(device, how, text, monkeypatch):
    """Ranks that wait for the failed one end by themselves, before they would be killed."""
    monkeypatch.setattr("weft.launcher.processes.GRACE", 1000.0)
    monkeypatch.setitem(launch.__globals__, "GRACE", 1000.0)
    with raises_soon(RankFailed, f"^{text}") as failed:
        launch(misbehave, how, ranks=3, device=device)
    message = str(failed.value)
    assert "still running" not in message
    assert "__main__" not in message, "its function had begun"
    if how in ERRORS:
        assert "Also failed: rank 0 (RendezvousFailed), rank 2 (RendezvousFailed)." in message
        assert "in misbehave" in message  # the traceback
        travels = device == "threads" or how != "odd"
        assert isinstance(failed.value.__cause__, type(ERRORS[how]) if travels else type(None))


def from_daemon(results):
    with pytest.raises(SetupError, match="is daemonic .* daemon=False, .* device=.threads"):
        launch(sleep, {}, ranks=2)
    results.put(launch(sleep, {}, ranks=2, device="threads"))


def test_a_daemonic_process_launches_threads_alone():
    context = processes.start_fork_server()
    results = context.Queue()
    context.Process(target=from_daemon, args=(results,), daemon=True).start()
    assert results.get(timeout=100.0) == [0, 1]


def sleep(group, seconds):
    time.sleep(seconds.get(group.rank, 0.0))
    return group.rank


@BOTH
def test_an_overrun_names_the_ranks_that_still_run(device):
    seconds = 600.0 if device == "cpu" else 3.0  # threads cannot be ended
    for timeout in (1, 20):  # processes take a while to start on a busy machine
        with raises_soon(RankFailed, f"still ran after {timeout} s") as caught:
            launch(sleep, {0: seconds, 2: seconds}, ranks=3, device=device, timeout=timeout)
        if "rank 0, 1, 2 of 3" not in str(caught.value):
            break
    assert str(caught.value).startswith(f"rank 0, 2 of 3 still ran after {timeout} s")


def hang_beside_a_failure(group, failing):
    if group.rank == 0 and failing:
        raise PeerTimeout("rank 1 is late")
    if group.rank == 1:
        time.sleep(60 if failing else 1.5)
    group.barrier(timeout=600.0)  # longer than the launch, which ends this wait


def test_ranks_that_hang_or_wait_for_a_late_rank_are_ended(monkeypatch):
    monkeypatch.setattr("weft.launcher.processes.GRACE", 0.5)
    with raises_soon(RankFailed, "rank 0 of 2 raised PeerTimeout") as failed:
        launch(hang_beside_a_failure, True, ranks=2)
    assert "Ended while still running: rank 1." in str(failed.value)
    with raises_soon(RankFailed, "rank 0, 1, 2 of 3 still ran after 0.5 s"):
        launch(hang_beside_a_failure, False, ranks=3, device="threads", timeout=0.5)


class DiesWhenUnpacked:
    """Ends the process that unpickles it, before it meets the others."""

    def __init__(self, rank):
        self.rank = rank

    def __reduce__(self):
        return die_as, (self.rank,)


def die_as(rank):
    if multiprocessing.current_process().name == f"weft-rank-{rank}":
        die()
    return {}


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_before_it_meets_ends_the_launch(victim, monkeypatch):
    monkeypatch.setattr("weft.launcher.processes.GRACE_MEETING", 1000.0)
    with pytest.raises(RankFailed, match=rf"rank {victim} of 3 died: .*SIGKILL") as failed:
        launch(sleep, DiesWhenUnpacked(victim), ranks=3)
    assert "still running" not in str(failed.value)  # they were told, and ended by themselves


def test_a_thread_that_raises_before_it_meets_ends_the_launch(monkeypatch):
    real = Group.from_meeting

    def from_meeting(meeting, *, rank, **options):
        if rank == 1:
            raise MemoryError("no room")
        return real(meeting, rank=rank, **options)

    monkeypatch.setattr(Group, "from_meeting", from_meeting)
    monkeypatch.setitem(launch.__globals__, "GRACE_MEETING", 1000.0)
    with pytest.raises(RankFailed, match="rank 1 of 3 raised MemoryError: no room") as failed:
        launch(sleep, {}, ranks=3, device="threads")
    assert "still running" not in str(failed.value)


ECHO = PeerTimeout("rank 0, dispatch: rank 2 and rank 1 did not publish epoch 1")


def after(error, cause=None, *, explicit=True):
    """Return an error that was raised because of another one, or while that was handled."""
    error.__cause__, error.__context__ = cause if explicit else None, cause
    error.__suppress_context__ = explicit
    return error


OWN = ValueError("its own cause")
OWN.__cause__ = OWN


@pytest.mark.parametrize(
    ("outcomes", "named"),
    [
        ([ECHO, ValueError("early"), ValueError("late")], "rank 1 of 3 raised ValueError: early"),
        ([ECHO, "returned later"], "rank 0 of 2 raised PeerTimeout"),
        ([after(ValueError("no result"), ECHO), KeyError("mine")], "rank 1 of 2 raised KeyError"),
        ([after(ValueError("no result"), ECHO, explicit=False), KeyError("mine")], "rank 1 of 2"),
        ([ECHO, OWN], "rank 1 of 2 raised ValueError: its own cause"),
        # An error that names a rank which had returned comes before others, unless it is no wait.
        ([PeerTimeout("rank 0: rank 2 is late"), "returned", ECHO], "rank 2 of 3 raised PeerT"),
        ([GeometryMismatch("rank 1 has 8"), "returned", ECHO], "rank 2 of 3 raised PeerTimeout"),
    ],
)
def test_a_cause_comes_before_echoes_and_early_before_late(outcomes, named):
    reports = []
    for rank, outcome in enumerate(outcomes):
        text = isinstance(outcome, str)
        report = Report(rank, "returned") if text else Report.from_error(rank, outcome)
        report.timestamp = {"returned": -1.0, "returned later": 99.0}.get(str(outcome), rank)
        reports.append(report)
    error = str(build_launch_error(reports, len(reports), 1.0))
    assert error.startswith(named)
    reason = f"Rank 1 had returned from its function {len(outcomes)}.00 s before: every rank must"
    assert (reason in error) == ("returned" in outcomes)
    assert build_launch_error([Report(0, "returned")], 1, 1.0) is None


def test_functions_that_a_new_process_cannot_import_are_refused(monkeypatch):
    def fn(group):
        return group.rank

    assert launch(fn, ranks=2, device="threads") == [0, 1]
    with pytest.raises(InvalidArgument, match="cannot be sent to another process"):
        launch(fn, ranks=1)
    notebook = types.ModuleType("__main__")
    vars(notebook).update(__spec__=None, fn=fn)
    fn.__module__, fn.__qualname__ = "__main__", "fn"
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    with pytest.raises(InvalidArgument, match="move the function to a file and import it from the"):
        launch(fn, ranks=2)


def test_launches_without_a_gpu_and_of_torchrun_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InvalidArgument, match='torch sees no GPU: use device="cpu"'):
        launch(sleep, {}, ranks=1, device="cuda")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InvalidArgument, match=r"rank 1 of the 4 .*Group\.from_torch\(\)"):
        launch(sleep, {}, ranks=2)


@BOTH
def test_nothing_is_left_by_success_failure_or_overrun(device, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def once():
        assert launch(sleep, {}, ranks=2, device=device) == [0, 1]
        with pytest.raises(RankFailed):
            launch(misbehave, "value", ranks=2, device=device)
        with pytest.raises(RankFailed):
            launch(sleep, {1: 0.4}, ranks=2, device=device, timeout=0.2)
        # Threads of an overrun come back from their sleep.
        wait_until(lambda: not rank_threads(), what="threads of ranks run")
        return open_files(), children(), leftovers(tmp_path), rank_threads()

    wait_until(lambda: not rank_threads(), what="threads of other tests run")
    first = once()
    assert first[2:] == ([], 0)
    assert once() == first


def stay(group, out):
    heap = weft.Heap.create(group, 100_000)
    group.barrier()
    Path(out, f"{group.rank}.part").write_text(str(os.getpid()))
    os.rename(f"{out}/{group.rank}.part", f"{out}/{group.rank}")
    time.sleep(60)
    heap.close()


def launcher(_address, _rank, out):
    """Launch ranks from a process of the fork server, which the ranks share."""
    launch(stay, out, ranks=3)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("victims", ["launcher", pytest.param("all", marks=pytest.mark.slow)])
def test_kill_9_leaves_no_process_and_no_name(victims, tmp_path, monkeypatch):
    """Kill the launcher alone, or its ranks as well."""
    # Sockets have short names: pytest's own folder may be too deep for them.
    with tempfile.TemporaryDirectory(prefix="w") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        processes.start_fork_server()
        process = fork(launcher, "", 0, str(tmp_path))
        try:
            files = [tmp_path / str(rank) for rank in range(3)]
            wait_until(lambda: all(file.exists() for file in files), what="ranks did not start")
            pids = [int(file.read_text()) for file in files]
            # The ranks run and their meeting is gone already.
            assert leftovers(temporary) == []
            for pid in pids if victims == "all" else ():
                os.kill(pid, signal.SIGKILL)
        finally:
            process.kill()
            process.join()
        wait_until(lambda: not any(map(alive, pids)), what=f"{pids} still run")
        assert leftovers(temporary) == []


PROGRAM = """
import os, resource
import weft
from weft.launcher.launch import count_open_files

def where(group):
    with weft.Heap.create(group, 4096):
        group.barrier()
        return weft.__file__

if __name__ == "__main__":
    for device in ("threads", "cpu"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 4096))
        try:
            weft.launch(where, ranks=2, device=device)
        except weft.errors.SetupError as error:
            print("2 ranks need " in str(error), "its limit is 20: raise it" in str(error))
        need = len(os.listdir("/proc/self/fd")) + count_open_files(4, device)
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, 4096))
        print(weft.launch(where, ranks=4, device=device) == [weft.__file__] * 4)
"""


@pytest.mark.slow
def test_ranks_take_their_launchers_weft_and_the_files_that_it_checked_for(tmp_path):
    """The weft of the working directory is not used; `python a/script.py` ignores it, too."""
    for folder, name, text in (("here/weft", "__init__", "1 / 0"), ("there", "script", PROGRAM)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"{name}.py").write_text(text)
    words = [sys.executable, tmp_path / "there/script.py"]
    done = subprocess.run(words, cwd=tmp_path / "here", capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True"] * 6, done.stderr


def forks(group, how):
    """Rank 1 forks a helper that leaves the function; return results and exit codes."""
    child = os.fork() if group.rank == 1 else None
    if child == 0:
        if how == "raises":
            raise ValueError("the helper's own")
        return "the helper's" if how == "returns" else sys.exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else None
    group.barrier()
    return code


@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("exits", 3), ("raises", 1)])
def test_a_forked_child_does_not_report_for_its_rank(how, code):
    assert launch(forks, how, ranks=2) == [None, code]
