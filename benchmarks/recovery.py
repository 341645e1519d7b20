# SPDX-License-Identifier: Apache-2.0
"""How long a death, a recovery and a replacement take, on CPU ranks or ranks that share GPUs.

    python benchmarks/recovery.py --device cpu --out recovery.json

Four ranks make rounds of an all-to-all one after the other, on GPUs by replaying one captured
graph. Rank 2 is killed; the survivors recover and make the next round, by the same graph; a new
process takes the number. Each result is compared with the reference. ms, the slowest survivor's:
`named`, from the kill until `check` raises; `ended`, from the kill until the kernel has ended the
process, GPU context included; `recovered`, `group.recover` called then; `right`, from the kill
until a round of the living is there; `replaced`, from the start of the new process (Python and
torch included) until a round of all is there; `replaced_by_spare`, from the moment when a process
that has already imported weft (and made its CUDA context) learns the address, until the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import weft
from weft import reference
from weft.bench.harness import capture
from weft.bench.machine import describe_machine
from weft.errors import GroupError
from weft.launcher.launch import launch

RANKS, VICTIM, ROUNDS, LONG = 4, 2, 200, 600.0
SPARE, READY = "spare", b"ready"
SIZES = {"max_tokens": 128, "top_k": 8, "num_experts": 64, "hidden": 7168}


class Rounds:
    """A rank's all-to-all, and one round of it to make again and again."""

    def __init__(self, group: weft.Group) -> None:
        self.a2a = weft.AllToAll(group, **SIZES, timeout=LONG)
        device, tokens = group.device, SIZES["max_tokens"]
        draw = torch.Generator(device).manual_seed(group.rank)
        self.x = torch.randn((tokens, SIZES["hidden"]), generator=draw, device=device).bfloat16()
        scores = torch.rand((tokens, SIZES["num_experts"]), generator=draw, device=device)
        self.ids = scores.topk(SIZES["top_k"]).indices.int()
        self.weights = torch.rand(self.ids.shape, generator=draw, device=device)
        self.out = torch.empty_like(self.x)
        self.run: Callable[[], Any] = self.one

    def one(self) -> None:
        """Dispatch, experts that change nothing, combine."""
        got = self.a2a.dispatch(self.x, self.ids, self.weights)
        self.a2a.output().copy_(reference.identity_experts(got, self.x.dtype))
        self.a2a.combine(out=self.out)

    def capture(self) -> None:
        """From now on `run` replays a graph, on GPUs."""
        if not self.x.is_cuda:
            return
        self.run = capture(self.one).replay

    def __call__(self) -> None:
        """One round that has ended. Raises what broke it."""
        self.out.fill_(float("nan"))
        self.run()
        if self.x.is_cuda:
            torch.cuda.synchronize()
        with contextlib.suppress(weft.errors.BadExpertId):  # names the rank that is gone, once
            self.a2a.check()

    def compare(self, living: tuple[int, ...]) -> None:
        """The last round's result with the reference, without the experts of the dead."""
        owners = torch.tensor(self.a2a.placement.ranks, device=self.ids.device)[self.ids.long()]
        lives = torch.isin(owners, torch.tensor(living, device=owners.device))
        ids = torch.where(lives, self.ids, -1)
        wanted = reference.identity_round_trip(
            self.x, ids, self.weights, self.a2a.placement, ranks=RANKS
        )
        assert torch.equal(self.out.view(torch.int16), wanted.view(torch.int16)), living


def started(device: str, address: str) -> subprocess.Popen[bytes]:
    """A process that joins at `address`, or a spare, which waits to read it."""
    command = [sys.executable, __file__, "--join", address, "--device", device]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def survivor(group: weft.Group, folder: str, device: str, spare: bool) -> dict[str, float]:
    """A rank of the beginning; what it measured."""
    rounds, killed = Rounds(group), Path(folder, "killed")
    starts, new = group.rank == 0, None
    if starts and spare:
        new = started(device, SPARE)
        assert new.stdout is not None  # a pipe, as asked for
        assert new.stdout.read(len(READY)) == READY
    with rounds.a2a:
        rounds()
        rounds.capture()
        for _ in range(20):
            rounds()
        rounds.compare(group.living)
        group.barrier()
        pid = group.pid(VICTIM)
        assert pid is not None
        pidfd = os.pidfd_open(pid)
        if group.rank == VICTIM:
            time.sleep(0.2)
            killed.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                rounds()
        except GroupError as error:
            named, text = time.monotonic(), str(error)
        if f"rank {VICTIM}" not in text and "recover" not in text:
            raise SystemExit(f"another rank was named: {text}")
        select.select([pidfd], [], [])
        ended = time.monotonic()
        recovery = group.recover(timeout=LONG)
        rounds()
        right, at = time.monotonic(), float(killed.read_text())
        rounds.compare(group.living)
        for _ in range(ROUNDS):
            rounds()
        meeting, began = group.open_meeting(), time.monotonic()
        if new is not None and new.stdin is not None:
            new.stdin.write(meeting.address.encode())
            new.stdin.close()
        elif starts:
            new = started(device, meeting.address)
        group.replace(meeting, timeout=LONG)
        rounds()
        joined = time.monotonic()
        rounds.compare(group.living)
        group.barrier()
        if new is not None and new.wait(LONG):
            raise SystemExit("the new process failed")
    times = {"named": named - at, "ended": ended - at}
    times |= {"recovered": recovery.seconds, "right": right - at}
    times["replaced_by_spare" if spare else "replaced"] = joined - began
    return {name: 1e3 * t for name, t in times.items()}


def newcomer(address: str, device: str) -> None:
    """The process that takes the dead rank's number."""
    where = f"cuda:{VICTIM % torch.cuda.device_count()}" if device == "cuda" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(where)
    else:
        torch.set_num_threads(1)
    if address == SPARE:
        torch.zeros(1, device=where)
        sys.stdout.buffer.write(READY)
        sys.stdout.flush()
        address = sys.stdin.read()
    with weft.Group.join(address, rank=VICTIM, size=RANKS, device=where, timeout=LONG) as group:
        rounds = Rounds(group)
        with rounds.a2a:
            group.enter(timeout=LONG)
            rounds()
            rounds.compare(group.living)
            group.barrier()


def main() -> None:
    """Some kills, and the medians."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--turns", type=int, default=5, help="of each kind of new process")
    parser.add_argument("--join", help=argparse.SUPPRESS)
    parser.add_argument("--out")
    given = parser.parse_args()
    if given.join:
        newcomer(given.join, given.device)
        return
    turns = []
    for turn in range(2 * given.turns):
        with tempfile.TemporaryDirectory() as folder:
            told = launch(
                survivor,
                folder,
                given.device,
                turn % 2 == 1,
                ranks=RANKS,
                device=given.device,
                timeout=LONG,
                tolerate_deaths=True,
            )
        slowest = [each for each in told if each is not None]
        turns.append({name: round(max(e[name] for e in slowest), 1) for name in slowest[0]})
        print(turns[-1], flush=True)
    names = dict.fromkeys(name for turn in turns for name in turn)
    middle = {
        name: statistics.median(turn[name] for turn in turns if name in turn) for name in names
    }
    print("median", middle)
    if given.out:
        gpus = [torch.cuda.get_device_name()] if given.device == "cuda" else []
        found = {"machine": describe_machine(gpus), "sizes": SIZES, "turns_ms": turns}
        Path(given.out).write_text(json.dumps(found | {"median_ms": middle}, indent=1) + "\n")


if __name__ == "__main__":
    main()
