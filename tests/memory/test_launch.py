# SPDX-License-Identifier: Apache-2.0
"""launch: results in order, the cause of a failure by name, and nothing left behind."""

import glob
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

import weft
from weft.errors import (
    InvalidArgument,
    PeerTimeout,
    RankFailed,
    SetupError,
)
from weft.memory import processes
from weft.memory.launch import launch

DEVICES = ("threads", "cpu")


def leftovers(temporary):
    """Names that a job with this $TMPDIR could leave: directories, shared memory, sockets.

    The fork server's own socket and its directory go when the server ends. An abstract address goes
    with the last descriptor of it; other jobs of this machine have theirs.
    """
    with open("/proc/net/unix", encoding="ascii") as file:
        sockets = [line.split()[-1] for line in file if "weft-" in line]
    own = [name for name in sockets if str(temporary) in name]
    return sorted([*own, *glob.glob(f"{temporary}/weft-*"), *glob.glob("/dev/shm/*weft-share*")])


def children():
    """Processes below this one, by the kernel's list."""
    found, todo = [], [os.getpid()]
    while todo:
        pid = todo.pop()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                    kids = [int(kid) for kid in file.read().split()]
                found += kids
                todo += kids
        except FileNotFoundError:
            continue
    return sorted(found)


def rank_threads():
    return sum(thread.name.startswith("weft-rank") for thread in threading.enumerate())


def settle():
    """Wait for threads of an overrun to come back from their sleep."""
    until = time.monotonic() + 600
    while rank_threads() and time.monotonic() < until:
        time.sleep(0.02)


def describe(group, word, number):
    return group.rank, group.size, str(group.device), word * number, os.getpid()


@pytest.mark.parametrize("device", DEVICES)
def test_results_come_in_rank_order(device):
    results = launch(describe, "ab", 2, ranks=3, device=device)
    assert [each[:4] for each in results] == [(r, 3, "cpu", "abab") for r in range(3)]
    pids = {each[4] for each in results}
    assert pids == {os.getpid()} if device == "threads" else len(pids - {os.getpid()}) == 3


def values(group):
    ready = "tests.ready" in sys.modules
    return {
        "tensor": torch.full((3,), group.rank), "threads": torch.get_num_threads(), "ready": ready
    }  # fmt: skip


def test_tensors_come_back_and_processes_use_one_thread():
    for rank, value in enumerate(launch(values, ranks=2)):
        assert value["tensor"].tolist() == [rank] * 3
        assert value["threads"] == 1
        assert value["ready"], "the fork server has imported what tests share"


def environment(group):
    return os.environ.get("WEFT_TEST_NOW"), os.getcwd()


def test_ranks_see_the_environment_of_the_call(monkeypatch):
    for value in ("one", "two"):
        monkeypatch.setenv("WEFT_TEST_NOW", value)
        assert launch(environment, ranks=1)[0][0] == value


WHERE = """
import weft

def where(group):
    return weft.__file__

if __name__ == "__main__":
    assert weft.launch(where, ranks=2) == [weft.__file__] * 2
    print("the same")
"""


def test_ranks_take_the_weft_of_their_launcher(tmp_path):
    """Not one of the working directory, which `python a/script.py` does not look into."""
    for folder, name, text in (("here/weft", "__init__", "1 / 0"), ("there", "script", WHERE)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, tmp_path / "there/script.py"],
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "the same\n", done.stderr


def test_launches_of_several_threads_leave_the_environment_alone(monkeypatch):
    monkeypatch.setattr(forkserver, "ensure_running", lambda: time.sleep(0.1))
    before = dict(os.environ)
    with ThreadPoolExecutor(3) as threads:
        started = [threads.submit(processes.fork_server) for _ in range(2)]
        time.sleep(0.05)
        assert threads.submit(processes._environment).result() == before
        for each in started:
            each.result()
    assert dict(os.environ) == before


class OddError(Exception):
    """Cannot be rebuilt from its pickle."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def fail(group, kind):
    if group.rank != 1:
        group.barrier()  # ends because rank 1 goes
    if kind == "value":
        raise ValueError("boom 42")
    if kind == "weft":
        raise InvalidArgument("top_k is 9 and 8 are possible")
    if kind == "odd":
        raise OddError(1, 2)
    sys.exit(3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "name", "text", "cause"),
    [
        ("value", "ValueError", "boom 42", ValueError),
        ("weft", "InvalidArgument", "top_k is 9 and 8 are possible", InvalidArgument),
        ("exit", "SystemExit", "3", SystemExit),
    ],
)
def test_the_first_cause_is_reported_not_its_echo(device, kind, name, text, cause):
    with pytest.raises(RankFailed) as failed:
        launch(fail, kind, ranks=3, device=device)
    said = str(failed.value)
    assert said.startswith(f"rank 1 of 3 raised {name}: {text}")
    assert "Also failed: rank 0 (RendezvousFailed), rank 2 (RendezvousFailed)." in said
    assert "in fail" in said  # the traceback
    assert isinstance(failed.value.__cause__, cause)


def test_an_error_that_cannot_travel_is_told_as_text():
    with pytest.raises(RankFailed, match="rank 1 of 2 raised OddError: 1 2") as failed:
        launch(fail, "odd", ranks=2)
    assert failed.value.__cause__ is None


def unpicklable(group):
    return lambda: None


def test_a_result_that_cannot_travel_is_an_error():
    with pytest.raises(RankFailed, match="rank 0 of 1 raised .*(pickle|local)"):
        launch(unpicklable, ranks=1)


def die(group, number):
    if group.rank == 2:
        if number:
            os.kill(os.getpid(), number)
        os._exit(7)
    group.barrier()


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV"), (0, "exit code 7")],
)
def test_a_dead_rank_is_the_cause(number, how):
    started = time.monotonic()
    with pytest.raises(RankFailed, match=f"rank 2 of 3 died: .*{how}") as told:
        launch(die, number, ranks=3)
    assert "__main__" not in str(told.value), "its function had begun"
    assert time.monotonic() - started < 100.0


def from_daemon(results):
    with pytest.raises(SetupError, match="is daemonic .* daemon=False, .* device=.threads"):
        launch(sleep, {}, ranks=2)
    results.put(launch(sleep, {}, ranks=2, device="threads"))


def test_a_daemonic_process_launches_threads_alone():
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    context.Process(target=from_daemon, args=(results,), daemon=True).start()
    assert results.get(timeout=100.0) == [0, 1]


def sleep(group, seconds):
    if group.rank in seconds:
        time.sleep(seconds[group.rank])
    return group.rank


@pytest.mark.parametrize("device", DEVICES)
def test_an_overrun_names_the_ranks_that_still_run(device):
    started = time.monotonic()
    seconds = 600.0 if device == "cpu" else 9.0  # threads cannot be ended
    with pytest.raises(RankFailed, match=r"rank 0, 2 of 3 still ran after 4 s"):
        launch(sleep, {0: seconds, 2: seconds}, ranks=3, device=device, timeout=4.0)
    assert time.monotonic() - started < 100.0


def wait_for_a_sleeper(group):
    if group.rank == 1:
        time.sleep(3.0)
    group.barrier(timeout=600.0)  # longer than the launch: nobody else ends this wait


def test_threads_that_wait_for_a_late_rank_are_woken():
    started = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0, 1, 2 of 3 still ran after 0.5 s"):
        launch(wait_for_a_sleeper, ranks=3, device="threads", timeout=0.5)
    assert time.monotonic() - started < 100.0


def hang_beside_a_failure(group):
    if group.rank == 0:
        raise PeerTimeout("rank 1 is late")
    time.sleep(60)


def test_ranks_that_hang_beside_a_failure_are_ended(monkeypatch):
    monkeypatch.setattr("weft.memory.processes.GRACE", 0.5)
    started = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 of 2 raised PeerTimeout") as failed:
        launch(hang_beside_a_failure, ranks=2)
    assert "Ended while still running: rank 1." in str(failed.value)
    assert time.monotonic() - started < 100.0


def test_functions_that_cannot_be_imported_are_refused():
    with pytest.raises(InvalidArgument, match="cannot be sent to another process"):
        launch(lambda group: 1, ranks=1)
    assert launch(lambda group: group.rank, ranks=2, device="threads") == [0, 1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"ranks": 2.0}, "ranks is 2.0"),
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
    ],
)
def test_options_out_of_range_are_refused(options, text):
    with pytest.raises(InvalidArgument, match=text):
        launch(describe, **options)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(InvalidArgument, match='torch sees no GPU: use device="cpu"'):
        launch(describe, "a", 1, ranks=1, device="cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_left_by_success_failure_or_overrun(device, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def once():
        assert launch(sleep, {}, ranks=2, device=device) == [0, 1]
        with pytest.raises(RankFailed):
            launch(fail, "value", ranks=2, device=device)
        with pytest.raises(RankFailed):
            launch(sleep, {1: 0.4}, ranks=2, device=device, timeout=0.2)
        settle()
        return len(os.listdir("/proc/self/fd")), children(), leftovers(tmp_path), rank_threads()

    settle()
    first = once()
    assert first[2:] == ([], 0)
    assert [once() for _ in range(2)] == [first] * 2


SCRIPT = """
import os, sys, time
from weft.memory.heap import Heap
from weft.memory.launch import launch

def body(group, out):
    heap = Heap.create(group, 100_000)
    group.barrier()
    with open(f"{out}/{group.rank}.part", "w") as file:
        file.write(f"{os.getpid()} {os.getppid()}")
    os.rename(f"{out}/{group.rank}.part", f"{out}/{group.rank}")
    time.sleep(60)

if __name__ == "__main__":
    launch(body, sys.argv[1], ranks=3)
"""


def started_ranks(tmp_path, temporary):
    """A launcher in a process of its own, with its ranks in the middle of their work."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": root}
    launcher = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], env=env, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 600
    while not all((tmp_path / str(r)).exists() for r in range(3)):
        assert launcher.poll() is None, "the launcher ended early"
        assert time.monotonic() < until
        time.sleep(0.02)
    pids = {int(pid) for r in range(3) for pid in (tmp_path / str(r)).read_text().split()}
    return launcher, pids


def wait_until_gone(pids):
    until = time.monotonic() + 600
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < until, f"still running: {left}"
        time.sleep(0.02)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("victims", ["launcher", "everyone"])
def test_kill_9_leaves_no_process_and_no_name(victims, tmp_path):
    # Sockets have short names: pytest's own folder may be too deep for them.
    with tempfile.TemporaryDirectory(prefix="w") as temporary:
        kill_and_look(victims, tmp_path, Path(temporary))


def kill_and_look(victims, tmp_path, temporary):
    launcher, pids = started_ranks(tmp_path, temporary)
    try:
        # The ranks run and their meeting is gone already.
        assert leftovers(temporary) == []
        if victims == "everyone":
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        launcher.kill()
    finally:
        launcher.kill()
        launcher.wait()
    wait_until_gone(pids)
    assert leftovers(temporary) == []


LIMITED = """
import os, resource, sys
import weft
from tests.memory.test_launch import describe, heap_of_each
from weft.memory.launch import files_of
for device in sys.argv[1:]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, 4096))
    try:
        weft.launch(describe, "a", 1, ranks=2, device=device)
    except weft.errors.SetupError as error:
        print(error)
    need = len(os.listdir("/proc/self/fd")) + files_of(4, device)
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, 4096))
    print(weft.launch(heap_of_each, ranks=4, device=device))
"""


def test_too_few_open_files_are_named_before_anything_starts():
    """With just as many as the check asks for, ranks meet, map each other's memory and return."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *DEVICES], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(DEVICES), done.stderr
    for refused, allowed in zip(lines[::2], lines[1::2], strict=True):
        assert "2 ranks take " in refused
        assert "its limit is 20: raise it (ulimit -n 1024)" in refused
        assert allowed == "[4, 4, 4, 4]"


def heap_of_each(group):
    with weft.Heap.create(group, 4096):
        group.barrier()
        return group.size


def test_more_ranks_than_operators_serve_are_refused_before_they_start():
    before = children()
    with pytest.raises(InvalidArgument, match="ranks is 73.*72"):
        launch(describe, "a", 1, ranks=73)
    assert children() == before


def test_a_function_of_a_notebook_or_stdin_is_refused_in_words():
    code = """
import weft
def fn(group): return group.rank
print(weft.launch(fn, ranks=2, device="threads"))
weft.launch(fn, ranks=2)
"""
    done = subprocess.run([sys.executable], input=code, capture_output=True, text=True, check=False)
    assert done.stdout == "[0, 1]\n", done.stderr
    assert "InvalidArgument" in done.stderr
    assert "move the function to a file and import it from there" in done.stderr


def test_a_rank_of_torchrun_is_told_to_make_a_group(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InvalidArgument, match=r"rank 1 of the 4 .*Group\.from_torch\(\)"):
        launch(describe, "a", 1, ranks=2)


def forks(group, how):
    """Rank 1 forks a helper that leaves the function; what each rank returns, and its exit code."""
    child = os.fork() if group.rank == 1 else None
    if child == 0:
        if how == "raises":
            raise ValueError("the helper's own")
        if how == "exits":
            sys.exit(3)
        return "the helper's"
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else None
    group.barrier()
    return code


@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("exits", 3), ("raises", 1)])
def test_a_forked_child_does_not_report_for_its_rank(how, code):
    assert launch(forks, how, ranks=2) == [None, code]
