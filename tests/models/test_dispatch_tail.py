# SPDX-License-Identifier: Apache-2.0
"""models/ordering/tail.cu compiles, and on two GPUs the ordered tails lose no word."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "models" / "ordering" / "tail.cu"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NVCC is None, reason="needs nvcc")]


@pytest.mark.parametrize("runs", [0, pytest.param(2, marks=pytest.mark.gpu(2))])
def test_ordered_tails_lose_nothing(runs: int, tmp_path: Path) -> None:
    """Without GPUs, it compiles without a warning and refuses to run 0 times."""
    assert NVCC is not None
    program = tmp_path / "tail"
    strict = ("-std=c++17", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra")
    subprocess.run([NVCC, "-arch=sm_90", *strict, "-o", str(program), str(SOURCE)], check=True)
    command = [str(program), str(runs), "200000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == (0 if runs else 2), done.stdout + done.stderr
    assert done.stdout.count("200000 rounds") == 3 * runs
