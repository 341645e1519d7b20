# SPDX-License-Identifier: Apache-2.0
"""`weft doctor`: checks whether this machine meets weft's requirements."""

from __future__ import annotations

import importlib.metadata
import re
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from weft.bench.machine import query_nvidia_smi, read_driver_version
from weft.cli.findings import Finding, Line, Status, build_line, check_basics
from weft.cuda.driver import call_driver, load_driver
from weft.cuda.memory import supports_fabric
from weft.distribution import install_hint
from weft.errors import DriverError, WeftError
from weft.group import Group
from weft.heap import Heap
from weft.jit.cache import Cache
from weft.jit.host import compile_shared, compiler_identity, find_compiler
from weft.jit.module import CudaModule
from weft.jit.nvrtc import compile_cubin, nvrtc_version
from weft.launcher import launch
from weft.shape import MAX_RANKS

GPU_TORCH = (2, 11)
MIN_FILES = 1024  # open files for the sockets and handles of 72 ranks, and for torch


def run_checks() -> list[Finding]:
    """Run all checks and return their findings; with "fail", ranks cannot run on this machine."""
    findings: list[Finding] = []
    for section, check_section in (
        ("software", _check_software),
        ("GPUs", _check_gpus),
        ("system", _check_system),
    ):
        try:  # findings before an error are reported
            findings.extend(Finding(section, *line) for line in check_section())
        except Exception as error:  # a broken installation may raise anything
            text = f"{type(error).__name__}: {error}"
            findings.append(Finding(section, "checks", "fail", text, "report this error"))
    return findings


def _run_check(name: str, check: Callable[[], str], failure_status: Status) -> Line:
    """Run `check`, and return its text or error as a line. weft's errors contain a remedy."""
    try:
        return name, "ok", check(), ""
    except (WeftError, OSError, RuntimeError) as error:  # torch raises RuntimeError
        return name, failure_status, str(error), ""


def count_gpus() -> int:
    """Return the number of GPUs that torch finds."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def describe_devices() -> str:
    """Return a text with the devices that ranks would run on."""
    return f"{count_gpus()} GPUs" if count_gpus() else "CPU ranks"


def _check_software() -> Iterator[Line]:
    on_gpus: Status = "fail" if count_gpus() else "warn"
    yield from check_basics()
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    detail = f"{torch.__version__}, built for CUDA {torch.version.cuda or '(none)'}"
    is_sufficient = (
        version >= GPU_TORCH or not count_gpus()
    )  # `import weft` checks the version for CPU ranks
    yield build_line("torch", is_sufficient, detail, "GPU ranks: pip install 'torch>=2.11'")
    try:
        yield "cuda-bindings", "ok", importlib.metadata.version("cuda-bindings"), ""
    except importlib.metadata.PackageNotFoundError:
        yield "cuda-bindings", on_gpus, "not installed", install_hint("gpu")
    with tempfile.TemporaryDirectory(prefix="weft-doctor-") as scratch:
        scratch_cache = Cache(Path(scratch, "cache"))

        def compile_cpp() -> str:
            identity = compiler_identity(find_compiler())
            entry = 'extern "C" int weft_doctor() { return 42; }'
            result = compile_shared(entry, name="doctor", cache=scratch_cache).weft_doctor()
            return f"{identity}; trial code returns {result}"

        # CPU ranks need a compiler, GPU ranks do not.
        yield _run_check("C++ compiler", compile_cpp, "warn" if count_gpus() else "fail")
        for arch in sorted({"sm_90a", *map(_get_arch, range(count_gpus()))}):

            def compile_cuda(arch: str = arch) -> str:
                entry = 'extern "C" __global__ void weft_doctor(int* p) { *p = 42; }'
                cubin = compile_cubin(entry, name="doctor", arch=arch, cache=scratch_cache)
                devices = [device for device in range(count_gpus()) if _get_arch(device) == arch]
                for device in devices:  # an old driver raises only when it loads NVRTC's code
                    with torch.cuda.device(device):
                        torch.cuda.synchronize()  # creates the context for the module
                        CudaModule(cubin, name=f"trial kernel on cuda:{device}").unload()
                return f"{nvrtc_version()}; trial kernel loads on {len(devices)} GPUs"

            yield _run_check(f"NVRTC {arch}", compile_cuda, on_gpus)


def _get_arch(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def _check_gpus() -> Iterator[Line]:
    count = count_gpus()
    if not count:
        is_visible = query_nvidia_smi("-L") is not None
        remedy = "nvidia-smi finds GPUs: check CUDA_VISIBLE_DEVICES and the driver's version"
        if not torch.version.cuda:
            remedy = "nvidia-smi finds GPUs, but this torch is CPU only: install torch for CUDA"
        detail = "torch finds none" if is_visible else "none; CPU ranks need none"
        yield build_line("GPUs", not is_visible, detail, remedy, "warn")
        return
    for device in range(count):
        p = torch.cuda.get_device_properties(device)
        detail = f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}, driver "
        remedy = "weft is written for sm_90 and newer; older GPUs are not tested"
        driver_version = read_driver_version() or "unknown"
        yield build_line(f"cuda:{device}", p.major >= 9, detail + driver_version, remedy, "warn")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    denied = [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    remedy = (
        "these pairs cannot share memory: see `nvidia-smi topo -p2p r`; turn off IOMMU/ACS, or "
        "choose other GPUs with CUDA_VISIBLE_DEVICES"
    )
    detail = f"denied: {', '.join(denied)}" if denied else "every pair" if pairs else "one GPU"
    yield build_line("peer access", not denied, detail, remedy)
    if count > 1:
        yield _check_nvlink(query_nvidia_smi("topo", "-m"))
    try:
        load_driver()
    except DriverError:
        return  # reported under software
    unsupported = [f"cuda:{device}" for device in range(count) if not _can_export_memory(device)]
    remedy = "the driver cannot export memory as a file descriptor: update it, or leave the VM"
    detail = f"not on {', '.join(unsupported)}" if unsupported else "every GPU"
    yield build_line("POSIX fd handles", not unsupported, detail, remedy)


def _check_nvlink(topology: str | None) -> Line:
    """Check NVLink between each pair of GPUs in the output of `nvidia-smi topo -m`."""
    rows = [row.split() for row in (topology or "").splitlines() if re.match(r"GPU\d+\s", row)]
    paths = {
        f"{row[0]}-{rows[column][0]}": row[1 + column]
        for row_number, row in enumerate(rows)
        for column in range(row_number)
    }
    if not paths:
        return (
            "NVLink",
            "warn",
            "unknown: no output of nvidia-smi topo -m",
            "run the command yourself",
        )
    slow_pairs = [f"{pair} ({path})" for pair, path in paths.items() if not path.startswith("NV")]
    detail = f"none between {', '.join(slow_pairs)}" if slow_pairs else ", ".join({*paths.values()})
    remedy = "weft runs over PCIe, but much slower than in docs/results/index.md"
    return build_line("NVLink", not slow_pairs, detail, remedy, "warn")


def _can_export_memory(device: int) -> bool:
    """Whether a GPU's memory can be exported as a file descriptor."""
    kinds = load_driver().CUdevice_attribute
    attribute = kinds.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    call_driver("cuInit", 0)
    return bool(call_driver("cuDeviceGetAttribute", attribute, call_driver("cuDeviceGet", device)))


def _check_system() -> Iterator[Line]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    is_sufficient = files == resource.RLIM_INFINITY or files >= MIN_FILES
    remedy = f"ulimit -n {MIN_FILES}: many ranks need more"
    yield build_line("open files", is_sufficient, str(files), remedy, "warn")
    yield _run_check("NVLink domain", _describe_domain, "warn")
    yield _run_check("cache", _describe_cache, "fail")
    yield _run_check("CPU ranks", _launch_two_ranks, "warn" if count_gpus() else "fail")


def _describe_domain() -> str:
    """Return a text with the maximum number of ranks and the hosts that they may span."""
    hosts = "one host"
    if count_gpus():
        if supports_fabric(torch.device("cuda:0")):
            hosts = "all hosts of the NVLink domain"
        else:
            hosts += ": creating fabric handles failed, which needs an IMEX channel"
    return f"up to {MAX_RANKS} ranks, on {hosts}"


def _describe_cache() -> str:
    store = Cache()
    entries = store.entries()
    return f"{store.path}: {len(entries)} entries, {sum(e.bytes for e in entries) / 2**20:.1f} MiB"


def _launch_two_ranks() -> str:
    """Launch two CPU ranks that share memory, as every job does."""
    launch(_share_memory, ranks=2, device="cpu", timeout=60)
    return "two ranks shared memory"


def _share_memory(group: Group) -> None:
    with Heap.create(group, 1 << 20):
        group.barrier()
