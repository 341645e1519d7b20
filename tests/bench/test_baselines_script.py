"""benchmarks/baselines.sh with made-up steps: all run or are told, none with multicast."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "baselines.sh"
# Stands in for python: notes what it was asked for, and fails where it is told to.
PYTHON = """\
#!/usr/bin/env bash
echo "${NCCL_NVLS_ENABLE}${TORCH_SYMM_MEM_DISABLE_MULTICAST} $*" | tr '\\n' ' ' >> "$NOTES"
echo >> "$NOTES"
[[ -z ${FAIL:-} || $* != *$FAIL* ]]
"""


@pytest.fixture
def baselines(tmp_path):
    """`baselines(*arguments, **environment)` -> (exit status, what it printed, its calls)."""
    python, notes = tmp_path / "python", tmp_path / "notes"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(*arguments: str, **environment: str) -> tuple[int, str, list[str]]:
        env = {**os.environ, "PYTHON": str(python), "NOTES": str(notes), **environment}
        command = [str(SCRIPT), str(tmp_path / "out"), *arguments]
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        calls = notes.read_text().splitlines() if notes.exists() else []
        return result.returncode, result.stdout, calls

    return run


def test_all_steps_run_and_are_told(baselines, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "loom-1-py3-none-any.whl").touch()
    code, out, calls = baselines(str(wheels))
    assert code == 0, out
    steps = [line.split()[-1] for line in out.splitlines() if line.startswith("ok ")]
    assert steps[:2] == ["install", "build"]
    assert len(steps) == 8
    assert all((tmp_path / "out" / f"{step}.log").exists() for step in steps)
    assert all(call.startswith("01 ") for call in calls), "NVLink multicast stays off"
    (install,) = [call for call in calls if "pip install" in call]
    assert "--no-index" in install
    assert "loom-1-py3-none-any.whl" in install
    moe = [call for call in calls if " moe " in call]
    assert len(moe) == 3
    assert all("--peers" in call and "--tokens 1,8,32,64,128" in call for call in moe)
    assert sum("--quantize fp8 --combine-dtype fp8" in call for call in moe) == 1
    (reduce,) = [call for call in calls if " allreduce " in call]
    assert "--peers" in reduce
    assert sum(" lowlatency " in call for call in calls) == 2


def test_a_step_that_fails_stops_nothing(baselines):
    code, out, calls = baselines(FAIL="gen_trtllm_comm_module")
    assert code == 1
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("FAILED")] == ["build"]
    assert sum(" bench " in call for call in calls) == 6
    assert not any("pip install" in call for call in calls), "no wheels were named"


def test_nothing_is_begun_when_the_time_is_spent(baselines):
    code, out, calls = baselines(LIMIT="10")
    assert code == 1
    assert out.count("not begun") == 7
    assert not any(" bench " in call for call in calls)
