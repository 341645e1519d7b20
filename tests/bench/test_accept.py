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
def accept(tmp_path):
    """`accept(*arguments, **environment)` -> (the process, ended or not; the notes' path)."""
    python, notes = tmp_path / "python", tmp_path / "notes"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def start(*arguments: str, **environment: str) -> tuple[subprocess.Popen[str], Path]:
        env = {**os.environ, "PYTHON": str(python), "NOTES": str(notes), **environment}
        command = [str(SCRIPT), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True), notes

    return start


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


def test_all_steps_run_and_are_told(accept, tmp_path):
    command: Any = typer.main.get_command(bench)
    process, notes = accept("all", str(tmp_path), CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7")
    code, out, _ = ended(process)
    assert code == 0, out
    steps = [line.split()[3] for line in out.splitlines() if line.startswith("ok ")]
    assert set(steps[:3]) == {"rounds", "failures", "sanitizer"}
    assert steps[3:10] == ["grid", "graphs", "overlap", "skew", "demo", "doctor", "perfect"]
    assert steps[-4:] == ["compat", "captures", "deaths", "ordering"]
    assert all((tmp_path / f"{step}.log").read_text() == LAST for step in steps)
    assert "all on 8 GPUs" in out
    calls = notes.read_text().splitlines()
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
    process, notes = accept("rivals", str(tmp_path), CUDA_VISIBLE_DEVICES="0,1", LIMIT="77")
    code, out, _ = ended(process)
    assert code == 0, out
    (call,) = notes.read_text().splitlines()
    assert f"run --ranks 2 --limit 77 --out {tmp_path}/rivals" in call


def test_low_latency_is_measured_as_its_targets_are(accept, tmp_path):
    process, notes = accept("lowlatency", str(tmp_path), CUDA_VISIBLE_DEVICES="0,1")
    code, out, _ = ended(process)
    assert code == 0, out
    calls = [line for line in notes.read_text().splitlines() if "bench lowlatency" in line]
    assert sum("--reduce sender --combine-dtype fp8" in line for line in calls) == 2


@pytest.mark.parametrize(("gpus", "ranks"), [("0,1,2,3,4,5,6,7", (8, 4, 2)), ("0,1,2", (3, 2))])
def test_the_layer_is_measured_as_its_targets_are(accept, tmp_path, gpus, ranks):
    """On as many GPUs as there are first; always 32 experts a rank, as 8 ranks have of 256."""
    process, notes = accept("layer", str(tmp_path), CUDA_VISIBLE_DEVICES=gpus)
    code, out, _ = ended(process)
    assert code == 0, out
    calls = [line for line in notes.read_text().splitlines() if "bench layer " in line]
    for n in ranks:
        assert any(f"--ranks {n} --experts {32 * n} --dtype fp8" in line for line in calls), n
    most = f"--ranks {ranks[0]} "
    assert most in calls[0]
    assert "--tokens 8,16,64,128,256,512,1024 --overlap none,shared_expert,gemm_push" in calls[0]
    code, out, _ = ended(accept("layer", str(tmp_path), CUDA_VISIBLE_DEVICES="0")[0])
    assert code == 1
    assert "a layer that sends needs two GPUs" in out


def test_an_all_reduce_takes_what_gpus_there_are(accept, tmp_path):
    process, notes = accept("allreduce", str(tmp_path), CUDA_VISIBLE_DEVICES="0,1,2,3,4")
    assert ended(process)[0] == 0
    calls = notes.read_text()
    assert "--ranks 8" not in calls
    assert "--ranks 4" in calls
    code, out, _ = ended(accept("allreduce", str(tmp_path), CUDA_VISIBLE_DEVICES="0")[0])
    assert code == 1
    assert "an all-reduce needs two GPUs" in out


def test_a_failure_stops_nothing(accept, tmp_path):
    process, notes = accept("tests", str(tmp_path), CUDA_VISIBLE_DEVICES="0,1", FAIL="test_grid")
    code, out, _ = ended(process)
    assert code == 1
    assert out.count("FAILED") == 2, "when it happens and at the end"
    assert f"    | {LAST}" in out
    assert "7 steps ok, 1 not" in out
    assert len(notes.read_text().splitlines()) == 8


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
def test_a_step_that_shows_nothing_is_no_success(accept, tmp_path, what, last, code):
    process, _ = accept(what, str(tmp_path), CUDA_VISIBLE_DEVICES="0,1", LAST=last)
    assert ended(process)[0] == code


def test_a_few_gpus_leave_out_what_needs_more(accept, tmp_path):
    process, notes = accept("bench", str(tmp_path), CUDA_VISIBLE_DEVICES="0")
    assert ended(process)[0] == 0
    calls = notes.read_text()
    assert "--ranks" not in calls


def test_refusals(accept, tmp_path):
    process, _ = accept("rest", str(tmp_path), CUDA_VISIBLE_DEVICES="0")
    code, _, err = ended(process)
    assert code == 2
    assert "'rest' is none of all, tests" in err
    code, _, err = ended(accept("all", str(tmp_path), CUDA_VISIBLE_DEVICES="")[0])
    assert code == 1
    assert "no GPU" in err


@pytest.mark.parametrize("gpus", ["0", "0,1,2,3,4,5,6,7"])
def test_it_leaves_nothing_running(accept, tmp_path, gpus):
    hanging = {"HANG": "tests/memory", "CUDA_VISIBLE_DEVICES": gpus}
    process, notes = accept("tests", str(tmp_path), **hanging)
    pid_file = Path(f"{notes}.pid")
    deadline = time.monotonic() + 600
    while not (pid_file.exists() and pid_file.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int(pid_file.read_text())
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 130
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "a step outlived the script"
        time.sleep(0.02)
