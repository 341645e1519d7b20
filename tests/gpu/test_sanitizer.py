# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over the kernels, with one process for each of two ranks."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.sanitized import PROGRAMS

pytestmark = pytest.mark.gpu

LIMIT = 240  # seconds for one tool


@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_compute_sanitizer_finds_nothing(program, tool, tmp_path):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = Path(__file__).resolve().parents[2]
    ranks = []
    for rank in range(2):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % torch.cuda.device_count()),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": str(root),
        }
        # Asking the driver what it can do is no error: FABRIC handles, functions of later versions.
        options = ["--tool", tool, "--error-exitcode", "9"]
        if tool == "memcheck":
            options += ["--report-api-errors", "no"]
        command = [sanitizer, *options, sys.executable, "-m", "tests.gpu.sanitized", program]
        with (tmp_path / f"{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    try:
        for rank, process in enumerate(ranks):
            try:
                process.wait(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                pytest.fail(f"rank {rank} has not ended:\n{tail(tmp_path, rank)}")
            text = tail(tmp_path, rank)
            assert process.returncode == 0, f"rank {rank}:\n{text}"
            assert "sound" in text
            assert "ERROR SUMMARY: 0 errors" in text
    finally:
        for process in ranks:
            process.kill()


def tail(folder: Path, rank: int) -> str:
    return (folder / f"{rank}.log").read_text()[-4000:]
