# SPDX-License-Identifier: Apache-2.0
"""Every script in examples/ runs on CPU ranks and exits with status 0; each checks its result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "4"]
COMMANDS = {
    "operators.py": [],
    "torchrun_layer.py": [],
    "checkpoint_layer.py": [],
    "decode_loop.py": ["--steps", "8"],
    "recovery.py": [],
    "eplb.py": [],
    "two_hosts.py": ["--pretend"],
}
UNDER_TORCHRUN = {"torchrun_layer.py", "two_hosts.py"}


def test_every_example_is_run():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_example(name):
    if name == "checkpoint_layer.py":
        pytest.importorskip("safetensors")
    launcher = TORCHRUN if name in UNDER_TORCHRUN else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(ROOT / "examples" / name), *COMMANDS[name]]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.strip()
