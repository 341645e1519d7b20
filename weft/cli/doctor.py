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
from weft.cli.findings import Finding, Line, Status, basic_lines, line
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
MIN_FILES = 1024  # open files: sockets and handles of 72 ranks, and torch's own


def examine() -> list[Finding]:
    """Run all checks. "fail" means that ranks on this machine's devices will not run."""
    findings: list[Finding] = []
    for section, run in (("software", _software), ("GPUs", _gpus), ("system", _system)):
        try:  # findings before a failure are kept
            findings.extend(Finding(section, *each) for each in run())
        except Exception as error:  # the doctor must report broken installations, not crash
            text = f"{type(error).__name__}: {error}"
            findings.append(Finding(section, "examination", "fail", text, "report this text"))
    return findings


def _try(name: str, attempt: Callable[[], str], bad: Status) -> Line:
    """Return the result of running `attempt`. weft's own errors name their remedy."""
    try:
        return name, "ok", attempt(), ""
    except (WeftError, OSError, RuntimeError) as error:  # torch raises RuntimeError
        return name, bad, str(error), ""


def gpu_count() -> int:
    """Return the number of GPUs that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def devices() -> str:
    """Return the devices that ranks would run on, for the verdict."""
    return f"{gpu_count()} GPUs" if gpu_count() else "CPU ranks"


def _software() -> Iterator[Line]:
    on_gpus: Status = "fail" if gpu_count() else "warn"
    yield from basic_lines()
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    detail = f"{torch.__version__}, built for CUDA {torch.version.cuda or '(none)'}"
    enough = version >= GPU_TORCH or not gpu_count()  # `import weft` refuses versions without GPUs
    yield line("torch", enough, detail, "GPU ranks: pip install 'torch>=2.11'")
    try:
        yield "cuda-bindings", "ok", importlib.metadata.version("cuda-bindings"), ""
    except importlib.metadata.PackageNotFoundError:
        yield "cuda-bindings", on_gpus, "not installed", install_hint("gpu")
    with tempfile.TemporaryDirectory(prefix="weft-doctor-") as scratch:
        trial = Cache(Path(scratch, "cache"))

        def compile_cpp() -> str:
            identity = compiler_identity(find_compiler())
            entry = 'extern "C" int weft_doctor() { return 42; }'
            answer = compile_shared(entry, name="doctor", cache=trial).weft_doctor()
            return f"{identity}; trial code answers {answer}"

        # CPU ranks need a compiler; a machine with GPUs runs without CPU ranks.
        yield _try("C++ compiler", compile_cpp, "warn" if gpu_count() else "fail")
        for arch in sorted({"sm_90a", *map(_arch, range(gpu_count()))}):

            def compile_cuda(arch: str = arch) -> str:
                entry = 'extern "C" __global__ void weft_doctor(int* p) { *p = 42; }'
                cubin = compile_cubin(entry, name="doctor", arch=arch, cache=trial)
                devices = [device for device in range(gpu_count()) if _arch(device) == arch]
                for device in devices:  # an old driver refuses NVRTC's code only at load time
                    with torch.cuda.device(device):
                        torch.cuda.synchronize()  # creates the context for the module
                        CudaModule(cubin, name=f"trial kernel on cuda:{device}").unload()
                return f"{nvrtc_version()}; trial kernel loads on {len(devices)} GPUs"

            yield _try(f"NVRTC {arch}", compile_cuda, on_gpus)


def _arch(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def _gpus() -> Iterator[Line]:
    count = gpu_count()
    if not count:
        seen = query_nvidia_smi("-L") is not None
        remedy = "nvidia-smi sees GPUs: check CUDA_VISIBLE_DEVICES and the driver's version"
        if not torch.version.cuda:
            remedy = "nvidia-smi sees GPUs, but this torch is CPU only: install torch for CUDA"
        detail = "torch sees none" if seen else "none; CPU ranks need none"
        yield line("GPUs", not seen, detail, remedy, "warn")
        return
    for device in range(count):
        p = torch.cuda.get_device_properties(device)
        detail = f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}, driver "
        remedy = "weft is written for sm_90 and newer; older GPUs are not tested"
        known = read_driver_version() or "unknown"
        yield line(f"cuda:{device}", p.major >= 9, detail + known, remedy, "warn")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    denied = [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    remedy = (
        "these pairs cannot share memory: see `nvidia-smi topo -p2p r`; turn off IOMMU/ACS, or "
        "choose other GPUs with CUDA_VISIBLE_DEVICES"
    )
    detail = f"denied: {', '.join(denied)}" if denied else "every pair" if pairs else "one GPU"
    yield line("peer access", not denied, detail, remedy)
    if count > 1:
        yield _nvlink(query_nvidia_smi("topo", "-m"))
    try:
        load_driver()
    except DriverError:
        return  # reported under software
    without = [f"cuda:{device}" for device in range(count) if not _exports(device)]
    remedy = "the driver cannot export memory as a file descriptor: update it, or leave the VM"
    detail = f"not on {', '.join(without)}" if without else "every GPU"
    yield line("POSIX fd handles", not without, detail, remedy)


def _nvlink(topology: str | None) -> Line:
    """Check for NVLink between every two GPUs in the output of `nvidia-smi topo -m`."""
    rows = [row.split() for row in (topology or "").splitlines() if re.match(r"GPU\d+\s", row)]
    paths = {
        f"{row[0]}-{rows[place][0]}": row[1 + place]
        for number, row in enumerate(rows)
        for place in range(number)
    }
    if not paths:
        return "NVLink", "warn", "unknown: nvidia-smi topo -m does not say", "run it by hand"
    others = [f"{pair} ({path})" for pair, path in paths.items() if not path.startswith("NV")]
    detail = f"none between {', '.join(others)}" if others else ", ".join({*paths.values()})
    remedy = "weft works over PCIe, far below the speeds in docs/results/index.md"
    return line("NVLink", not others, detail, remedy, "warn")


def _exports(device: int) -> bool:
    """Whether a GPU's memory can be exported as a file descriptor."""
    kinds = load_driver().CUdevice_attribute
    attribute = kinds.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    call_driver("cuInit", 0)
    return bool(call_driver("cuDeviceGetAttribute", attribute, call_driver("cuDeviceGet", device)))


def _system() -> Iterator[Line]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = files == resource.RLIM_INFINITY or files >= MIN_FILES
    remedy = f"ulimit -n {MIN_FILES}: many ranks need more"
    yield line("open files", enough, str(files), remedy, "warn")
    yield _try("NVLink domain", _domain, "warn")
    yield _try("cache", _cache, "fail")
    yield _try("CPU ranks", _two_ranks, "warn" if gpu_count() else "fail")


def _domain() -> str:
    """Report the hosts that fabric handles reach. Not every GPU and machine supports them."""
    reach = "one host"
    if gpu_count():
        if supports_fabric(torch.device("cuda:0")):
            reach = "all hosts that it joins"
        else:
            reach += ": no fabric handle can be created here, which needs an IMEX channel"
    return f"up to {MAX_RANKS} ranks, of {reach}"


def _cache() -> str:
    store = Cache()
    entries = store.entries()
    return f"{store.path}: {len(entries)} entries, {sum(e.bytes for e in entries) / 2**20:.1f} MiB"


def _two_ranks() -> str:
    """Start two ranks that meet and share sealed memory, as every job does."""
    launch(_share, ranks=2, device="cpu", timeout=60)
    return "two met and shared memory"


def _share(group: Group) -> None:
    with Heap.create(group, 1 << 20):
        group.barrier()
