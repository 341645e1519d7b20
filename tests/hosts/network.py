# SPDX-License-Identifier: Apache-2.0
"""Network namespaces as hosts on one switch, whose links can be cut.

Ranks are processes with the environment that torchrun would give them. Where namespaces may not
be made, hosts are told apart by WEFT_HOST alone and share the loopback; then no link can be cut.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.cli.namespaces import ADDRESS, Namespaces, can_create_namespaces, enter_namespace, run_ip
from weft.launcher.processes import start_fork_server

PORT = 29571
ROOT = Path(__file__).parents[2]
ENDS = 300.0  # seconds after which ranks that should have ended are killed, and the test fails


class Network:
    """Several hosts. Context manager."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self.namespaces = Namespaces(hosts) if can_create_namespaces() else None
        self._jobs: list[Job] = []

    def __enter__(self) -> Network:
        if self.namespaces is not None:
            self.namespaces.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs:
            job.close()
        if self.namespaces is not None:
            self.namespaces.__exit__()

    def _of(self, which: int | str) -> str:
        assert self.namespaces is not None, "no network namespaces here"
        return self.namespaces.get_name(which)

    def cut(self, host: int) -> None:
        """Cut the host off: nothing reaches it, and nothing that it sends arrives."""
        run_ip("-n", self._of("switch"), "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        run_ip("-n", self._of("switch"), "link", "set", f"port{host}", "up")

    def start(self, each: int, body: str, *args: Any) -> Job:
        """Start `body(group, *args)` on `each` ranks of every host; body: "module:function"."""
        job = Job(self, each, body, args)
        self._jobs.append(job)
        return job

    def run(self, each: int, body: str, *args: Any) -> list[Any]:
        """Run `body` as `start` does; return its results by rank."""
        return self.start(each, body, *args).results(range(each * self.hosts))


class Job:
    """Processes of one run, by rank."""

    def __init__(self, network: Network, each: int, body: str, args: tuple[Any, ...]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="weft-hosts-")
        self.folder = Path(self._folder.name)
        spaces, size = network.namespaces, each * network.hosts
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = PORT if spaces is not None else free.getsockname()[1]
        self.processes = []
        for rank in range(size):
            host = rank // each
            environment = {
                "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(port),
                "MASTER_ADDR": "127.0.0.1" if spaces is None else ADDRESS.format(1),
                "GLOO_SOCKET_IFNAME": "lo" if spaces is None else "eth0",
                "WEFT_HOST": f"host-{host}",
            }  # fmt: skip
            namespace = None if spaces is None else spaces.get_name(host)
            process = start_fork_server().Process(
                target=run_rank,
                args=(self.folder, {**os.environ, **environment}, namespace, body, args),
            )
            process.start()
            self.processes.append(process)

    def mark(self, rank: int) -> str:
        path = self.folder / f"{rank}.mark"
        return path.read_text() if path.exists() else ""

    def wait_for(self, rounds: int) -> None:
        """Wait until every rank has marked a number of rounds."""
        deadline = time.monotonic() + ENDS
        while not all(int(self.mark(r) or 0) >= rounds for r in range(len(self.processes))):
            assert time.monotonic() < deadline, self.logs()
            assert all(process.is_alive() for process in self.processes), self.logs()
            time.sleep(0.05)

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.processes[rank].kill()
            self.processes[rank].join()

    def results(self, ranks: Iterable[int]) -> list[Any]:
        """Wait for ranks, which must end by themselves; return the results of `body`."""
        deadline = time.monotonic() + ENDS
        values = []
        for rank in ranks:
            process = self.processes[rank]
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode == 0, f"rank {rank}: exit {process.exitcode}\n{self.logs()}"
            values.append(json.loads((self.folder / f"{rank}.json").read_text()))
        return values

    def close(self) -> None:
        self.kill(*range(len(self.processes)))
        self._folder.cleanup()

    def logs(self) -> str:
        return "\n".join(
            f"--- rank {rank}\n{(self.folder / f'{rank}.log').read_text()[-4000:]}"
            for rank in range(len(self.processes))
        )


def run_rank(
    folder: Path, environment: dict[str, str], namespace: str | None, body: str, args: list[Any]
) -> None:
    rank = environment["RANK"]
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    if namespace is not None:
        enter_namespace(namespace)
    module, name = body.split(":")
    dist.init_process_group("gloo", timeout=timedelta(seconds=ENDS / 2))
    with weft.Group.from_torch(device="cpu", timeout=ENDS / 2) as group:
        value = getattr(importlib.import_module(module), name)(group, folder, *args)
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(value))
