# SPDX-License-Identifier: Apache-2.0
"""Time a death, a recovery and a replacement, on CPU ranks or on ranks that share GPUs.

    python benchmarks/recovery.py --device cpu --out recovery.json

Four ranks run rounds of an all-to-all; on GPUs they replay one captured graph. Rank 2 is killed.
The survivors recover and continue with the same graph, while a new process builds its all-to-all
and captures its graph alone. Then it takes the dead rank's number. Each result is compared with the
reference. Times are in ms, of the slowest survivor:

    named               from the kill until `check` raises
    ended               from the kill until the kernel has ended the process and its GPU context
    recovered           the following `group.recover`
    right               from the kill until a round of the living ranks is complete
    replaced            from the start of a new process, with imports, until a round of all ranks
    replaced_by_spare   from the moment when a process that has already captured its graph learns
                        the address, until a round of all ranks
    paused              from the last round of the survivors alone until a round of all ranks
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
    """A rank's all-to-all, with one round that is repeated."""

    def __init__(self, group: weft.Group) -> None:
        self.a2a = weft.AllToAll(group, **SIZES, timeout=LONG)
        device, tokens = group.device, SIZES["max_tokens"]
        generator = torch.Generator(device).manual_seed(group.rank)
        self.x = torch.randn(
            (tokens, SIZES["hidden"]), generator=generator, device=device
        ).bfloat16()
        scores = torch.rand((tokens, SIZES["num_experts"]), generator=generator, device=device)
        self.ids = scores.topk(SIZES["top_k"]).indices.int()
        self.weights = torch.rand(self.ids.shape, generator=generator, device=device)
        self.out = torch.empty_like(self.x)
        self.run: Callable[[], Any] = self.one

    def one(self) -> None:
        """Dispatch, run identity experts, and combine."""
        got = self.a2a.dispatch(self.x, self.ids, self.weights)
        self.a2a.output().copy_(reference.identity_experts(got, self.x.dtype))
        self.a2a.combine(out=self.out)

    def capture(self) -> None:
        """Capture a graph on GPUs; `run` replays it from now on."""
        if not self.x.is_cuda:
            return
        self.run = capture(self.one).replay

    def __call__(self) -> None:
        """Run one round to completion. Raises group errors."""
        self.out.fill_(float("nan"))
        self.run()
        if self.x.is_cuda:
            torch.cuda.synchronize()
        with contextlib.suppress(weft.errors.BadExpertId):  # reports ids of the dead rank once
            self.a2a.check()

    def compare(self, living: tuple[int, ...]) -> None:
        """Compare the last round's result with the reference without the dead ranks' experts."""
        owners = torch.tensor(self.a2a.placement.ranks, device=self.ids.device)[self.ids.long()]
        lives = torch.isin(owners, torch.tensor(living, device=owners.device))
        ids = torch.where(lives, self.ids, -1)
        expected = reference.identity_round_trip(
            self.x, ids, self.weights, self.a2a.placement, ranks=RANKS
        )
        assert torch.equal(self.out.view(torch.int16), expected.view(torch.int16)), living


def start_process(device: str, address: str) -> subprocess.Popen[bytes]:
    """Start a process that joins at `address`, or a spare that waits to read it."""
    command = [sys.executable, __file__, "--join", address, "--device", device]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def survivor(group: weft.Group, folder: str, device: str, spare: bool) -> dict[str, float]:
    """Run an initial rank, and return its measurements."""
    rounds, killed = Rounds(group), Path(folder, "killed")
    starts, new = group.rank == 0, None
    if starts and spare:
        new = start_process(device, SPARE)
        assert new.stdout is not None  # it is a pipe
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
            raise SystemExit(f"the error names another rank: {text}")
        select.select([pidfd], [], [])
        ended = time.monotonic()
        recovery = group.recover(timeout=LONG)
        rounds()
        right, killed_at = time.monotonic(), float(killed.read_text())
        rounds.compare(group.living)
        for _ in range(ROUNDS):
            rounds()
        meeting, meeting_start = group.open_meeting(), time.monotonic()
        if new is not None and new.stdin is not None:
            new.stdin.write(meeting.address.encode())
            new.stdin.close()
        elif starts:
            new = start_process(device, meeting.address)
        waiting = False
        while not waiting:
            rounds()
            last_alone = time.monotonic()
            is_hub = group.rank == meeting.hub
            has_come = is_hub and VICTIM in meeting.find_waiting_ranks()
            waiting = group.all_gather(has_come)[meeting.hub]
        group.replace(meeting, timeout=LONG)
        rounds()
        joined = time.monotonic()
        rounds.compare(group.living)
        group.barrier()
        if new is not None and new.wait(LONG):
            raise SystemExit("the new process failed")
    times = {"named": named - killed_at, "ended": ended - killed_at}
    times |= {"recovered": recovery.seconds, "right": right - killed_at}
    times["replaced_by_spare" if spare else "replaced"] = joined - meeting_start
    times["paused"] = joined - last_alone
    return {name: 1e3 * t for name, t in times.items()}


def newcomer(address: str, device: str) -> None:
    """Run the process that takes the dead rank's number."""
    place = f"cuda:{VICTIM % torch.cuda.device_count()}" if device == "cuda" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(place)
    else:
        torch.set_num_threads(1)
    group = weft.Group.for_replacement(rank=VICTIM, size=RANKS, device=place, timeout=LONG)
    rounds = Rounds(group)
    with group, rounds.a2a:
        rounds()
        rounds.capture()
        if address == SPARE:
            sys.stdout.buffer.write(READY)
            sys.stdout.flush()
            address = sys.stdin.read()
        group.join(address, timeout=LONG)
        rounds()
        rounds.compare(group.living)
        group.barrier()


def main() -> None:
    """Kill ranks several times, and print the medians."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--turns", type=int, default=5, help="repetitions per kind of new process")
    parser.add_argument("--join", help=argparse.SUPPRESS)
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.join:
        newcomer(args.join, args.device)
        return
    turns = []
    for turn in range(2 * args.turns):
        with tempfile.TemporaryDirectory() as folder:
            results = launch(
                survivor,
                folder,
                args.device,
                turn % 2 == 1,
                ranks=RANKS,
                device=args.device,
                timeout=LONG,
                tolerate_deaths=True,
            )
        survivors = [each for each in results if each is not None]
        turns.append({name: round(max(e[name] for e in survivors), 1) for name in survivors[0]})
        print(turns[-1], flush=True)
    names = dict.fromkeys(name for turn in turns for name in turn)
    middle = {
        name: statistics.median(turn[name] for turn in turns if name in turn) for name in names
    }
    print("median", middle)
    if args.out:
        gpus = [torch.cuda.get_device_name()] if args.device == "cuda" else []
        record = {"machine": describe_machine(gpus), "sizes": SIZES, "turns_ms": turns}
        Path(args.out).write_text(json.dumps(record | {"median_ms": middle}, indent=1) + "\n")


if __name__ == "__main__":
    main()
