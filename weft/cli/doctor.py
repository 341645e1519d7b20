"""`weft doctor`: does this machine have what weft needs, and what to do where it has not.

A report names nobody: of the environment it shows the variables of one list, secrets among them
masked, and in every text it replaces user, host and home.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.bench.machine import ask_nvidia_smi, cpu_name, describe_code, driver_version
from weft.errors import DriverError, InvalidArgument, WeftError
from weft.jit.cache import Cache
from weft.jit.host import compile_shared, compiler_identity, find_compiler
from weft.jit.module import CudaModule
from weft.jit.nvrtc import compile_cubin, nvrtc_version
from weft.memory import Group, Heap, launch
from weft.memory.cuda import fabric_works
from weft.memory.driver import call, driver
from weft.shape import MAX_RANKS

Status: TypeAlias = Literal["ok", "warn", "fail"]
MIN_PYTHON, GPU_TORCH = (3, 11), (2, 11)
MIN_FILES = 1024  # open files: sockets and handles of 72 ranks, with room for torch's own
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
# Every variable that weft reads, or that its dependencies read for it: docs/user/environment.md.
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CXX", "GLOO_SOCKET_IFNAME", "LD_LIBRARY_PATH", "LOCAL_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "NVSHMEM_QP_DEPTH", "RANK", "TMPDIR"),
    *("WEFT_CACHE", "WEFT_COMMIT", "WEFT_HOST", "WEFT_LOG"),
    *("WEFT_SGLANG_COMBINE_DTYPE", "WEFT_SGLANG_DECODE"),
    *("WEFT_SGLANG_FORM", "WEFT_SGLANG_OVERLAP", "WEFT_SGLANG_PREFILL_TOKENS"),
    *("WEFT_SGLANG_ALLREDUCE", "WEFT_SGLANG_TIMEOUT", "WEFT_VLLM", "WEFT_VLLM_ALLREDUCE"),
    *("WEFT_VLLM_COMBINE_DTYPE", "WEFT_VLLM_DECODE", "WEFT_VLLM_OVERLAP"),
    *("WEFT_VLLM_PREFILL_TOKENS", "WEFT_VLLM_TIMEOUT", "WORLD_SIZE", "XDG_CACHE_HOME"),
)
MASKED = ("MASTER_ADDR",)  # mostly a host name
PACKAGES = re.compile(
    r"cuda[-_]|nvidia[-_]|(torch|triton|numpy|sglang|vllm|transformers|flashinfer.*|deep[-_]ep)$"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, its state, and how to fix it ("" where nothing is wrong)."""

    section: str
    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at everything; a "fail" means that ranks on the devices found here will not run."""
    findings: list[Finding] = []
    for section, look in (("software", _software), ("GPUs", _gpus), ("system", _system)):
        try:  # what was found before a failure stays
            findings.extend(Finding(section, *found) for found in look())
        except Exception as error:  # a doctor that dies of what it finds is of no use
            text = f"{type(error).__name__}: {error}"
            findings.append(Finding(section, "examination", "fail", text, "report this text"))
    return findings


Line: TypeAlias = tuple[str, Status, str, str]  # a Finding without its section


def _line(name: str, good: bool, detail: str, remedy: str, bad: Status = "fail") -> Line:
    return name, "ok" if good else bad, detail, "" if good else remedy


def _tried(name: str, attempt: Callable[[], str], bad: Status, remedy: str = "") -> Line:
    """From something that is really done; weft's own errors name their remedy."""
    try:
        return name, "ok", attempt(), ""
    except (WeftError, OSError, RuntimeError) as error:  # the last: torch's own
        return name, bad, str(error), remedy


def gpu_count() -> int:
    """GPUs that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _software() -> Iterator[Line]:
    on_gpus: Status = "fail" if gpu_count() else "warn"
    here = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    good = sys.version_info[:2] >= MIN_PYTHON and platform.system() == "Linux"
    yield _line("python", good, here, "weft needs Linux and Python 3.11 or newer")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    detail = f"{torch.__version__}, built for CUDA {torch.version.cuda or '(none)'}"
    enough = version >= GPU_TORCH or not gpu_count()  # an older one, `import weft` refuses
    yield _line("torch", enough, detail, "GPU ranks: pip install 'torch>=2.11'")
    try:
        yield "cuda-bindings", "ok", importlib.metadata.version("cuda-bindings"), ""
    except importlib.metadata.PackageNotFoundError:
        yield "cuda-bindings", on_gpus, "not installed", "pip install 'weft[gpu]'"
    with tempfile.TemporaryDirectory(prefix="weft-doctor-") as scratch:
        trial = Cache(Path(scratch, "cache"))

        def compile_cpp() -> str:
            identity = compiler_identity(find_compiler())
            entry = 'extern "C" int weft_doctor() { return 42; }'
            answer = compile_shared(entry, name="doctor", cache=trial).weft_doctor()
            return f"{identity}; trial code answers {answer}"

        # CPU ranks need it; a machine with GPUs runs without them.
        yield _tried("C++ compiler", compile_cpp, "warn" if gpu_count() else "fail")
        for arch in sorted({"sm_90a", *map(_arch, range(gpu_count()))}):

            def compile_cuda(arch: str = arch) -> str:
                entry = 'extern "C" __global__ void weft_doctor(int* p) { *p = 42; }'
                cubin = compile_cubin(entry, name="doctor", arch=arch, cache=trial)
                devices = [device for device in range(gpu_count()) if _arch(device) == arch]
                for device in devices:  # a driver older than NVRTC refuses its code only now
                    with torch.cuda.device(device):
                        torch.cuda.synchronize()  # makes the context for the module
                        CudaModule(cubin, name=f"trial kernel on cuda:{device}").unload()
                return f"{nvrtc_version()}; trial kernel loads on {len(devices)} GPUs"

            yield _tried(f"NVRTC {arch}", compile_cuda, on_gpus)


def _arch(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def _gpus() -> Iterator[Line]:
    count = gpu_count()
    if not count:
        seen = ask_nvidia_smi("-L") is not None
        remedy = "nvidia-smi sees GPUs: check CUDA_VISIBLE_DEVICES and the driver's version"
        if not torch.version.cuda:
            remedy = "nvidia-smi sees GPUs, but this torch is CPU only: install torch for CUDA"
        detail = "torch sees none" if seen else "none; CPU ranks need none"
        yield _line("GPUs", not seen, detail, remedy, "warn")
        return
    for device in range(count):
        p = torch.cuda.get_device_properties(device)
        detail = f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}, driver "
        remedy = "weft is written for sm_90 and newer; older GPUs are not tested"
        known = driver_version() or "unknown"
        yield _line(f"cuda:{device}", p.major >= 9, detail + known, remedy, "warn")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    denied = [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    remedy = (
        "these pairs cannot share memory: see `nvidia-smi topo -p2p r`; turn off IOMMU/ACS, or "
        "choose other GPUs with CUDA_VISIBLE_DEVICES"
    )
    detail = f"denied: {', '.join(denied)}" if denied else "every pair" if pairs else "one GPU"
    yield _line("peer access", not denied, detail, remedy)
    if count > 1:
        yield _nvlink(ask_nvidia_smi("topo", "-m"))
    try:
        driver()
    except DriverError:
        return  # reported under software
    without = [f"cuda:{device}" for device in range(count) if not _exports(device)]
    remedy = "the driver cannot export memory as a file descriptor: update it, or leave the VM"
    detail = f"not on {', '.join(without)}" if without else "every GPU"
    yield _line("POSIX fd handles", not without, detail, remedy)


def _nvlink(topology: str | None) -> Line:
    """Whether every two GPUs of `nvidia-smi topo -m` have NVLink between them."""
    rows = [line.split() for line in (topology or "").splitlines() if re.match(r"GPU\d+\s", line)]
    paths = {
        f"{row[0]}-{rows[place][0]}": row[1 + place]
        for number, row in enumerate(rows)
        for place in range(number)
    }
    if not paths:
        return "NVLink", "warn", "unknown: nvidia-smi topo -m does not say", "run it by hand"
    others = [f"{pair} ({path})" for pair, path in paths.items() if not path.startswith("NV")]
    detail = f"none between {', '.join(others)}" if others else ", ".join({*paths.values()})
    remedy = "over PCIe weft works, far below the speeds in docs/results/index.md"
    return _line("NVLink", not others, detail, remedy, "warn")


def _exports(device: int) -> bool:
    """Whether a GPU's memory can be exported as a file descriptor."""
    kinds = driver().CUdevice_attribute
    wanted = kinds.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    call("cuInit", 0)
    return bool(call("cuDeviceGetAttribute", wanted, call("cuDeviceGet", device)))


def _system() -> Iterator[Line]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = files == resource.RLIM_INFINITY or files >= MIN_FILES
    remedy = f"ulimit -n {MIN_FILES}: many ranks need more"
    yield _line("open files", enough, str(files), remedy, "warn")
    yield _tried("NVLink domain", _domain, "warn")
    yield _tried("cache", _cache, "fail")
    yield _tried("CPU ranks", _two_ranks, "warn" if gpu_count() else "fail")


def _domain() -> str:
    """Fabric handles reach other hosts; not every GPU has them, nor every machine a channel."""
    where = "one host"
    if gpu_count():
        if fabric_works(torch.device("cuda:0")):
            where = "all hosts that it joins"
        else:
            where += ": no fabric handle can be made here, which takes an IMEX channel"
    return f"up to {MAX_RANKS} ranks, of {where}"


def _cache() -> str:
    store = Cache()
    entries = store.entries()
    return f"{store.path}: {len(entries)} entries, {sum(e.bytes for e in entries) / 2**20:.1f} MiB"


def _two_ranks() -> str:
    """What every job does first: start processes, meet, share sealed memory."""
    launch(_share, ranks=2, device="cpu", timeout=60)
    return "two met and shared memory"


def _share(group: Group) -> None:
    with Heap.create(group, 1 << 20):
        group.barrier()


def to_json(findings: list[Finding]) -> str:
    """Return the findings as JSON, with the worst status first."""
    statuses = [finding.status for finding in findings]
    worst = next(status for status in ("fail", "warn", "ok") if status in statuses)
    return json.dumps({"status": worst, "findings": [asdict(f) for f in findings]}, indent=1)


def print_findings(console: Console, findings: list[Finding]) -> None:
    """Print one line each, remedies below what they fix, and a verdict."""
    table = Table(box=None, pad_edge=False, show_header=False)
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            table.add_row(Text(""), Text(section, "bold"), "")
        detail = Text(finding.detail)
        if finding.remedy:
            detail.append(f"\n-> {finding.remedy}", STYLES[finding.status])
        table.add_row(Text(finding.status, STYLES[finding.status]), Text(finding.name), detail)
    console.print(table)
    fails = sum(finding.status == "fail" for finding in findings)
    devices = f"{gpu_count()} GPUs" if gpu_count() else "CPU ranks"
    verdict = f"not ready for {devices}: {fails} to fix" if fails else f"ready for {devices}"
    console.print(Text(f"\n{verdict}", STYLES["fail" if fails else "ok"]))


def report(findings: list[Finding]) -> dict[str, Any]:
    """Everything a bug report needs, as JSON values: section -> name -> value."""
    topology = ask_nvidia_smi("topo", "-m") or "none"
    packages = {
        each.metadata["Name"]: each.version
        for each in importlib.metadata.distributions()
        if PACKAGES.match(each.metadata["Name"].lower())
    }
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    sections = {
        "weft": describe_code(),
        "packages": dict(sorted(packages.items())),
        "system": {
            "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
            "libc": " ".join(platform.libc_ver()),
            "cpu": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} x {cpu_name()}",
            "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') >> 20} MiB",
            "memory of the control group": _read("/sys/fs/cgroup/memory.max"),
            "/dev/shm": f"{shared.free >> 20} of {shared.total >> 20} MiB free" if shared else "",
            "ptrace_scope": _read("/proc/sys/kernel/yama/ptrace_scope"),
            "container": str(any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))),
            "links": re.sub(r"\x1b\[[0-9;]*m", "", topology).partition("\nLegend")[0].rstrip(),
        },
        "environment": {
            name: "(set)" if name in MASKED else os.environ[name]
            for name in VARIABLES
            if name in os.environ
        },
        "findings": {
            each.name: f"{each.status}  {each.detail}" + (each.remedy and f" -> {each.remedy}")
            for each in findings
        },
    }
    words = _private_words()
    return {
        section: {name: _without(value, words) for name, value in values.items()}
        for section, values in sections.items()
    }


def write_report(path: str, findings: list[Finding], *, as_json: bool) -> None:
    """Write the report to a file, or to stdout for "-". A file that ends in .json holds JSON.

    Raises InvalidArgument where the file cannot be written.
    """
    sections = report(findings)
    lines: list[str] = []
    for title, values in sections.items():
        lines += [f"{title}:", *(f"  {name}: {value}" for name, value in values.items())]
    text = "\n".join(lines)
    if as_json or path.endswith(".json"):
        text = json.dumps(sections, indent=1)
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(f"{text}\n")
    except OSError as error:
        raise InvalidArgument(f"cannot write the report to {path}: {error.strerror}") from error


def _read(path: str) -> str:
    return Path(path).read_text().strip() if os.path.exists(path) else "unknown"


def _private_words() -> dict[str, str]:
    """Patterns that must not be printed -> what is printed instead; the longest first."""
    home, host = os.path.expanduser("~"), socket.gethostname()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = ""
    words = {re.escape(each): "~" for each in {home, os.path.realpath(home)} - {"/"}}
    names = {user: "(user)", host: "(host)", host.partition(".")[0]: "(host)"}
    for name, instead in names.items():  # may be parts of other words, and root is nobody's name
        if name not in ("", "root", "localhost"):
            words[rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"] = instead
    return dict(sorted(words.items(), key=lambda each: -len(each[0])))


def _without(value: Any, words: dict[str, str]) -> Any:
    if isinstance(value, str):
        for word, instead in words.items():
            value = re.sub(word, instead, value, flags=re.IGNORECASE)
    return value
