"""compute-sanitizer over the kernels, one process for each of two ranks."""

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

LIMIT = 240  # seconds for one tool
# The reference runs on the CPU, and only whole copies move between it and the GPU: the sanitizer
# patches every module that a torch kernel brings, and there are hundreds of kernels in each.
RANK_PROGRAM = """
import time, torch, weft
from tests.gpu.sanitized import met
from tests.rounds import Round, bits
from weft.alltoall.config import Offsets
begin, cpu = time.monotonic(), torch.device("cpu")

def say(*words):
    print(f"{time.monotonic() - begin:6.1f} s", *words, flush=True)

def arrived(a2a, received):
    shape, heap = a2a.config.shape, a2a.heap
    layout, slots = Offsets.of(shape), shape.ranks * shape.tokens
    words = layout.route_bytes // 4
    route = heap.tensor((slots, words), torch.int32, offset=layout.route).cpu()
    route = route.view(shape.ranks, shape.tokens, words)
    weights = route[..., shape.slots:].view(torch.float32)
    return weft.Received((received.x.cpu(),), route[..., :shape.top_k],
                         weights[..., :shape.top_k], received.counts.cpu())

say("imported")
with met() as group:
    say("met")
    for case, options in (
        (Round(tokens=(16, 9), hidden=7168, top_k=8, experts=256), {}),
        (Round(tokens=(3, 0), router="holes", top_k=9, experts=19, hidden=264), {}),
        (Round(tokens=(5, 7), hidden=256), {"combine_dtype": "fp8", "quantize": "fp8"}),
        # One CTA, so that the rings in shared memory go round.
        (Round(tokens=(16, 9), hidden=7168), {"num_sms": 1}),
    ):
        with weft.AllToAll(group, max_tokens=16, top_k=case.top_k, num_experts=case.experts,
                           hidden=case.hidden, timeout=200.0, first_timeout=200.0,
                           **options) as a2a:
            say("built for", options)
            x, ids, weights, _ = case.of(group.rank, cpu)
            if ids.numel():
                ids[0, 0] = 2**31 - 1
            given = [t.to(group.device) for t in (x, ids, weights)]
            for _ in range(2):
                received = a2a.dispatch(*given)
                if "quantize" not in options:
                    y = weft.reference.identity_experts(arrived(a2a, received), case.dtype)
                    a2a.output().copy_(y)
                out = a2a.combine().cpu()
                if "quantize" not in options:
                    wanted = weft.reference.identity_round_trip(
                        x, ids, weights, a2a.placement, ranks=group.size
                    )
                    assert torch.equal(bits(out), bits(wanted))
            say("played with", options)

    made = [torch.randn(17, 1032, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    *parts, residual = (t.bfloat16() for t in made)
    weight = torch.linspace(0.5, 2, 1032)
    wanted = weft.reference.allreduce_fused(parts, residual, weight)
    given = [t.to(group.device) for t in (parts[group.rank], residual, weight)]
    sizes = {"max_tokens": 17, "hidden": 1032, "timeout": 200.0}
    for at in ("owner", "receiver"):
        with weft.AllReduce(group, epilogue_at=at, **sizes) as reduce:
            for backend in reduce.backends * 2:
                found = reduce.fused(given[0], residual=given[1], weight=given[2], backend=backend)
                assert torch.equal(bits(found.norm.cpu()), bits(wanted.norm))
                assert torch.equal(bits(found.residual.cpu()), bits(wanted.residual))
        say("summed by", reduce.backends, "with the epilogue at the", at)

    case = Round(tokens=(16, 9), hidden=1024, top_k=4, experts=16)
    x, ids, weights, _ = (t.to(group.device) for t in case.of(group.rank, cpu))
    for options in ({}, {"reduce": "sender", "combine_dtype": "fp8", "split_phase": True}):
        with weft.LowLatencyAllToAll(
            group, max_tokens=16, top_k=4, num_experts=16, hidden=1024, timeout=200.0, **options
        ) as low:
            y = torch.randn(low.num_local_experts, 32, 1024).bfloat16().to(group.device)
            for _ in range(3):
                got = low.dispatch(x, ids, weights)
                out = low.combine(y, ids, weights, got.handle)
            assert torch.isfinite(out.cpu().float()).all()
            low.check()
        say("low latency with", options)
print("sound")
"""
PROGRAMS = {
    "exchanges": RANK_PROGRAM,
    "groups": "from tests.gpu.sanitized import main; main()",
}


@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_kernels_are_sound(program, tool, tmp_path):
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
        command = [sanitizer, *options, sys.executable, "-c"]
        with (tmp_path / f"{rank}.log").open("w") as log:
            ranks.append(
                subprocess.Popen(
                    [*command, PROGRAMS[program]], env=env, stdout=log, stderr=subprocess.STDOUT
                )
            )
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
