# SPDX-License-Identifier: Apache-2.0
"""A measurement inside an engine, within the minutes that a command may take."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from weft.bench.machine import ask_nvidia_smi, describe_machine

OUT = Path(os.environ["OUT"])
LONGEST = 560.0  # seconds of a command: less than ten minutes, with unpacking and the archive
REPORT = 30.0  # of them, to stop a server that hangs


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way of serving. All load the same random weights.

    flags: that it adds, in vLLM NAME=VALUE.   environment: that it adds; stock's is empty.
    says: what its log must hold once it is up.   does: once it has answered.
    """

    name: str
    what: str
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    says: str = ""
    does: str = ""


def by_name(*variants: Variant) -> dict[str, Variant]:
    """As `chosen` takes them."""
    return {each.name: each for each in variants}


@dataclasses.dataclass(frozen=True)
class Started:
    """A process of an engine's whose ranks wait, before they touch a GPU, for the file `gate`.

    Imports take an engine up to a minute: those that are measured one after another import at once.
    """

    process: subprocess.Popen[bytes]
    address: str
    log: Path
    gate: Path


@dataclasses.dataclass
class Job:
    """One command: which model on how many GPUs, and when it must be done.

    hosts: parts of this machine that the ranks are on, as if they were so many hosts.
    """

    what: str
    model: Path
    gpus: int
    flags: list[str]
    end: float
    cpu: bool = False
    hosts: int = 1
    failed: list[str] = dataclasses.field(default_factory=list)
    waiting: dict[str, Started] = dataclasses.field(default_factory=dict)

    def left(self, most: float) -> float:
        """Seconds that something may take which wants `most`."""
        return max(1.0, min(most, self.end - REPORT - time.monotonic()))

    def out_of_time(self, name: str, needs: float) -> bool:
        """Is there too little time to begin with `name`? Says so, and the command fails."""
        if self.left(needs) >= needs:
            return False
        self.fail(f"{name}: not begun, {self.left(needs):.0f} s are left; run it by itself")
        return True

    def fail(self, text: str) -> None:
        """Note what went wrong; the other parts of the command go on."""
        print("FAILED", text, flush=True)
        self.failed.append(text)

    def log(self, name: str) -> Path:
        """What the command of this name prints."""
        return OUT / f"{self.what}-{name}.log"

    def heard(self, name: str, text: str) -> bool:
        """Does the log of this name hold these words? If not, the command fails."""
        log = self.log(name)
        if text in log.read_text(errors="replace"):
            return True
        self.fail(f"{name}: its log does not say {text!r}; end of {log.name}:\n{tail(log)}")
        return False

    def record(self, variant: Variant, result: dict[str, Any], **case: Any) -> None:
        """Append a line to results.jsonl."""
        line = {
            "bench": self.what,
            "variant": variant.name,
            "what": variant.what,
            "model": self.model.name,
            "gpus": self.gpus,
            "hosts": self.hosts,
            **case,
            "result": result,
            "flags": [*self.flags, *variant.flags],
            "environment": variant.environment,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": describe_machine([] if self.cpu else gpu_names()[: self.gpus]),
        }
        with open(OUT / "results.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}
        print(f"{variant.name:14} {case} {shown}", flush=True)

    def parts(self, name: str) -> list[str]:
        """The names of a server's commands, one for each host; the first one answers."""
        return [name, *(f"{name}-host-{host}" for host in range(1, self.hosts))]

    def end_waiting(self) -> None:
        """End the servers that were begun and never measured."""
        while self.waiting:
            stop(self.waiting.popitem()[1].process)

    def done(self) -> int:
        """The command's exit status, when all is measured."""
        self.end_waiting()
        for text in self.failed:
            print("FAILED", text)
        return 1 if self.failed else 0


Begin: TypeAlias = Callable[[Job, Variant, str], None]  # starts a variant, by its name in a job


def of_command(job: Job) -> Job:
    """A job none of whose processes outlives this one, also where it is killed."""
    atexit.register(job.end_waiting)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    return job


def chosen(names: list[str], known: Mapping[str, Variant]) -> list[Variant]:
    """The variants of these names."""
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no variant {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names]


def in_turn(
    job: Job,
    variants: Iterable[Variant],
    begin: Begin,
    *,
    needs: float,
    suffix: str = "",
) -> Iterator[tuple[Variant, str]]:
    """Each variant for which there are `needs` seconds left, begun, and its name in this job.

    On GPUs all begin, and import, at once; ranks on CPUs share the cores.
    """
    named = [(each, each.name + suffix) for each in variants]
    for each in () if job.cpu else named:
        begin(job, *each)
    for variant, name in named:
        if job.out_of_time(name, needs):
            continue
        if job.cpu:
            begin(job, variant, name)
        yield variant, name


def arguments(
    about: str, model: str, variants: list[str], *, memory: float, layers: dict[str, int]
) -> argparse.ArgumentParser:
    """What every measurement takes.   layers: of a model that runs fewer than it has."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("what")
    parser.add_argument("--model", default=model, help="a folder of $PACK/model, or any folder")
    parser.add_argument("--layers", type=int, help=f"layers to run (default: {layers})")
    parser.add_argument("--memory", type=float, default=memory, help="share of a GPU's memory")
    parser.add_argument("--variants", nargs="+", default=variants)
    parser.add_argument("--seconds", type=float, default=LONGEST, help="that this command may take")
    parser.add_argument("--cpu", action="store_true", help="on CPU ranks, in float32")
    return parser


def folder_of(name: str) -> Path:
    """A model's folder."""
    folder = Path(name)
    model = folder if folder.is_dir() else Path(os.environ["PACK"]) / "model" / name
    if not (model / "config.json").is_file():
        sys.exit(f"no config.json in {model}")
    return model


def fewer_layers(model: Path, layers: int | None) -> dict[str, int]:
    """What a config says of so many layers, of which DeepSeek-V3's first is dense."""
    dense = {"first_k_dense_replace": 1} if model.name == "deepseek-v3" else {}
    return {"num_hidden_layers": layers, **dense} if layers else {}


def begin_command(
    job: Job, name: str, command: list[str], env: dict[str, str], *, port: int = 0
) -> None:
    """Start a command of an engine's that `run` or `server` will let through to the GPUs."""
    log, gate = job.log(name), OUT / f"gate-{name}"
    with open(log, "a") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env | {"SERVER_GATE": str(gate)},
            start_new_session=True,
        )
    job.waiting[name] = Started(process, f"http://127.0.0.1:{port}", log, gate)


def in_servers(
    job: Job,
    variants: Iterable[Variant],
    begin: Begin,
    measure: Callable[[Variant, str, str], None],
    *,
    needs: float = 90.0,
    suffix: str = "",
    outlives: bool = True,
) -> None:
    """Measure each variant, by its name in this job and the address of its server.

    At the end all processes of a server are stopped. What `measure` raises fails the command, with
    the end of the server's log, and the others go on.   outlives: is a server's end a failure?
    """
    wait = 1200.0 if job.cpu else 300.0  # all imports share a few cores
    for variant, name in in_turn(job, variants, begin, needs=needs, suffix=suffix):
        hosts = [job.waiting.pop(part) for part in job.parts(name)]
        for each in hosts:
            each.gate.touch()
        process, log, began = hosts[0].process, hosts[0].log, time.monotonic()
        try:
            up = answers(job, process, hosts[0].address, wait)
            if not up:
                job.fail(f"{name}: it did not come up; end of {log.name}:\n{tail(log)}")
            elif job.heard(name, variant.says):
                print(f"{name}: up after {time.monotonic() - began:.0f} s", flush=True)
                measure(variant, name, hosts[0].address)
            if up and outlives and process.poll() is not None:
                job.fail(f"{name}: the server ended by itself; end of {log.name}:\n{tail(log)}")
        except Exception as error:
            job.fail(f"{name}: {type(error).__name__}: {error}; end of {log.name}:\n{tail(log)}")
        finally:
            for each in hosts:
                stop(each.process)
                each.gate.unlink()


def answers(job: Job, process: subprocess.Popen[bytes], address: str, seconds: float) -> bool:
    """Wait until a server answers; False when it ends, or the time does."""
    end = time.monotonic() + job.left(seconds)
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
        time.sleep(0.5)
    return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and what it started: they are one process group."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
    for _ in range(100):  # its children hold GPU memory until they are gone
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)


def run(
    job: Job, name: str, command: list[str], seconds: float, env: dict[str, str] | None = None
) -> bool:
    """Run a command, which may have been begun; one that is late ends with all that it started.

    Its ranks would keep their GPUs' memory, which the next one needs.
    """
    if name not in job.waiting:
        begin_command(job, name, command, dict(os.environ) if env is None else env)
    this, code = job.waiting.pop(name), None
    this.gate.touch()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = this.process.wait(timeout=job.left(seconds))
    finally:
        stop(this.process)
        this.gate.unlink()
    if code != 0:
        job.fail(f"{name}: {'late' if code is None else f'exit status {code}'}\n{tail(this.log)}")
    return code == 0


def opened(address: str, path: str, body: dict[str, Any], timeout: float) -> Any:
    """The answer of a server, to be read and closed."""
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(address + path, json.dumps(body).encode(), head)
    return urllib.request.urlopen(request, timeout=timeout)


def post(address: str, path: str, body: dict[str, Any], timeout: float = 300.0) -> Any:
    """Ask a server."""
    with opened(address, path, body, timeout) as answer:
        text = answer.read().decode()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def last_line(path: Path) -> dict[str, Any]:
    """The newest of a file of JSON lines."""
    found: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return found


def tail(log: Path, lines: int = 30) -> str:
    """The end of a log."""
    text = log.read_text(errors="replace").splitlines()
    return "\n".join(f"    | {line[:240]}" for line in text[-lines:])


def free_port() -> int:
    """A port that nobody listens on now."""
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def gpu_names() -> list[str]:
    """Of this machine, without making a CUDA context in this process."""
    return (ask_nvidia_smi("--query-gpu=name", "--format=csv,noheader") or "").splitlines()
