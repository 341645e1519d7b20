# SPDX-License-Identifier: Apache-2.0
"""benchmarks/accept.sh with a stand-in of python: its steps, their GPUs, and its exit status."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from weft.cli.bench import bench

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "accept.sh"
# Notes its arguments, and fails where it is told to.
PYTHON = """\
#!/usr/bin/env bash
echo "$CUDA_VISIBLE_DEVICES: $*" >> "$NOTES"
echo "${LAST:-2 passed, 1 deselected in 0.1s}"
[[ -z ${FAIL:-} || $* != *$FAIL* ]]
"""
LAST = "2 passed, 1 deselected in 0.1s\n"
ALL = "0,1,2,3,4,5,6,7"


@pytest.fixture
def accept(tmp_path):
    """Return `accept(WHAT, GPUS, **environment)` -> (exit status, output, calls of python)."""
    python, notes = tmp_path / "python", tmp_path / "notes"
    python.write_text(PYTHON)
    python.chmod(0o755)
    notes.touch()

    def run(what: str, gpus: str, **environment: str) -> tuple[int, str, list[str]]:
        inputs = {"PYTHON": str(python), "NOTES": str(notes), **environment}
        env, pipe = {**os.environ, **inputs, "CUDA_VISIBLE_DEVICES": gpus}, subprocess.PIPE
        command = [str(SCRIPT), what, str(tmp_path)]
        done = subprocess.run(command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        return done.returncode, done.stdout, notes.read_text().splitlines()

    return run


def test_all_steps_run_and_are_reported(accept, tmp_path):
    command: Any = typer.main.get_command(bench)
    code, out, calls = accept("all", ALL)
    assert code == 0, out
    steps = [line.split()[3] for line in out.splitlines() if line.startswith("ok ")]
    assert len(steps) == len(calls) > 14
    assert all((tmp_path / f"{step}.log").read_text() == LAST for step in steps)
    assert [line.split(":")[0] for line in sorted(calls[:3])] == ["0,1,2", "3,4,5", "6,7"]
    assert all(line.startswith(f"{ALL}: ") for line in calls[3:])
    for line in calls:
        words = line.split()
        if "bench" in words:  # an option that is gone would fail on the GPUs only
            name, *options = words[words.index("bench") + 1 :]
            command.commands[name].make_context(name, options)
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), line


@pytest.mark.parametrize(
    ("what", "gpus", "last", "fail", "code", "words"),
    [
        ("tests", "0,1", "7 passed, 3 skipped in 2.00s", "none", 0, ""),
        ("tests", "0,1", "8 skipped in 2.00s", "none", 1, ""),
        ("tests", "0,1", "3 deselected in 0.10s", "none", 1, ""),
        ("sanitizer", "0,1", "1 passed, 1 skipped in 2.00s", "none", 1, ""),
        ("tests", "0,1", LAST.strip(), "test_grid", 1, f"    | {LAST}"),
        ("layer", "0", LAST.strip(), "none", 1, "a layer that sends needs two GPUs"),
    ],
)
def test_the_status_is_the_worst_of_the_steps(accept, what, gpus, last, fail, code, words):
    result, out, calls = accept(what, gpus, LAST=last, FAIL=fail)
    assert (result, words in out) == (code, True), out
    assert fail == "none" or len(calls) == 8, "a failure stops nothing"
