# SPDX-License-Identifier: Apache-2.0
"""Load test of a server whose clients drop requests, followed by the death of one rank.

Clients request random numbers of tokens and close half of the connections early. At the end,
memory, open files and threads of all ranks must equal those after the warm-up. Then one rank is
killed during generation: the log must name it, and the server must exit soon.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from job import Begin, Job, Variant, in_servers, open_request

from weft.bench.machine import query_nvidia_smi

WARM = 0.25  # share of the time until buffers of all sizes have been used
GONE = r"PeerDied|the process of rank \d+ has ended"  # in a line of weft's log
MORE_MEMORY, MORE_FILES = 64, 8  # allowed growth per rank in MiB and in descriptors


@dataclass(frozen=True)
class Api:
    """An engine's request format.

    Attributes:
        about: Returns path and body of a streaming request for a number of tokens after some ids.
        count: Returns the number of tokens that an answer's lines report.
        title: Prefix of the rank processes' titles.
    """

    about: Callable[[list[int], int], tuple[str, dict[str, Any]]]
    count: Callable[[list[dict[str, Any]]], int]
    title: str

    def ranks(self) -> dict[str, int]:
        """Return title -> process id of the ranks of this command's servers."""
        return rank_processes(self.title)


@dataclass
class Clients:
    """Threads that send requests until they are stopped."""

    address: str
    api: Api
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked: int = 0
    dropped: int = 0
    wrong: list[str] = field(default_factory=list)

    def run(self, seed: int) -> None:
        """Run one client."""
        rng = random.Random(seed)
        while not self.stopped.is_set():
            drop = rng.random() < 0.5
            try:
                self.ask(rng, drop)
            except (OSError, ValueError) as error:
                if self.stopped.is_set():
                    return
                with self.lock:
                    self.wrong.append(f"{type(error).__name__}: {error}")
                time.sleep(0.1)
            with self.lock:
                self.asked, self.dropped = self.asked + 1, self.dropped + drop

    def ask(self, rng: random.Random, drop: bool) -> None:
        """Send a request, and read it to its end or close it after a few tokens."""
        tokens = rng.randrange(8, 257)
        ids = [rng.randrange(3, 259) for _ in range(rng.randrange(4, 300))]
        path, body = self.api.about(ids, tokens)
        lines: list[dict[str, Any]] = []
        with open_request(self.address, path, body, 120.0) as answer:
            for seen, line in enumerate(answer):
                if drop and seen > tokens:  # half of the lines are empty
                    return
                text = line.decode().removeprefix("data:").strip()
                if text and text != "[DONE]":
                    lines.append(json.loads(text))
        done = self.api.count(lines)
        if done != tokens:
            raise ValueError(f"{tokens} tokens were requested, but {done} arrived")

    def start(self, threads: int) -> list[threading.Thread]:
        """Start the clients."""
        running = [
            threading.Thread(target=self.run, args=(i,), daemon=True) for i in range(threads)
        ]
        for each in running:
            each.start()
        return running


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for the duration and the number of clients."""
    parser.add_argument("--loaded", type=float, default=300.0, help="seconds under load")
    parser.add_argument("--clients", type=int, default=64)


def in_each(
    job: Job,
    args: argparse.Namespace,
    variants: list[Variant],
    begin: Begin,
    api: Api,
) -> None:
    """Load a server of each variant; with several ranks, then kill one."""

    def measure(variant: Variant, name: str, address: str) -> None:
        result = load(job, Clients(address, api), args.loaded, args.clients)
        job.record(variant, result, clients=args.clients)
        if job.gpus > 1:
            killed = without_a_rank(job, Clients(address, api), job.log(name))
            job.record(variant, killed)

    needs, outlives = args.loaded + 60, job.gpus == 1
    in_servers(job, variants, begin, measure, needs=needs, outlives=outlives)


def rank_processes(title: str) -> dict[str, int]:
    """Return title -> process id of this command's servers, which have their own session."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            if command.startswith(title) and parent(os.getsid(int(folder.name))) == os.getpid():
                processes[command.strip()] = int(folder.name)
    return processes


def parent(process: int) -> int:
    """Return the parent of a process."""
    text = Path(f"/proc/{process}/stat").read_text()
    return int(text.rpartition(")")[2].split()[1])


def listens(address: str) -> bool:
    """Whether the server accepts connections."""
    try:
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=5):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return True


def process_resources(process: int) -> dict[str, float]:
    """Return a process's own memory in MiB, open files and threads."""
    folder = Path(f"/proc/{process}")
    words = (line.split() for line in (folder / "status").read_text().splitlines())
    status = {line[0].rstrip(":"): line[1] for line in words if len(line) > 1}
    return {
        "mib": (int(status["RssAnon"]) + int(status["RssShmem"])) / 1024,
        "files": len(os.listdir(folder / "fd")),
        "threads": int(status["Threads"]),
    }


def gpu_mib() -> list[int]:
    """Return the used memory of each GPU, empty without GPUs."""
    output = query_nvidia_smi("--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return [int(line) for line in (output or "").split()]


def look(since: float, clients: Clients) -> dict[str, Any]:
    """Return the state of all ranks."""
    ranks = {
        name: process_resources(process) for name, process in sorted(clients.api.ranks().items())
    }
    return {
        "seconds": round(time.monotonic() - since, 1),
        "asked": clients.asked,
        "ranks": ranks,
        "gpu_mib": gpu_mib(),
    }


def load(job: Job, clients: Clients, seconds: float, threads: int) -> dict[str, Any]:
    """Send requests for a while, and compare the ranks' resources with those after the warm-up."""
    began, running, seen = time.monotonic(), clients.start(threads), []
    while time.monotonic() < began + seconds:
        time.sleep(min(10.0, seconds / 8))
        seen.append(look(began, clients))
    clients.stopped.set()
    for each in running:
        each.join(150)
    for text in clients.wrong[:3]:
        job.fail(f"{len(clients.wrong)} requests failed: {text}")
    warm = next(one for one in seen if one["seconds"] >= WARM * seconds)
    for text in resource_growth(warm["ranks"], seen[-1]["ranks"]):
        job.fail(text)
    return {"asked": clients.asked, "dropped": clients.dropped, "warm": warm, "end": seen[-1]}


def resource_growth(warm: dict[str, Any], end: dict[str, Any]) -> list[str]:
    """Return how ranks' resources grew since the warm-up."""
    problems = []
    for name, before in warm.items():
        after = end.get(name)
        if after is None:
            problems.append(f"{name} has exited")
            continue
        if after["mib"] > before["mib"] + MORE_MEMORY:
            problems.append(f"{name}: {before['mib']:.0f} MiB, then {after['mib']:.0f}")
        if after["files"] > before["files"] + MORE_FILES:
            problems.append(f"{name}: {before['files']} open files, then {after['files']}")
    return problems


def without_a_rank(job: Job, clients: Clients, log: Path) -> dict[str, Any]:
    """Kill the last rank during generation."""
    clients.start(16)
    time.sleep(5.0)
    name, process = max(clients.api.ranks().items())
    os.kill(process, signal.SIGKILL)
    start = time.monotonic()
    clients.stopped.set()
    named_after = gone_after = None
    while gone_after is None and time.monotonic() < start + job.left(60):
        after = time.monotonic() - start
        ended = not listens(clients.address)  # first, because the log's last line counts
        if named_after is None and first_named(log):
            named_after = after
        if ended:
            gone_after = after
        time.sleep(0.05)
    line = first_named(log)
    if not line or gone_after is None:
        times = f"named after {named_after} s, server gone after {gone_after} s"
        job.fail(f"after {name} was killed: {times}")
    return {"killed": name, "named_s": named_after, "gone_s": gone_after, "line": line[-300:]}


def first_named(log: Path) -> str:
    """Return the first line that names a dead rank, or ""."""
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in lines if re.search(GONE, line)), "")
