# SPDX-License-Identifier: Apache-2.0
"""models/ordering/tail.cu compiles, and on two GPUs the ordered tails lose no word."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).resolve().parents[2] / "models" / "ordering" / "tail.cu"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NVCC is None, reason="needs nvcc"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program, compiled without a warning."""
    assert NVCC is not None
    path = tmp_path_factory.mktemp("ordering") / "tail"
    strict = ("-std=c++17", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra")
    subprocess.run([NVCC, "-arch=sm_90", *strict, "-o", str(path), str(SOURCE)], check=True)
    return path


def test_two_gpus_are_required(program: Path) -> None:
    if torch.cuda.device_count() >= 2:
        pytest.skip("there are two GPUs")
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs two GPUs" in done.stderr or "cudaGetDeviceCount" in done.stderr


@pytest.mark.gpu(2)
def test_ordered_tails_lose_nothing(program: Path) -> None:
    done = subprocess.run([str(program), "1", "50000"], capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("50000 rounds") == 3
