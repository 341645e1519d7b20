"""`weft doctor`: does this machine have what weft needs, and what to do where it has not."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import resource
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

from weft.bench.machine import ask_nvidia_smi, driver_version
from weft.errors import WeftError
from weft.jit.cache import Cache
from weft.jit.host import compile_shared, compiler_identity, find_compiler
from weft.jit.module import CudaModule
from weft.jit.nvrtc import compile_cubin, nvrtc_version

Status: TypeAlias = Literal["ok", "warn", "fail"]
_MIN_PYTHON, _MIN_TORCH = (3, 11), (2, 8)
_MIN_FILES = 1024  # open files: sockets and handles of 32 ranks, with room for torch's own
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, how it is, and what mends it ("" where nothing is amiss)."""

    section: str
    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at everything; a "fail" means that ranks on the devices found here will not run."""
    findings: list[Finding] = []
    for section, look in (
        ("software", _software),
        ("compilers", _compilers),
        ("GPUs", _gpus),
        ("system", _system),
    ):
        try:
            findings.extend(look())  # what was found before a failure stays
        except Exception as error:  # a doctor that dies of what it finds is of no use
            text = f"{type(error).__name__}: {error}"
            findings.append(Finding(section, "examination", "fail", text, "report this text"))
    return findings


def _software() -> Iterator[Finding]:
    section = "software"
    yield _checked(
        section,
        "python",
        sys.version_info[:2] >= _MIN_PYTHON,
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        f"weft needs Python {'.'.join(map(str, _MIN_PYTHON))} or newer",
    )
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    detail = f"{torch.__version__}, built for {built}"
    yield _checked(section, "torch", version >= _MIN_TORCH, detail, "pip install 'torch>=2.8'")
    if platform.system() != "Linux":
        yield Finding(section, "system", "fail", platform.system(), "weft runs on Linux")
    try:
        bindings = importlib.metadata.version("cuda-bindings")
        yield Finding(section, "cuda-bindings", "ok", bindings)
    except importlib.metadata.PackageNotFoundError:
        remedy = "pip install 'weft[gpu]'"
        yield Finding(section, "cuda-bindings", _if_gpus("fail"), "not installed", remedy)


def _compilers() -> Iterator[Finding]:
    section = "compilers"
    with tempfile.TemporaryDirectory(prefix="weft-doctor-") as scratch:
        trial = Cache(Path(scratch, "cache"))

        def compile_cpp() -> str:
            identity = compiler_identity(find_compiler())
            entry = 'extern "C" int weft_doctor() { return 42; }'
            answer = compile_shared(entry, name="doctor", cache=trial).weft_doctor()
            return f"{identity}; trial code answers {answer}"

        # CPU ranks need it; a machine with GPUs runs without them.
        yield _tried(section, "C++ compiler", compile_cpp, "warn" if _gpu_count() else "fail")
        arches = {"sm_90a", *(_arch(device) for device in range(_gpu_count()))}
        for arch in sorted(arches):

            def compile_cuda(arch: str = arch) -> str:
                entry = 'extern "C" __global__ void weft_doctor(int* p) { *p = 42; }'
                cubin = compile_cubin(entry, name="doctor", arch=arch, cache=trial)
                devices = [device for device in range(_gpu_count()) if _arch(device) == arch]
                for device in devices:
                    _load(cubin, device)
                loaded = f" loads on {len(devices)} GPUs" if devices else ""
                return f"{nvrtc_version()}; trial kernel of {len(cubin)} bytes{loaded}"

            yield _tried(section, f"NVRTC {arch}", compile_cuda, _if_gpus("fail"))


def _load(cubin: bytes, device: int) -> None:
    """Load the trial kernel: a driver older than NVRTC refuses its code, and only then."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the context that the module is loaded into
        module = CudaModule(cubin, name=f"trial kernel on cuda:{device}")
        module.function("weft_doctor")
        module.unload()


def _gpus() -> Iterator[Finding]:
    section, count = "GPUs", _gpu_count()
    if not count:
        seen = ask_nvidia_smi("-L") is not None
        remedy = "nvidia-smi sees GPUs: check CUDA_VISIBLE_DEVICES and the driver's version"
        if not torch.version.cuda:
            remedy = "nvidia-smi sees GPUs, but this torch is CPU only: install torch for CUDA"
        detail = "torch sees none" if seen else "none; CPU ranks need none"
        yield _checked(section, "GPUs", not seen, detail, remedy, "warn")
        return
    driver = driver_version()
    for device in range(count):
        properties = torch.cuda.get_device_properties(device)
        yield _checked(
            section,
            f"cuda:{device}",
            properties.major >= 9,
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
            f"{properties.major}.{properties.minor}, driver {driver or 'unknown'}",
            "weft is written for sm_90 and newer; older GPUs are not tested",
            "warn",
        )
    yield from _peer_access(section, count)
    yield from _topology(section)
    yield from _handles(section, count)


def _peer_access(section: str, count: int) -> Iterator[Finding]:
    rows, denied = [], []
    for a in range(count):
        row = ""
        for b in range(count):
            allowed = a == b or torch.cuda.can_device_access_peer(a, b)
            row += "-" if a == b else "y" if allowed else "n"
            if not allowed:
                denied.append(f"{a}->{b}")
        rows.append(row)
    remedy = (
        "these pairs cannot share memory: see `nvidia-smi topo -p2p r`; turn off IOMMU/ACS, or "
        "choose other GPUs with CUDA_VISIBLE_DEVICES"
    )
    detail = "all pairs" if not denied else f"denied: {', '.join(denied)}"
    shown = f"{detail}; matrix {' '.join(rows)}" if count > 1 else "one GPU"
    yield _checked(section, "peer access", not denied, shown, remedy)


def _topology(section: str) -> Iterator[Finding]:
    text = ask_nvidia_smi("topo", "-m")
    if text is None:
        yield Finding(section, "NVLink", "warn", "nvidia-smi topo -m does not answer")
        return
    cells = [cell for line in text.splitlines() if line.startswith("GPU") for cell in line.split()]
    links = sorted({cell for cell in cells if cell.startswith("NV") and cell[2:].isdigit()})
    others = sorted({cell for cell in cells if cell in ("SYS", "NODE", "PHB", "PXB", "PIX")})
    detail = f"links between GPUs: {', '.join(links) or 'no NVLink'}"
    detail += f"; PCIe paths in the table: {', '.join(others)}" if others else ""
    good = bool(links) or _gpu_count() == 1
    remedy = "over PCIe weft works, far below the speeds in docs/measuring.md"
    yield _checked(section, "NVLink", good, detail, remedy, "warn")


def _handles(section: str, count: int) -> Iterator[Finding]:
    try:
        from cuda.bindings import driver
    except ImportError:
        return  # reported under software
    kinds = driver.CUdevice_attribute
    update = "the driver cannot export memory as a file descriptor: update it, or leave the VM"
    posix = kinds.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    fabric = kinds.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
    looked = (("POSIX fd handles", posix, update), ("FABRIC handles", fabric, ""))
    for name, attribute, remedy in looked:
        without = [f"cuda:{i}" for i in range(count) if not _attribute(driver, attribute, i)]
        detail = f"not on {', '.join(without)}" if without else "every GPU"
        if not remedy:
            detail += " (optional)"
        yield _checked(section, name, not (without and remedy), detail, remedy)


def _attribute(driver: Any, attribute: Any, device: int) -> bool:
    (status,) = driver.cuInit(0)
    if int(status) == 0:
        status, handle = driver.cuDeviceGet(device)
    if int(status) == 0:
        status, value = driver.cuDeviceGetAttribute(attribute, handle)
    if int(status) != 0:
        raise RuntimeError(f"the driver answered {status} for {attribute} of cuda:{device}")
    return bool(value)


def _system() -> Iterator[Finding]:
    section = "system"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = files == resource.RLIM_INFINITY or files >= _MIN_FILES
    remedy = f"ulimit -n {_MIN_FILES}: many ranks need more"
    yield _checked(section, "open files", enough, _limit(files), remedy, "warn")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    enough = locked == resource.RLIM_INFINITY or locked >= 64 * 1024
    remedy = "pinned pages may be refused: ulimit -l unlimited"
    yield _checked(section, "locked memory", enough, f"{_limit(locked)} bytes", remedy, "warn")
    remedy = "CPU ranks share memory through sealed memfds: allow memfd_create in this sandbox"
    yield _tried(section, "memfd and seals", _memfd, _if_gpus("warn", "fail"), remedy)
    place = "set TMPDIR to a directory that you can write, with a short path"
    yield _tried(section, "sockets in TMPDIR", _rendezvous, "fail", place)
    yield _tried(section, "cache", _cache, "fail")
    remedy = "torch.distributed and torchrun need 127.0.0.1: bring `lo` up"
    yield _tried(section, "loopback", _loopback, "warn", remedy)


def _memfd() -> str:
    fd = os.memfd_create("weft-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, resource.getpagesize())
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) != seals:
            raise OSError("the kernel did not keep the seals")
    finally:
        os.close(fd)
    return "created and sealed"


def _rendezvous() -> str:
    """What ranks do to meet: a private directory, a socket in it, a file descriptor through it."""
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        path = os.path.join(folder, "hub")
        mode = os.stat(folder).st_mode & 0o777
        if mode != 0o700:
            raise OSError(f"a new directory has mode {mode:04o}, expected 0700")
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind(path)
            server.listen(1)
            client.settimeout(5)
            client.connect(path)
            peer, _ = server.accept()
            with peer:
                socket.send_fds(client, [b"x"], [server.fileno()])
                _, fds, _, _ = socket.recv_fds(peer, 1, 1)
                for fd in fds:
                    os.close(fd)
                if len(fds) != 1:
                    raise OSError("a file descriptor sent over a Unix socket did not arrive")
    return f"{tempfile.gettempdir()}: directories of mode 0700, descriptors pass"


def _cache() -> str:
    store = Cache()
    entries = store.entries()
    return f"{store.path}: {len(entries)} entries, {sum(e.bytes for e in entries) / 2**20:.1f} MiB"


def _loopback() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
    return "127.0.0.1 connects"


def _checked(
    section: str, name: str, good: bool, detail: str, remedy: str, otherwise: Status = "fail"
) -> Finding:
    """A finding from something that was only looked at."""
    return Finding(section, name, "ok" if good else otherwise, detail, "" if good else remedy)


def _tried(
    section: str, name: str, attempt: Callable[[], str], otherwise: Status, remedy: str = ""
) -> Finding:
    """A finding from something that is really done; weft's own errors name their remedy."""
    try:
        return Finding(section, name, "ok", attempt())
    except (WeftError, OSError, RuntimeError) as error:  # the last: torch's own
        return Finding(section, name, otherwise, str(error), remedy)


def _gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _if_gpus(status: Status, otherwise: Status = "warn") -> Status:
    """Return `status` on a machine with GPUs, else `otherwise`."""
    return status if _gpu_count() else otherwise


def _arch(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def to_json(findings: list[Finding]) -> str:
    """Return the findings as JSON, with the worst status first."""
    statuses = [finding.status for finding in findings]
    worst = next(status for status in ("fail", "warn", "ok") if status in statuses)
    return json.dumps({"status": worst, "findings": [asdict(f) for f in findings]}, indent=1)


def print_findings(console: Console, findings: list[Finding]) -> None:
    """Print one line each, remedies below what they mend, and a verdict."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(vertical="top")
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            table.add_row(Text(""), Text(section, "bold"), "")
        mark = Text(finding.status, _STYLES[finding.status])
        detail = Text(finding.detail)
        if finding.remedy:
            detail.append(f"\n-> {finding.remedy}", _STYLES[finding.status])
        table.add_row(mark, Text(finding.name), detail)
    console.print(table)
    fails = sum(finding.status == "fail" for finding in findings)
    warns = sum(finding.status == "warn" for finding in findings)
    devices = f"{_gpu_count()} GPUs" if _gpu_count() else "CPU ranks"
    verdict = f"ready for {devices}" if not fails else f"not ready for {devices}: {fails} to mend"
    style = _STYLES["fail"] if fails else _STYLES["ok"]
    warnings = "1 warning" if warns == 1 else f"{warns} warnings"
    console.print(Text.assemble("\n", (verdict, style), f", {warnings}" if warns else ""))
