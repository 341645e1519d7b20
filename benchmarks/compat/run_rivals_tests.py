# SPDX-License-Identifier: Apache-2.0
"""Run the test programs of DeepEP, FlashInfer and Triton-distributed, unchanged, on weft.

    run_rivals_tests.py collect DEEP_EP FLASHINFER TRITON_DISTRIBUTED   from git clones
    run_rivals_tests.py run [--ranks 2] [--cpu] [--only NAME,NAME] [--limit SECONDS] [--out DIR]

The programs are unmodified, at the commits below, and not part of this repository. Each runs in a
fresh folder whose imports are the shims beside this file: `deep_ep`, `flashinfer` and `triton_dist`
with weft.compat inside, an `mpi4py` over torch's store, and with --cpu a torch that maps "cuda" to
"cpu". Each has a time limit, and its processes are killed at the end. OUT/rivals.jsonl gets a line
per program, OUT/NAME.log its output; a table follows. The exit status is 1 if a program ran and
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
STORE = REPOSITORY / ".carry" / "rivals"

# Each project's commit, and its files, relative to the folder where programs are started.
COMMITS = {
    "DeepEP": "dd758caf451848bd150e1046af3d0a73e5fff38d",  # 2026-07-14
    "DeepEP-1.2.1": "9af0e0d0e74f3577af1979c9b9e1ac2cad0104ee",
    "flashinfer": "fb28d7242b3506a2348265962041acc1fb56cca4",  # 2026-08-22
    "Triton-distributed": "1512a81189315eca7ba38f884aaf239469a88ba3",  # 2026-07-12
}
COMM = "tests/comm"
FILES = {
    "DeepEP": [
        *(f"deep_ep/utils/{name}.py" for name in ("envs", "math", "testing")),
        *(f"tests/legacy/{name}.py" for name in ("test_low_latency", "test_intranode")),
    ],
    "DeepEP-1.2.1": [
        f"tests/{name}.py" for name in ("test_low_latency", "test_intranode", "utils")
    ],
    "flashinfer": [
        *("flashinfer/comm/mapping.py", "flashinfer/tllm_enums.py", "pytest.ini"),
        *("tests/__init__.py", "tests/utils_fp8.py", "tests/test_helpers/__init__.py"),
        *("tests/test_helpers/comm.py", f"{COMM}/__init__.py", f"{COMM}/conftest.py"),
        *(
            f"{COMM}/test_{name}.py"
            for name in (
                *("mnnvl_moe_alltoall", "trtllm_allreduce_dynamic_fp8_quant"),
                *("allreduce_fusion_moe_unified_api", "allreduce_unified_api"),
                *("allreduce_negative", "gemma_ar_fusion"),
            )
        ),
    ],
    "Triton-distributed": [
        f"python/triton_dist/test/nvidia/{name}.py" for name in ("test_ep_ll_a2a", "ep_a2a_utils")
    ],
}
GRACE = 15.0  # seconds for other ranks to print their errors after one failed
# Helpers that time kernels by name are replaced by a module with our measurement.
MEASURING = {"DeepEP": "deep_ep/utils/testing.py", "DeepEP-1.2.1": "tests/utils.py"}
ERROR = re.compile(
    r"^(?:E +|\[rank\d+\]: *)?((?:[\w.]+\.)?\w*"
    r"(?:Error|Exception|Invalid\w+|Mismatch|OutOfOrder|Timeout)\b:? .*)"
)

SAID = re.compile(r" (PASSED|FAILED|SKIPPED) +\[")
RELAYED = re.compile(
    r"failed with exit|exitcode|exit code|ProcessRaised|ProcessExited|Connection (?:closed|reset)"
)


@dataclass(frozen=True)
class Program:
    """A test program.

    Attributes:
        name: Name in the table.
        project: Project and name of its folder.
        path: File below that folder.
        gpu: Arguments on GPUs.
        cpu: Arguments on CPU ranks, with smaller sizes.
        each_rank: Whether it is started once per rank, with torchrun's environment.
        seconds: Time limits on GPUs and on CPUs.
        needs: Minimum number of ranks.
        refused: Why it cannot pass; it then runs only if named.
    """

    name: str
    project: str
    path: str
    gpu: tuple[str, ...] = ()
    cpu: tuple[str, ...] = ()
    each_rank: bool = False
    seconds: tuple[int, int] = (60, 300)
    needs: int = 2
    refused: str = ""

    @property
    def row(self) -> str:
        return f"{self.project} {self.name}"

    @property
    def by_pytest(self) -> bool:
        return self.project == "flashinfer"


def flashinfer(name: str, gpu: str = "", cpu: str = "", **more: Any) -> Program:
    """Return a test file of flashinfer, with cases selected by pytest's -k."""
    gpu_words, cpu_words = (("-k", words) if words else () for words in (gpu, cpu or gpu))
    return Program(name, "flashinfer", f"{COMM}/test_{name}.py", gpu_words, cpu_words, **more)


SMALL = ("--num-tokens", "16", "--hidden", "1024", "--num-topk", "4")
LOW = ("--num-processes", "{ranks}")
FEW = (*LOW, *SMALL, "--num-experts", "16")
LAYER = "python/triton_dist/test/nvidia/test_ep_ll_a2a.py"
# The most important programs first, because the total time is limited.
PROGRAMS = [
    Program(
        "low_latency", "DeepEP", "tests/legacy/test_low_latency.py", LOW, FEW, seconds=(60, 600)
    ),
    Program("intranode", "DeepEP-1.2.1", "tests/test_intranode.py", LOW, FEW),
    Program(
        "ep_ll_a2a --check",
        "Triton-distributed",
        LAYER,
        ("--check", "-M", "128"),
        ("--check", "-M", "8", "-N", "512", "-G", "16", "--topk", "4"),
        each_rank=True,
    ),
    flashinfer(
        "mnnvl_moe_alltoall",
        "dispatch_moe_combine",
        "dispatch_moe_combine and uniform-2",
        each_rank=True,
        seconds=(90, 300),
    ),
    flashinfer("gemma_ar_fusion"),
    flashinfer(
        "allreduce_unified_api",
        "trtllm and 2880 and dtype1",
        "trtllm and 2880 and dtype1 and not seq_lens5",
        each_rank=True,
    ),
    flashinfer(
        "allreduce_fusion_moe_unified_api",
        "(finalize and 16-8-True and {ranks}]) or reduction",
        seconds=(90, 400),
    ),
    flashinfer(
        "trtllm_allreduce_dynamic_fp8_quant",
        "not ws4 and not m1024 and not h8192",
        seconds=(100, 500),
    ),
    Program(
        "low_latency", "DeepEP-1.2.1", "tests/test_low_latency.py", LOW, FEW, seconds=(60, 600)
    ),
    Program("intranode", "DeepEP", "tests/legacy/test_intranode.py", LOW, FEW, seconds=(60, 1200)),
    Program(
        "ep_ll_a2a",
        "Triton-distributed",
        LAYER,
        ("-M", "128"),
        ("-M", "8", "-N", "512", "-G", "16", "--topk", "4"),
        each_rank=True,
        refused="the same as --check, after a measurement",
    ),
    flashinfer(
        "allreduce_negative",
        each_rank=True,
        refused="its arguments topology and process_group no longer exist in flashinfer",
    ),
]


def collect(clones: dict[str, Path]) -> None:
    """Extract the files from git clones, at the commits above."""
    for project, names in FILES.items():
        for name in names:
            blob = subprocess.run(
                ["git", "-C", clones[project], "show", f"{COMMITS[project]}:{name}"],
                capture_output=True,
                check=True,
            )
            place = STORE / project / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(blob.stdout)
    print(f"{sum(map(len, FILES.values()))} files in {STORE}")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def tree(project: str, folder: Path) -> Path:
    """Copy the shims and the project's files, and return the folder where programs are started."""
    shutil.copytree(
        HERE / "shims", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    root = STORE / project / ("python" if project == "Triton-distributed" else "")
    shutil.copytree(root, folder, dirs_exist_ok=True)
    if project in MEASURING:
        module = folder / MEASURING[project]
        theirs = module.rename(module.with_name(f"{module.stem}_theirs.py"))
        package = "deep_ep.utils." if project == "DeepEP" else ""
        module.write_text(
            f"from {package}{theirs.stem} import *\nfrom deep_ep.measured import bench_kineto\n"
        )
    return folder


def environment(folder: Path, ranks: int, cpu: bool) -> dict[str, str]:
    env = {
        **os.environ,
        "PYTHONPATH": f"{folder}:{REPOSITORY}",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(folder / "tmp"),
        "TORCHDYNAMO_DISABLE": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "RIVALS_STORE_PORT": str(free_port()),
    }
    if cpu:
        env |= {"RIVALS_CPU": str(ranks), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    return env


def start(
    program: Program, folder: Path, ranks: int, cpu: bool, log: Path
) -> list[subprocess.Popen[bytes]]:
    path = program.path.removeprefix("python/")
    arguments = [each.format(ranks=ranks) for each in (program.cpu if cpu else program.gpu)]
    base = environment(folder, ranks, cpu)
    (folder / "tmp").mkdir(exist_ok=True)
    processes = []
    for rank in range(ranks if program.each_rank else 1):
        env = dict(base)
        if program.each_rank:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        command = [sys.executable, path, *arguments]
        if program.by_pytest:
            options = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
            # -s: refused calls are printed by cases that pass, too.
            options += [f"--junitxml={folder}/{rank}.xml", "-v", "-s"]
            command = [sys.executable, "-m", "pytest", *options, path, *arguments]
        with log.open("ab") as out:
            processes.append(
                subprocess.Popen(
                    command, cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True
                )
            )
    return processes


def finish(jobs: list[subprocess.Popen[bytes]], limit: float) -> tuple[int, bool]:
    """Wait for processes; return the first nonzero exit status, and whether the limit was reached.

    After a rank fails, the others get some time to print their errors. Remaining processes are
    killed.
    """
    end, late = time.monotonic() + limit, False
    grace: float | None = None
    while None in [job.poll() for job in jobs]:
        if grace is None and any(job.returncode for job in jobs):
            grace = time.monotonic() + GRACE
            end = min(end, grace)
        if time.monotonic() > end:
            late = not any(job.returncode for job in jobs)
            break
        time.sleep(0.1)
    status = next((job.returncode for job in jobs if job.returncode), 0)
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # including its children
        job.wait()
    return status, late


def first_error(text: str) -> str:
    """Return the first line with an error, of weft's if there is one."""
    errors = [match[1] for match in map(ERROR.match, text.splitlines()) if match]
    errors = [line for line in errors if not RELAYED.search(line)] or errors
    ours = [line for line in errors if line.startswith("weft.")]
    apart = re.search(r"Mismatched elements: .*", text)
    return (ours or errors or [""])[0][:300] + (f" {apart[0]}" if apart and not ours else "")


def cases_of(folder: Path) -> dict[str, str]:
    """Return each case's worst outcome over ranks."""
    order = ("passed", "skipped", "failed")
    outcomes: dict[str, str] = {}
    for report in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "skipped" if "skipped" in kinds else "passed"
            if kinds & {"failure", "error"}:
                outcome = "failed"
            name = f"{case.get('classname')}::{case.get('name')}"
            outcomes[name] = max(outcome, outcomes.get(name, "passed"), key=order.index)
    return outcomes


def play(
    program: Program, ranks: int, cpu: bool, limit: float, out: Path, *, named: bool
) -> dict[str, object]:
    """Run one program and return its record. `named` programs run even if they are refused."""
    line: dict[str, object] = {
        "project": program.project,
        "program": program.name,
        "commit": COMMITS[program.project][:9],
        "ranks": ranks,
        "device": "cpu" if cpu else "cuda",
        **dict.fromkeys(("cases", "passed", "failed", "skipped"), 0),
    }
    if ranks < program.needs:
        return {**line, "error": f"not run: it needs {program.needs} GPUs"}
    if program.refused and not named:
        return {**line, "error": f"not run: {program.refused}"}
    log = out / f"{program.project}-{re.sub(r'[^a-z0-9]+', '-', program.name.lower())}.log"
    log.write_bytes(b"")
    start_time = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rivals-", ignore_cleanup_errors=True) as scratch:
        folder = tree(program.project, Path(scratch))
        most = min(limit, program.seconds[1 if cpu else 0])
        status, late = finish(start(program, folder, ranks, cpu, log), most)
        cases = cases_of(folder) if program.by_pytest else {}
    text = log.read_text(errors="replace")
    outcomes = list(cases.values())
    if late and program.by_pytest:  # the XML report is missing
        outcomes = [word.lower() for word in SAID.findall(text)]
    if late or not outcomes:
        outcomes.append("failed" if status or late else "passed")
    line |= {"cases": len(outcomes), "seconds": round(time.monotonic() - start_time, 1)}
    line |= {kind: outcomes.count(kind) for kind in ("passed", "failed", "skipped")}
    line["refused_calls"] = text.count("RIVALS-REFUSED")
    steps = [] if program.by_pytest else re.findall(r"\bpassed$", text, flags=re.MULTILINE)
    line["steps"] = len(steps)
    if late:
        line["error"] = f"over {most:.0f} s; {first_error(text)}"
    elif line["failed"]:
        line["error"] = first_error(text) or f"exit status {status}"
    return line


def table(lines: list[dict[str, object]]) -> str:
    """Format a Markdown table with a row per program."""
    rows = [
        "| Program | cases | passed | failed | skipped | s | First error |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        numbers = (str(line[each]) for each in ("cases", "passed", "failed", "skipped"))
        error = str(line.get("error", ""))
        if line.get("refused_calls"):
            error = f"{line['refused_calls']} calls made without NVFP4. {error}"
        cells = [f"{line['project']} {line['program']}", *numbers, str(line.get("seconds", ""))]
        rows.append(f"| {' | '.join(cells)} | {error.replace('|', '/')} |")
    return "\n".join(rows)


def run(ranks: int, cpu: bool, only: list[str], limit: float, out: Path) -> int:
    """Run the programs one after another, and return the exit status."""
    out.mkdir(parents=True, exist_ok=True)
    chosen = [p for p in PROGRAMS if not only or {p.name, p.project, p.row} & {*only}]
    missing = [p.path for p in chosen if not (STORE / p.project / p.path).is_file()]
    if not chosen or missing:
        why = f"not in {STORE}: {missing}; `collect` first"
        print(why if chosen else f"nothing to run: --only {','.join(only)}", file=sys.stderr)
        return 2
    lines, end = [], time.monotonic() + limit
    with (out / "rivals.jsonl").open("a") as record:
        for program in chosen:
            left = end - time.monotonic()
            if left < 5:
                print(f"not started: {program.row}", flush=True)
                continue
            lines.append(play(program, ranks, cpu, left, out, named=bool(only)))
            record.write(json.dumps(lines[-1]) + "\n")
            record.flush()
            print(json.dumps(lines[-1]), flush=True)
    print(table(lines))
    return int(any(line["failed"] for line in lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    taking = commands.add_parser("collect")
    for name in ("deep_ep", "flashinfer", "triton_distributed"):
        taking.add_argument(name, type=Path)
    running = commands.add_parser("run")
    running.add_argument("--ranks", type=int, default=2)
    running.add_argument("--cpu", action="store_true")
    running.add_argument(
        "--only", default="", help="names, projects or both with a space, by comma"
    )
    running.add_argument("--limit", type=float, default=3600.0, help="seconds for all together")
    running.add_argument("--out", type=Path, default=REPOSITORY / "build" / "rivals")
    args = parser.parse_args()
    if args.command == "collect":
        clones = {"DeepEP": args.deep_ep, "DeepEP-1.2.1": args.deep_ep}
        clones |= {"flashinfer": args.flashinfer, "Triton-distributed": args.triton_distributed}
        collect(clones)
        return 0
    words = [word for word in args.only.split(",") if word]
    return run(args.ranks, args.cpu, words, args.limit, args.out.resolve())


if __name__ == "__main__":
    sys.exit(main())
