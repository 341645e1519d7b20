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

# The reference runs on the CPU: under the sanitizer other kernels cost as much as ours.
RANK_PROGRAM = """
import torch, weft
from tests.rounds import Round, bits
cpu = torch.device("cpu")
with weft.Group.from_env(timeout=300.0) as group:
    for case, options in (
        (Round(tokens=(16, 9), hidden=7168, top_k=8, experts=256), {}),
        (Round(tokens=(3, 0), router="holes", top_k=9, experts=19, hidden=264), {}),
        (Round(tokens=(5, 7), hidden=256), {"combine_by": "fp8", "quantize": "fp8"}),
        (Round(tokens=(16, 9), hidden=1024), {"num_sms": 4}),
    ):
        with weft.AllToAll(group, max_tokens=16, top_k=case.top_k, num_experts=case.experts,
                           hidden=case.hidden, timeout=200.0, first_timeout=200.0,
                           **options) as a2a:
            x, ids, weights, _ = case.of(group.rank, cpu)
            if ids.numel():
                ids[0, 0] = 2**31 - 1
            for _ in range(2):
                received = a2a.dispatch(*(t.to(group.device) for t in (x, ids, weights)))
                seen = weft.Received(*(
                    tuple(p.cpu() for p in v) if isinstance(v, tuple) else v.cpu()
                    for v in (received.payloads, received.ids, received.weights, received.counts)
                ))
                if "quantize" not in options:
                    y = weft.reference.identity_experts(seen, case.dtype)
                    a2a.output().copy_(y.to(group.device))
                out = a2a.combine().cpu()
                if "quantize" not in options:
                    wanted = weft.reference.identity_round_trip(
                        x, ids, weights, a2a.placement, ranks=group.size
                    )
                    assert torch.equal(bits(out), bits(wanted))
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
    try:
        for rank, process in enumerate(ranks):
            text, _ = process.communicate(timeout=500)
            assert process.returncode == 0, f"rank {rank}:\n{text[-4000:]}"
            assert "sound" in text
            assert "ERROR SUMMARY: 0 errors" in text
    finally:
        for process in ranks:
            process.kill()
