# SPDX-License-Identifier: Apache-2.0
"""A measurement inside an engine, within the time limit of a command."""

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

from weft.bench.machine import describe_machine, query_nvidia_smi

OUT = Path(os.environ["OUT"])
LONGEST = 560.0  # seconds of a command: below ten minutes, including unpacking and the archive
REPORT = 30.0  # of these, reserved to stop a server that hangs


@dataclasses.dataclass(frozen=True)
class Variant:
    """One configuration of a server. All load the same random weights.

    Attributes:
        flags: Additional flags, for vLLM as NAME=VALUE.
        environment: Additional variables; empty for stock.
        startup_text: Text that the log must contain once the server is up.
        answer_text: Text that the log must contain after answers.
    """

    name: str
    what: str
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    startup_text: str = ""
    answer_text: str = ""


def by_name(*variants: Variant) -> dict[str, Variant]:
    """Index variants by name."""
    return {each.name: each for each in variants}


@dataclasses.dataclass(frozen=True)
class Started:
    """An engine's process, whose ranks wait for the file `gate` before they use a GPU.

    Imports take up to a minute, so servers that are measured one after another import at the same
    time.
    """

    process: subprocess.Popen[bytes]
    address: str
    log: Path
    gate: Path


@dataclasses.dataclass
class Job:
    """One command: a model on a number of GPUs, with a deadline.

    `hosts` is the number of parts that this machine's ranks are split into, as if they were hosts.
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

    @property
    def shares_gpu(self) -> bool:
        """Whether all ranks run on one GPU, because the machine has fewer GPUs than ranks."""
        return not self.cpu and self.gpus > max(1, len(gpu_names()))

    def left(self, most: float) -> float:
        """Return the seconds available for a step that needs at most `most`."""
        return max(1.0, min(most, self.end - REPORT - time.monotonic()))

    def out_of_time(self, name: str, needs: float) -> bool:
        """Whether too little time is left to start `name`; if so, the command fails."""
        if self.left(needs) >= needs:
            return False
        self.fail(f"{name}: not started, {self.left(needs):.0f} s are left; run it by itself")
        return True

    def fail(self, text: str) -> None:
        """Record a failure; the other parts of the command continue."""
        print("FAILED", text, flush=True)
        self.failed.append(text)

    def log(self, name: str) -> Path:
        """Return the log of a command."""
        return OUT / f"{self.what}-{name}.log"

    def check_log(self, name: str, text: str) -> bool:
        """Whether a log contains `text`; if not, the command fails."""
        log = self.log(name)
        if text in log.read_text(errors="replace"):
            return True
        self.fail(f"{name}: its log does not contain {text!r}; end of {log.name}:\n{tail(log)}")
        return False

    def record(self, variant: Variant, result: dict[str, Any], **case: Any) -> None:
        """Append a line to results.jsonl."""
        line = {
            "bench": self.what,
            "variant": variant.name,
            "what": variant.what,
            "model": self.model.name,
            "gpus": self.gpus,
            "shares_gpu": self.shares_gpu,
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
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}
        print(f"{variant.name:14} {case} {rounded}", flush=True)

    def parts(self, name: str) -> list[str]:
        """Return the names of a server's commands, one per host; the first one serves requests."""
        return [name, *(f"{name}-host-{host}" for host in range(1, self.hosts))]

    def end_waiting(self) -> None:
        """Stop servers that were started and never measured."""
        while self.waiting:
            stop(self.waiting.popitem()[1].process)

    def done(self) -> int:
        """Stop waiting servers, and return the command's exit status."""
        self.end_waiting()
        for text in self.failed:
            print("FAILED", text)
        return 1 if self.failed else 0


# Environment in which NCCL runs several ranks on one GPU.
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
Begin: TypeAlias = Callable[[Job, Variant, str], None]  # starts a variant, with its name in a job


def of_command(job: Job) -> Job:
    """Ensure that no process of a job outlives this one, even if it is killed."""
    atexit.register(job.end_waiting)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    return job


def select_variants(names: list[str], known: Mapping[str, Variant]) -> list[Variant]:
    """Return the variants with these names, or exit."""
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
    """Yield each started variant for which `needs` seconds are left, with its name in this job.

    On GPUs, all start and import at once; CPU ranks share the cores.
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
    """Return a parser of common arguments; `layers` are the defaults of shortened models."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("what")
    parser.add_argument("--model", default=model, help="a folder of $PACK/model, or any folder")
    parser.add_argument("--layers", type=int, help=f"layers to run (default: {layers})")
    parser.add_argument("--memory", type=float, default=memory, help="share of a GPU's memory")
    parser.add_argument("--variants", nargs="+", default=variants)
    parser.add_argument("--seconds", type=float, default=LONGEST, help="time limit")
    parser.add_argument("--cpu", action="store_true", help="on CPU ranks, in float32")
    return parser


def folder_of(name: str) -> Path:
    """Return a model's folder, or exit."""
    folder = Path(name)
    model = folder if folder.is_dir() else Path(os.environ["PACK"]) / "model" / name
    if not (model / "config.json").is_file():
        sys.exit(f"no config.json in {model}")
    return model


def fewer_layers(model: Path, layers: int | None) -> dict[str, int]:
    """Return the config overrides for fewer layers; DeepSeek-V3 keeps one dense layer."""
    dense = {"first_k_dense_replace": 1} if model.name == "deepseek-v3" else {}
    return {"num_hidden_layers": layers, **dense} if layers else {}


def begin_command(
    job: Job, name: str, command: list[str], env: dict[str, str], *, port: int = 0
) -> None:
    """Start an engine's command, which waits until `run` or `in_servers` opens its gate."""
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
    """Measure each variant, with its name in this job and its server's address.

    A server's processes are stopped at the end. An exception of `measure` fails the command, with
    the end of the server's log, and the other variants continue. With `outlives`, a server that
    ends fails too.
    """
    wait = 1200.0 if job.cpu else 300.0  # all imports share a few cores
    for variant, name in in_turn(job, variants, begin, needs=needs, suffix=suffix):
        hosts = [job.waiting.pop(part) for part in job.parts(name)]
        for each in hosts:
            each.gate.touch()
        process, log, start = hosts[0].process, hosts[0].log, time.monotonic()
        try:
            up = answers(job, process, hosts[0].address, wait)
            if not up:
                job.fail(f"{name}: it did not start; end of {log.name}:\n{tail(log)}")
            elif job.check_log(name, variant.startup_text):
                print(f"{name}: up after {time.monotonic() - start:.0f} s", flush=True)
                measure(variant, name, hosts[0].address)
            if up and outlives and process.poll() is not None:
                job.fail(f"{name}: the server exited; end of {log.name}:\n{tail(log)}")
        except Exception as error:
            job.fail(f"{name}: {type(error).__name__}: {error}; end of {log.name}:\n{tail(log)}")
        finally:
            for each in hosts:
                stop(each.process)
                each.gate.unlink()


def answers(job: Job, process: subprocess.Popen[bytes], address: str, seconds: float) -> bool:
    """Wait until a server answers; return False if it exits or the time is up."""
    end = time.monotonic() + job.left(seconds)
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
        time.sleep(0.5)
    return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a server and its children, which are one process group."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
    for _ in range(100):  # children hold GPU memory until they exit
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)


def run(
    job: Job, name: str, command: list[str], seconds: float, env: dict[str, str] | None = None
) -> bool:
    """Run a command, which may be started already; kill it with its children at the time limit.

    Otherwise its ranks would keep GPU memory that the next command needs.
    """
    if name not in job.waiting:
        begin_command(job, name, command, dict(os.environ) if env is None else env)
    started, code = job.waiting.pop(name), None
    started.gate.touch()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = started.process.wait(timeout=job.left(seconds))
    finally:
        stop(started.process)
        started.gate.unlink()
    if code != 0:
        why = "late" if code is None else f"exit status {code}"
        job.fail(f"{name}: {why}\n{tail(started.log)}")
    return code == 0


def open_request(address: str, path: str, body: dict[str, Any], timeout: float) -> Any:
    """Send a request, and return the open response."""
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(address + path, json.dumps(body).encode(), head)
    return urllib.request.urlopen(request, timeout=timeout)


def post(address: str, path: str, body: dict[str, Any], timeout: float = 300.0) -> Any:
    """Send a request, and return its JSON or text."""
    with open_request(address, path, body, timeout) as answer:
        text = answer.read().decode()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def last_line(path: Path) -> dict[str, Any]:
    """Return the last line of a file of JSON lines."""
    line: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return line


def tail(log: Path, lines: int = 30) -> str:
    """Return the end of a log."""
    text = log.read_text(errors="replace").splitlines()
    return "\n".join(f"    | {line[:240]}" for line in text[-lines:])


def free_port() -> int:
    """Return a port that is free now."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def gpu_names() -> list[str]:
    """Return this machine's GPUs, without creating a CUDA context."""
    return (query_nvidia_smi("--query-gpu=name", "--format=csv,noheader") or "").splitlines()
