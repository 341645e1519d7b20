# SPDX-License-Identifier: Apache-2.0
"""Run the test programs of DeepEP, FlashInfer and Triton-distributed, unchanged, on weft.

    run_rivals_tests.py collect DEEP_EP FLASHINFER TRITON_DISTRIBUTED   from git clones
    run_rivals_tests.py run [--ranks 2] [--cpu] [--only NAME,NAME] [--limit SECONDS] [--out DIR]

The programs are theirs, byte for byte, at the commits below, and no part of this repository. Each
runs in a fresh folder whose imports are the shims beside this file: `deep_ep`, `flashinfer` and
`triton_dist` with weft.compat inside, an `mpi4py` over torch's store, and with --cpu a torch that
reads "cuda" as "cpu". Each has a limit; what it starts is ended with it. OUT/rivals.jsonl gets a
line for each program, OUT/NAME.log what it said; the table comes last. Exit status 1 if a program
ran and did not pass.
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

# Of each project: the commit, and where its files go, by the folder that programs are started in.
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
GRACE = 15.0  # seconds
# Their helpers that measure kernels by name: a module of all that theirs has, and our measurement.
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

    name: of the row.   project: whose, and its folder.   path: of the file below it.
    each_rank: it is started once for each rank, with torchrun's environment; else once.
    gpu, cpu: arguments; those of CPU ranks choose smaller sizes.   seconds: limit on GPUs, on CPUs.
    needs: ranks without which it has nothing to run.   refused: why it cannot pass here; it is then
        run only where it is named.
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
    """A file of flashinfer's, and which of its cases, as pytest's -k has them."""
    gpu_words, cpu_words = (("-k", words) if words else () for words in (gpu, cpu or gpu))
    return Program(name, "flashinfer", f"{COMM}/test_{name}.py", gpu_words, cpu_words, **more)


SMALL = ("--num-tokens", "16", "--hidden", "1024", "--num-topk", "4")
LOW = ("--num-processes", "{ranks}")
FEW = (*LOW, *SMALL, "--num-experts", "16")
LAYER = "python/triton_dist/test/nvidia/test_ep_ll_a2a.py"
# The most telling first: what comes late may meet the end of the time.
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
        refused="as --check, after a measurement",
    ),
    flashinfer(
        "allreduce_negative",
        each_rank=True,
        refused="its arguments topology and process_group are gone from flashinfer, too",
    ),
]


def collect(clones: dict[str, Path]) -> None:
    """Take the files out of git clones, at the commits above."""
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
    """The shims, and over them the project's own files; returns where its programs are started."""
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
    made = {
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
        made |= {"RIVALS_CPU": str(ranks), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        made.pop(name, None)
    return made


def start(
    program: Program, folder: Path, ranks: int, cpu: bool, log: Path
) -> list[subprocess.Popen[bytes]]:
    path = program.path.removeprefix("python/")
    given = [each.format(ranks=ranks) for each in (program.cpu if cpu else program.gpu)]
    env = environment(folder, ranks, cpu)
    (folder / "tmp").mkdir(exist_ok=True)
    made = []
    for rank in range(ranks if program.each_rank else 1):
        mine = dict(env)
        if program.each_rank:
            mine |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            mine |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        command = [sys.executable, path, *given]
        if program.by_pytest:
            options = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
            # -s: what a case prints tells of refused calls, also where it passes.
            options += [f"--junitxml={folder}/{rank}.xml", "-v", "-s"]
            command = [sys.executable, "-m", "pytest", *options, path, *given]
        with log.open("ab") as out:
            made.append(
                subprocess.Popen(
                    command, cwd=folder, env=mine, stdout=out, stderr=out, start_new_session=True
                )
            )
    return made


def finish(jobs: list[subprocess.Popen[bytes]], limit: float) -> tuple[int, bool]:
    """The first exit status that is not 0, and whether the limit came first. Ends what is left.

    When one rank has failed, the others have a little time to say what they saw.
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
            os.killpg(job.pid, signal.SIGKILL)  # what it started, and what it left behind
        job.wait()
    return status, late


def first_error(text: str) -> str:
    """The first line that names an error; of weft's, if there is one."""
    found = [match[1] for match in map(ERROR.match, text.splitlines()) if match]
    found = [line for line in found if not RELAYED.search(line)] or found
    ours = [line for line in found if line.startswith("weft.")]
    apart = re.search(r"Mismatched elements: .*", text)
    return (ours or found or [""])[0][:300] + (f" {apart[0]}" if apart and not ours else "")


def cases_of(folder: Path) -> dict[str, str]:
    """Each case's outcome; the worst of its ranks."""
    order = ("passed", "skipped", "failed")
    found: dict[str, str] = {}
    for report in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "skipped" if "skipped" in kinds else "passed"
            if kinds & {"failure", "error"}:
                outcome = "failed"
            name = f"{case.get('classname')}::{case.get('name')}"
            found[name] = max(outcome, found.get(name, "passed"), key=order.index)
    return found


def play(
    program: Program, ranks: int, cpu: bool, limit: float, out: Path, *, named: bool
) -> dict[str, object]:
    """Run one program; its line.   named: also one that is refused."""
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
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rivals-", ignore_cleanup_errors=True) as made:
        folder = tree(program.project, Path(made))
        most = min(limit, program.seconds[1 if cpu else 0])
        status, late = finish(start(program, folder, ranks, cpu, log), most)
        cases = cases_of(folder) if program.by_pytest else {}
    text = log.read_text(errors="replace")
    outcomes = list(cases.values())
    if late and program.by_pytest:  # the report comes at the end
        outcomes = [word.lower() for word in SAID.findall(text)]
    if late or not outcomes:
        outcomes.append("failed" if status or late else "passed")
    line |= {"cases": len(outcomes), "seconds": round(time.monotonic() - began, 1)}
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
    """A row for each program."""
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
    """Run the programs, one after another; returns the exit status."""
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
                print(f"not begun: {program.row}", flush=True)
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
    given = parser.parse_args()
    if given.command == "collect":
        clones = {"DeepEP": given.deep_ep, "DeepEP-1.2.1": given.deep_ep}
        clones |= {"flashinfer": given.flashinfer, "Triton-distributed": given.triton_distributed}
        collect(clones)
        return 0
    words = [word for word in given.only.split(",") if word]
    return run(given.ranks, given.cpu, words, given.limit, given.out.resolve())


if __name__ == "__main__":
    sys.exit(main())
