# SPDX-License-Identifier: Apache-2.0
"""benchmarks/accept.sh with made-up steps: all of them run, each is told, the status is theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from weft.cli.bench import bench

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "accept.sh"
# Stands in for python: notes what it was asked for, and fails or hangs where it is told to.
PYTHON = """\
#!/usr/bin/env bash
echo "$CUDA_VISIBLE_DEVICES: $*" >> "$NOTES"
if [[ -n ${HANG:-} && $* == *$HANG* ]]; then echo $$ >> "$NOTES.pid"; sleep 60; fi
echo "${LAST:-2 passed, 1 deselected in 0.1s}"
[[ -z ${FAIL:-} || $* != *$FAIL* ]]
"""

LAST = "2 passed, 1 deselected in 0.1s\n"


@pytest.fixture
def begin(tmp_path):
    """`begin(WHAT, GPUS, **environment)` -> the process; what python is asked for is in NOTES."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def start(what: str, gpus: str, **environment: str) -> subprocess.Popen[str]:
        given = {"PYTHON": str(python), "NOTES": str(tmp_path / "notes"), **environment}
        env, pipe = {**os.environ, **given, "CUDA_VISIBLE_DEVICES": gpus}, subprocess.PIPE
        command = [str(SCRIPT), what, str(tmp_path)]
        return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)

    return start


@pytest.fixture
def accept(begin, tmp_path):
    """`accept(WHAT, GPUS, **environment)` -> exit status, what was printed, calls of python."""
    notes = tmp_path / "notes"

    def run(*given: str, **environment: str) -> tuple[int, str, list[str]]:
        notes.write_text("")
        process = begin(*given, **environment)
        out, err = process.communicate()
        return process.returncode, out + err, notes.read_text().splitlines()

    return run


def test_all_steps_run_and_are_told(accept, tmp_path):
    command: Any = typer.main.get_command(bench)
    code, out, calls = accept("all", "0,1,2,3,4,5,6,7")
    assert code == 0, out
    steps = [line.split()[3] for line in out.splitlines() if line.startswith("ok ")]
    assert set(steps[:3]) == {"rounds", "failures", "sanitizer"}
    assert steps[3:10] == ["grid", "graphs", "overlap", "skew", "demo", "doctor", "perfect"]
    assert steps[-4:] == ["compat", "captures", "deaths", "ordering"]
    assert all((tmp_path / f"{step}.log").read_text() == LAST for step in steps)
    assert "all on 8 GPUs" in out
    place = {line.split("tests/")[1].split()[0]: line.split(":")[0] for line in calls[:3]}
    assert place == {
        "alltoall/test_alltoall.py": "0,1,2",
        "alltoall/test_failures.py": "3,4,5",
        "gpu/test_sanitizer.py": "6,7",
    }
    assert all(line.startswith("0,1,2,3,4,5,6,7: ") for line in calls[3:])
    (both,) = [line for line in calls if "fp8-both.json" in line]
    assert "--tokens 1..4096 --combine-dtype fp8 --quantize fp8" in both
    for line in calls:
        words = line.split()
        if "bench" in words:  # an option that is gone would fail on the GPUs only
            name, *options = words[words.index("bench") + 1 :]
            command.commands[name].make_context(name, options)
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), line


def test_other_projects_programs_run_on_as_many_ranks_as_there_are_gpus(accept, tmp_path):
    code, out, (call,) = accept("rivals", "0,1", LIMIT="77")
    assert code == 0, out
    assert f"run --ranks 2 --limit 77 --out {tmp_path}/rivals" in call


def test_low_latency_is_measured_as_its_targets_are(accept):
    code, out, calls = accept("lowlatency", "0,1")
    assert code == 0, out
    calls = [line for line in calls if "bench lowlatency" in line]
    assert sum("--reduce sender --combine-dtype fp8" in line for line in calls) == 2


@pytest.mark.parametrize(("gpus", "ranks"), [("0,1,2,3,4,5,6,7", (8, 4, 2)), ("0,1,2", (3, 2))])
def test_the_layer_is_measured_as_its_targets_are(accept, gpus, ranks):
    """On as many GPUs as there are first; always 32 experts a rank, as 8 ranks have of 256."""
    code, out, calls = accept("layer", gpus)
    assert code == 0, out
    calls = [line for line in calls if "bench layer " in line]
    for n in ranks:
        assert any(f"--ranks {n} --experts {32 * n} --dtype fp8" in line for line in calls), n
    most = f"--ranks {ranks[0]} "
    assert most in calls[0]
    assert "--tokens 8,16,64,128,256,512,1024 --overlap none,shared_expert,gemm_push" in calls[0]
    code, out, _ = accept("layer", "0")
    assert code == 1
    assert "a layer that sends needs two GPUs" in out


def test_an_all_reduce_takes_what_gpus_there_are(accept):
    code, out, calls = accept("allreduce", "0,1,2,3,4")
    assert code == 0, out
    assert not [line for line in calls if "--ranks 8" in line]
    assert [line for line in calls if "--ranks 4" in line]
    code, out, _ = accept("allreduce", "0")
    assert code == 1
    assert "an all-reduce needs two GPUs" in out


def test_a_failure_stops_nothing(accept):
    code, out, calls = accept("tests", "0,1", FAIL="test_grid")
    assert code == 1
    assert out.count("FAILED") == 2, "when it happens and at the end"
    assert f"    | {LAST}" in out
    assert "7 steps ok, 1 not" in out
    assert len(calls) == 8


@pytest.mark.parametrize(
    ("what", "last", "code"),
    [
        ("tests", "7 passed, 3 skipped in 2.00s", 0),
        ("tests", "8 skipped in 2.00s", 1),
        ("tests", "3 deselected in 0.10s", 1),
        ("sanitizer", "1 passed, 1 skipped in 2.00s", 1),
        ("ordering", "3 passed in 60.00s", 0),
    ],
)
def test_a_step_that_shows_nothing_is_no_success(accept, what, last, code):
    assert accept(what, "0,1", LAST=last)[0] == code


def test_a_few_gpus_leave_out_what_needs_more(accept):
    code, out, calls = accept("bench", "0")
    assert code == 0, out
    assert not [line for line in calls if "--ranks" in line]


def test_refusals(accept):
    code, said, _ = accept("rest", "0")
    assert code == 2
    assert "'rest' is none of all, tests" in said
    code, said, _ = accept("all", "")
    assert code == 1
    assert "no GPU" in said


@pytest.mark.parametrize("gpus", ["0", "0,1,2,3,4,5,6,7"])
def test_it_leaves_nothing_running(begin, tmp_path, gpus):
    process, pid_file = begin("tests", gpus, HANG="tests/memory"), tmp_path / "notes.pid"
    deadline = time.monotonic() + 600
    while not (pid_file.exists() and pid_file.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int(pid_file.read_text())
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 130
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "a step outlived the script"
        time.sleep(0.02)
