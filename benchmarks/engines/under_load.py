# SPDX-License-Identifier: Apache-2.0
"""A server under load with requests that are dropped half way, and then without one of its ranks.

Clients ask for random numbers of tokens and close every second connection before its answer is
complete. Memory, open files and threads of all ranks at the end must be what they were after the
warm-up. Then one rank is killed while answers are written: its name must be in the log, and the
server gone, soon.
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

from job import Begin, Job, Variant, in_servers, opened

from weft.bench.machine import ask_nvidia_smi

WARM = 0.25  # of the time: buffers of all sizes have been used by then
GONE = r"PeerDied|the process of rank \d+ has ended"  # in a line of weft's
MORE_MEMORY, MORE_FILES = 64, 8  # MiB and descriptors that a rank may have gained since


@dataclass(frozen=True)
class Api:
    """How an engine is asked.

    about: path and body of a request for so many tokens that follow some ids, in a stream.
    count: tokens that an answer's lines say it has.   title: that its ranks' processes begin with.
    """

    about: Callable[[list[int], int], tuple[str, dict[str, Any]]]
    count: Callable[[list[dict[str, Any]]], int]
    title: str

    def ranks(self) -> dict[str, int]:
        """Name -> process of those of this command's servers."""
        return named(self.title)


@dataclass
class Clients:
    """Threads that ask until they are stopped."""

    address: str
    api: Api
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked: int = 0
    dropped: int = 0
    wrong: list[str] = field(default_factory=list)

    def run(self, seed: int) -> None:
        """One client."""
        draw = random.Random(seed)
        while not self.stopped.is_set():
            drop = draw.random() < 0.5
            try:
                self.ask(draw, drop)
            except (OSError, ValueError) as error:
                if self.stopped.is_set():
                    return
                with self.lock:
                    self.wrong.append(f"{type(error).__name__}: {error}")
                time.sleep(0.1)
            with self.lock:
                self.asked, self.dropped = self.asked + 1, self.dropped + drop

    def ask(self, draw: random.Random, drop: bool) -> None:
        """A request that is read to its end, or closed after a few of its tokens."""
        tokens = draw.randrange(8, 257)
        ids = [draw.randrange(3, 259) for _ in range(draw.randrange(4, 300))]
        path, body = self.api.about(ids, tokens)
        lines: list[dict[str, Any]] = []
        with opened(self.address, path, body, 120.0) as answer:
            for seen, line in enumerate(answer):
                if drop and seen > tokens:  # every second line is empty
                    return
                text = line.decode().removeprefix("data:").strip()
                if text and text != "[DONE]":
                    lines.append(json.loads(text))
        done = self.api.count(lines)
        if done != tokens:
            raise ValueError(f"{tokens} tokens were asked for, and {done} came")

    def start(self, threads: int) -> list[threading.Thread]:
        """Begin to ask."""
        some = range(threads)
        running = [threading.Thread(target=self.run, args=(i,), daemon=True) for i in some]
        for each in running:
            each.start()
        return running


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For how long, and by how many."""
    parser.add_argument("--loaded", type=float, default=300.0, help="seconds under load")
    parser.add_argument("--clients", type=int, default=64)


def in_each(
    job: Job,
    given: argparse.Namespace,
    variants: list[Variant],
    begin: Begin,
    api: Api,
) -> None:
    """A server of each variant under load; of several ranks one is then killed."""

    def measure(variant: Variant, name: str, address: str) -> None:
        result = load(job, Clients(address, api), given.loaded, given.clients)
        job.record(variant, result, clients=given.clients)
        if job.gpus > 1:
            killed = without_a_rank(job, Clients(address, api), job.log(name))
            job.record(variant, killed)

    needs, outlives = given.loaded + 60, job.gpus == 1
    in_servers(job, variants, begin, measure, needs=needs, outlives=outlives)


def named(title: str) -> dict[str, int]:
    """Name -> process of those of this command's servers, which have a session of their own."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            have = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            if have.startswith(title) and parent(os.getsid(int(folder.name))) == os.getpid():
                found[have.strip()] = int(folder.name)
    return found


def parent(process: int) -> int:
    """The process that started another."""
    text = Path(f"/proc/{process}/stat").read_text()
    return int(text.rpartition(")")[2].split()[1])


def listens(address: str) -> bool:
    """Does the server still take connections?"""
    try:
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=5):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return True


def held(process: int) -> dict[str, float]:
    """What a process holds: MiB of memory that is its own, open files, threads."""
    folder = Path(f"/proc/{process}")
    words = (line.split() for line in (folder / "status").read_text().splitlines())
    status = {line[0].rstrip(":"): line[1] for line in words if len(line) > 1}
    return {
        "mib": (int(status["RssAnon"]) + int(status["RssShmem"])) / 1024,
        "files": len(os.listdir(folder / "fd")),
        "threads": int(status["Threads"]),
    }


def gpu_mib() -> list[int]:
    """Memory in use on each GPU; none without."""
    found = ask_nvidia_smi("--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return [int(line) for line in (found or "").split()]


def look(since: float, clients: Clients) -> dict[str, Any]:
    """All ranks, now."""
    ranks = {name: held(process) for name, process in sorted(clients.api.ranks().items())}
    return {
        "seconds": round(time.monotonic() - since, 1),
        "asked": clients.asked,
        "ranks": ranks,
        "gpu_mib": gpu_mib(),
    }


def load(job: Job, clients: Clients, seconds: float, threads: int) -> dict[str, Any]:
    """Ask for so long, and compare what the ranks hold with what they held when all was warm."""
    began, running, seen = time.monotonic(), clients.start(threads), []
    while time.monotonic() < began + seconds:
        time.sleep(min(10.0, seconds / 8))
        seen.append(look(began, clients))
    clients.stopped.set()
    for each in running:
        each.join(150)
    for text in clients.wrong[:3]:
        job.fail(f"{len(clients.wrong)} requests went wrong: {text}")
    warm = next(one for one in seen if one["seconds"] >= WARM * seconds)
    for text in grown(warm["ranks"], seen[-1]["ranks"]):
        job.fail(text)
    return {"asked": clients.asked, "dropped": clients.dropped, "warm": warm, "end": seen[-1]}


def grown(warm: dict[str, Any], end: dict[str, Any]) -> list[str]:
    """What ranks hold at the end that they did not hold when all was warm."""
    found = []
    for name, before in warm.items():
        after = end.get(name)
        if after is None:
            found.append(f"{name} is gone")
            continue
        if after["mib"] > before["mib"] + MORE_MEMORY:
            found.append(f"{name}: {before['mib']:.0f} MiB, then {after['mib']:.0f}")
        if after["files"] > before["files"] + MORE_FILES:
            found.append(f"{name}: {before['files']} open files, then {after['files']}")
    return found


def without_a_rank(job: Job, clients: Clients, log: Path) -> dict[str, Any]:
    """Kill the last rank while answers are written."""
    clients.start(16)
    time.sleep(5.0)
    name, process = max(clients.api.ranks().items())
    os.kill(process, signal.SIGKILL)
    began = time.monotonic()
    clients.stopped.set()
    named = gone = None
    while gone is None and time.monotonic() < began + job.left(60):
        after = time.monotonic() - began
        ended = not listens(clients.address)  # before the log is read: what it said last counts
        if named is None and told(log):
            named = after
        if ended:
            gone = after
        time.sleep(0.05)
    line = told(log)
    if not line or gone is None:
        job.fail(f"after {name} was killed: named after {named} s, server gone after {gone} s")
    return {"killed": name, "named_s": named, "gone_s": gone, "line": line[-300:]}


def told(log: Path) -> str:
    """The first line that names a rank that is gone, or nothing."""
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in lines if re.search(GONE, line)), "")
