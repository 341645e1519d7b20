# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over the kernels: `python -m tests.gpu.test_sanitizer PROGRAM` is one rank.

Inputs are made on the CPU: the sanitizer patches every module that a torch kernel brings.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.rounds import Round, combine_options
from weft.errors import BadExpertId
from weft.grouping.operator import ExpertGroups

pytestmark = pytest.mark.gpu

CPU, BEGAN = torch.device("cpu"), time.monotonic()
PATIENT: dict[str, Any] = {"timeout": 200.0, "first_timeout": 200.0}


def say(*words: object) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s", *words, flush=True)


def rounds(group: weft.Group) -> None:
    few: dict[str, Any] = {"num_sms": 1} if group.device.type == "cuda" else {}
    cases: tuple[tuple[Round, dict[str, Any]], ...] = (
        (Round(tokens=(16, 9), hidden=7168, top_k=8, experts=256), {}),
        (Round(tokens=(3, 0), router="holes", top_k=9, experts=19, hidden=264), {}),
        (Round(tokens=(5, 7), hidden=256), {"combine_dtype": "fp8", "quantize": "fp8"}),
        (Round(tokens=(16, 9), hidden=7168), few),  # so the rings in shared memory go round
    )
    for case, options in cases:
        with weft.AllToAll(group, **case.sizes(16), **PATIENT, **options) as a2a:
            say("built for", options)
            x, ids, weights, _ = case.inputs_of(group.rank, CPU)
            if ids.numel():
                ids[0, 0] = 2**31 - 1
            args = [t.to(group.device) for t in (x, ids, weights)]
            for _ in range(2):
                a2a.dispatch(*args)
                a2a.combine().cpu()
            with contextlib.suppress(BadExpertId):
                a2a.check()
            say("played with", options)


def sums(group: weft.Group) -> None:
    made = [torch.randn(17, 1032, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    x, residual = (t.bfloat16().to(group.device) for t in made)
    weight = torch.linspace(0.5, 2, 1032).to(group.device)
    sizes: dict[str, Any] = {"max_tokens": 17, "hidden": 1032, "timeout": 200.0}
    for at in ("owner", "receiver"):
        with weft.AllReduce(group, epilogue_at=at, **sizes) as reduce:
            for backend in reduce.backends * 2:
                result = reduce.fused(x, residual=residual, weight=weight, backend=backend)
                assert result.norm is not None
                result.norm.cpu()
        say("summed by", reduce.backends, "with the epilogue at the", at)


def by_expert(group: weft.Group) -> None:
    case = Round(tokens=(16, 9), hidden=1024, top_k=4, experts=16)
    x, ids, weights, _ = (t.to(group.device) for t in case.inputs_of(group.rank, CPU))
    receiver = {"reduce": "receiver"}
    sender = {"reduce": "sender", "combine_dtype": "fp8", "split_phase": True}
    modes: tuple[dict[str, Any], ...] = (receiver, sender)
    for options in modes:
        sizes = case.sizes(16)
        with weft.LowLatencyAllToAll(group, **sizes, timeout=200.0, **options) as low:
            y = torch.randn(low.num_local_experts, 32, 1024).bfloat16().to(group.device)
            for _ in range(3):
                got = low.dispatch(x, ids, weights)
                out = low.combine(y, ids, weights, got.handle)
            assert torch.isfinite(out.cpu().float()).all()
            low.check()
        say("low latency with", options)


CASE = Round(tokens=(16, 9), top_k=5, experts=12, hidden=640, router="holes")
WAYS = (("push", "scatter"), ("push", "send"), ("choices", "send"), ("fp8", "send"))


def rows_return(group: weft.Group) -> None:
    x, ids, weights, _ = CASE.inputs_of(group.rank, CPU)
    args = [t.to(group.device) for t in (x, ids, weights)]
    for way, sent in WAYS:
        options = combine_options(way) | {"split_phase": True}
        with weft.AllToAll(group, **CASE.sizes(16), **options, **PATIENT) as a2a:
            groups = ExpertGroups(a2a, align=8)
            for _ in range(2):
                y = groups.gather(a2a.dispatch(*args)).x.cpu().to(group.device)
                if sent == "scatter":
                    groups.scatter(y)
                    a2a.combine_send()
                else:
                    groups.send(y)
                a2a.combine_recv().cpu()
            a2a.check()
            groups.close()


PROGRAMS = {"exchanges": (rounds, sums, by_expert), "groups": (rows_return,)}


def main(program: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    say("imported")
    with weft.Group.from_torch(timeout=300.0) as group:
        say("met")
        for part in PROGRAMS[program]:
            part(group)
    print("sound")


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
        command = [sanitizer, *options, sys.executable, "-m", "tests.gpu.test_sanitizer", program]
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


if __name__ == "__main__":
    main(sys.argv[1])
