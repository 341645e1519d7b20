"""compute-sanitizer over both kernels, one process for each of two ranks."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

RANK_PROGRAM = """
import torch, weft
from tests.rounds import Round, play
with weft.Group.from_env(timeout=300.0) as group:
    for case in (
        Round(tokens=(5, 0)), Round(tokens=(16, 16), hidden=7168, top_k=8, experts=256, add=True),
        Round(tokens=(3, 9), router="holes", top_k=9, experts=19, hidden=264),
    ):
        with weft.AllToAll(group, max_tokens=16, top_k=case.top_k, num_experts=case.experts,
                           hidden=case.hidden, timeout=200.0, first_timeout=200.0) as a2a:
            for seed in range(3):
                play(a2a, case.next(seed=seed))
            x, ids, weights, _ = case.of(group.rank, group.device)
            if ids.numel():
                ids[0, 0] = 2**31 - 1
            a2a.dispatch(x, ids, weights)
            a2a.combine()
            torch.cuda.synchronize()
print("sound")
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_kernels_are_sound(tool):
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
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c"]
        ranks.append(
            subprocess.Popen(
                [*command, RANK_PROGRAM],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for rank, process in enumerate(ranks):
        text, _ = process.communicate(timeout=500)
        assert process.returncode == 0, f"rank {rank}:\n{text[-4000:]}"
        assert "sound" in text
        assert "ERROR SUMMARY: 0 errors" in text
