"""A server of SGLang and what was measured with it, within the minutes that a command may take."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from variants import MOE, Variant

from weft.bench.machine import describe_machine

OUT = Path(os.environ["OUT"])
LONGEST = 560.0  # seconds of a command: less than ten minutes, with unpacking and the archive
REPORT = 30.0  # of them, to stop a server that hangs
LAYERS = {"deepseek-v3": 5, "glm-4.5-air": 16}  # by default; the others have all of theirs
DENSE = {"deepseek-v3": 1}  # so that 4 of the 5 layers are MoE
SERVED = " ranks, form "  # of what the plug-in logs when it has taken a model's layers
FLAGS = [
    *("--attention-backend", "triton", "--moe-runner-backend", "triton"),
    *("--fp8-gemm-backend", "triton", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-radix-cache"),
    *("--mm-feature-transport", "cpu"),  # else a launcher takes memory of the first GPU
]
NO_PREFILL_GRAPHS = "--disable-prefill-cuda-graph"
# Over those: what SGLang has on CPUs, exactly.
CPU_FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *(
        NO_PREFILL_GRAPHS,
        "--disable-cuda-graph",
        "--disable-overlap-schedule",
        "--max-total-tokens",
        "8192",
    ),
]


@dataclasses.dataclass(frozen=True)
class Started:
    """A process of SGLang's whose ranks wait, before they touch a GPU, for the file `gate`.

    Imports take SGLang a minute in all: servers that are measured one after another import at once.
    """

    process: subprocess.Popen[bytes]
    address: str
    log: Path
    gate: Path


@dataclasses.dataclass
class Job:
    """One command: which model on how many GPUs, and when it must be done."""

    what: str
    model: Path
    gpus: int
    flags: list[str]
    end: float
    cpu: bool = False
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

    def record(self, variant: Variant, result: dict[str, Any], **case: Any) -> None:
        """Append a line to results.jsonl."""
        line = {
            "bench": self.what,
            "variant": variant.name,
            "what": variant.what,
            "model": self.model.name,
            "gpus": self.gpus,
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


def arguments(about: str, model: str, variants: list[str]) -> argparse.ArgumentParser:
    """What every measurement takes."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("what")
    parser.add_argument("--model", default=model, help="a folder of $SGL/model, or any folder")
    parser.add_argument("--gpus", type=int, default=max(1, len(gpu_names())))
    parser.add_argument("--layers", type=int, help=f"layers to run (default: {LAYERS})")
    parser.add_argument("--memory", type=float, default=0.75, help="--mem-fraction-static")
    parser.add_argument("--variants", nargs="+", default=variants)
    parser.add_argument("--seconds", type=float, default=LONGEST, help="that this command may take")
    parser.add_argument("--more", nargs="*", default=[], metavar="FLAG", help="without dashes")
    return parser


def job_of(given: argparse.Namespace, *flags: str, dummy: bool = True, cpu: bool = False) -> Job:
    """The command that these arguments ask for. No server outlives it, also where it is killed."""
    folder = Path(given.model)
    model = folder if folder.is_dir() else Path(os.environ["SGL"]) / "model" / given.model
    if not (model / "config.json").is_file():
        sys.exit(f"no config.json in {model}")
    if dummy:
        model = with_every_token(model)
    layers = given.layers or LAYERS.get(model.name)
    config = {"num_hidden_layers": layers, "first_k_dense_replace": DENSE.get(model.name)}
    override = json.dumps({k: v for k, v in config.items() if v is not None})
    made = ["--model-path", str(model), "--mem-fraction-static", str(given.memory), *FLAGS]
    made += ["--load-format", "dummy"] if dummy else []
    made += ["--json-model-override-args", override] if layers else []
    made += [*flags, *(f"--{flag}" if not flag[0].isdigit() else flag for flag in given.more)]
    end = time.monotonic() + given.seconds
    job = Job(given.what, model, given.gpus, made + (CPU_FLAGS if cpu else []), end, cpu)
    atexit.register(job.end_waiting)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    return job


def with_every_token(model: Path) -> Path:
    """A copy of a model's folder whose tokenizer has a text for every id.

    A model of random weights answers with any id, and clients time tokens by their text.
    """
    size = json.loads((model / "config.json").read_text()).get("vocab_size", 0)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab.update({f"\u0120{i}": i for i in range(len(vocab), size)})  # a space, then the number
    copy = Path(tempfile.gettempdir()) / "weft-models" / model.name
    shutil.copytree(model, copy, dirs_exist_ok=True)
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    return copy


def prefill_graphs(chunk: int, *, served: bool) -> list[str]:
    """Flags of prefill by CUDA graphs, with attention between them, up to `chunk` tokens of a rank.

    served: has SGLang them for this model? It has none where attention is latent (MLA).
    """
    if not served:
        return [NO_PREFILL_GRAPHS]
    sizes = [str(size) for size in range(256, chunk, 256)] + [str(chunk)]
    return ["--cuda-graph-backend-prefill", "breakable", "--cuda-graph-bs-prefill", *sizes]


def data_parallel(ranks: int) -> list[str]:
    """Flags of DP attention and expert parallelism, without SGLang's own all-reduces."""
    size = str(ranks)
    return [
        *("--tp", size, "--dp", size, "--ep-size", size),
        *(("--enable-dp-attention",) if ranks > 1 else ()),
        *("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"),
    ]


def chosen(names: list[str], known: dict[str, Variant]) -> list[Variant]:
    """The variants of these names."""
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no variant {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names]


def on_cpus(ranks: int) -> dict[str, str]:
    """The environment of SGLang on CPU ranks, which share this machine's cores.

    sgl_kernel looks for what it has for CPUs in its own folder, and nothing but the load of it is
    needed here: the GPUs' library is copied there.
    """
    kernels = Path(os.environ["SGL_SITE"]) / "sgl_kernel"
    for library in kernels.glob("sm90/common_ops.*"):
        shutil.copy(library, kernels)
    cores = sorted(os.sched_getaffinity(0))
    each = [str(cores[rank % len(cores)]) for rank in range(ranks)]
    return {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "|".join(each)}


def environment(variant: Variant, **more: str) -> dict[str, str]:
    """What a process of this variant sees."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WEFT_SGLANG_")}
    return {**kept, "SGLANG_PLUGINS": variant.plugins, **variant.environment, **more}


def begin(job: Job, variant: Variant, *flags: str, name: str = "", **more: str) -> None:
    """Start a server that `server` of the same name will let through to the GPUs.

    more: of its environment.
    """
    name = name or variant.name
    if job.cpu:
        more |= on_cpus(job.gpus) | {"SGLANG_PLUGINS": f"{variant.plugins},weft_cpu"}
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", *job.flags, *variant.flags, *flags]
    print(f"== {name}: {' '.join(command[3:])}", flush=True)
    begin_command(
        job, name, [*command, "--port", str(port)], environment(variant, **more), port=port
    )


def begin_command(
    job: Job, name: str, command: list[str], env: dict[str, str], *, port: int = 0
) -> None:
    """Start a command of SGLang's that `run` or `server` will let through to the GPUs."""
    log, gate = OUT / f"{job.what}-{name}.log", OUT / f"gate-{name}"
    with open(log, "a") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env | {"SERVER_GATE": str(gate)},
            start_new_session=True,
        )
    job.waiting[name] = Started(process, f"http://127.0.0.1:{port}", log, gate)


@contextlib.contextmanager
def server(
    job: Job,
    variant: Variant,
    *flags: str,
    name: str = "",
    seconds: float = 300.0,
    outlives: bool = True,
    **more: str,
) -> Iterator[str | None]:
    """Its address once it answers, or None; at the end it is stopped, with all its processes.

    What a measurement raises fails the command, with the end of the server's log, and the others
    go on.   outlives: is its end a failure?   flags, more: of `begin`, if it was not called.
    """
    name = name or variant.name
    if name not in job.waiting:
        begin(job, variant, *flags, name=name, **more)
    this = job.waiting.pop(name)
    process, log = this.process, this.log
    this.gate.touch()
    began = time.monotonic()
    try:
        up = answers(job, process, this.address, seconds)
        loaded = not variant.weft or said(log, SERVED if MOE[1] in variant.flags else variant.says)
        if up and loaded:
            print(f"{name}: up after {time.monotonic() - began:.0f} s", flush=True)
            yield this.address
        else:
            why = "weft's plug-in was not loaded" if up else "it did not come up"
            job.fail(f"{name}: {why}; end of {log.name}:\n{tail(log)}")
            yield None
        if up and outlives and process.poll() is not None:
            job.fail(f"{name}: the server ended by itself; end of {log.name}:\n{tail(log)}")
    except Exception as error:
        job.fail(f"{name}: {type(error).__name__}: {error}; end of {log.name}:\n{tail(log)}")
    finally:
        stop(process)
        this.gate.unlink()


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


def post(address: str, path: str, body: dict[str, Any], timeout: float = 300.0) -> Any:
    """Ask a server."""
    request = urllib.request.Request(
        address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
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


def said(log: Path, text: str) -> bool:
    """Does a log hold these words?"""
    return text in log.read_text(errors="replace")


def free_port() -> int:
    """A port that nobody listens on now."""
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def gpu_names() -> list[str]:
    """Of this machine, without making a CUDA context in this process."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split("\n")[:-1]
