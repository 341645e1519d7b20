"""What a bug report should hold: versions, machine, limits, environment, cache, tables, findings.

No user name, host name, home directory or secret is in it: variables are shown by a list, secrets
among them masked, and every text is searched for the others before it leaves.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import ipaddress
import json
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from weft.bench.machine import ask_nvidia_smi, cpu_name, describe_code, driver_version
from weft.cli.doctor import Finding
from weft.errors import InvalidArgument, WeftError
from weft.jit.cache import Cache

# Every variable that weft reads, or what it stands on reads for it: docs/environment.md.
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CXX", "GLOO_SOCKET_IFNAME", "LD_LIBRARY_PATH", "LOCAL_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "NVSHMEM_QP_DEPTH", "RANK", "TMPDIR"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "WEFT_CACHE", "WEFT_COMMIT"),
    *("WEFT_LOG", "WEFT_SECRET", "WEFT_SGLANG_COMBINE_DTYPE", "WEFT_SGLANG_DECODE"),
    *("WEFT_SGLANG_FORM", "WEFT_SGLANG_OVERLAP", "WEFT_SGLANG_PREFILL_TOKENS"),
    *("WEFT_SGLANG_ALLREDUCE", "WEFT_SGLANG_TIMEOUT", "WORLD_SIZE", "XDG_CACHE_HOME"),
)
_SECRETS = ("WEFT_SECRET",)
_ADDRESSES = ("MASTER_ADDR",)  # host names, mostly
_PACKAGES = re.compile(
    r"cuda[-_]|nvidia[-_]|(torch|triton|numpy|sglang|vllm|transformers|flashinfer.*|deep[-_]ep)$"
)
_LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "address space": resource.RLIMIT_AS,
    "processes": resource.RLIMIT_NPROC,
    "core file": resource.RLIMIT_CORE,
}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def report(findings: Iterable[Finding]) -> dict[str, Any]:
    """Everything a bug report needs, as JSON values: section -> name -> value.

    findings: of `weft.cli.doctor.examine`.
    """
    sections: dict[str, Any] = {
        "weft": describe_code(),
        "versions": _versions(),
        "system": _system(),
        "GPUs": _gpus(),
        "limits": _limits(),
        "environment": _environment(),
        "cache": _cache(),
        "findings": [asdict(finding) for finding in findings],
    }
    report: dict[str, Any] = _without(sections, _private_words())
    return report


def text(sections: dict[str, Any]) -> str:
    """A report to read: a heading for each section, a line for each value."""
    lines = []
    for title, values in sections.items():
        lines.append(f"{title}:")
        if title == "findings":
            for each in values:
                mend = f" -> {each['remedy']}" if each["remedy"] else ""
                lines.append(f"  {each['status']:4}  {each['name']}: {each['detail']}{mend}")
            continue
        for name, value in values.items():
            shown = str(value).rstrip()
            gap = "\n    " if "\n" in shown else " "
            lines.append(f"  {name}:{gap}" + shown.replace("\n", "\n    "))
    return "\n".join(lines) + "\n"


def write(path: str, findings: Iterable[Finding], *, as_json: bool) -> None:
    """Write the report to a file, or to stdout for "-". A file that ends in .json holds JSON.

    Raises InvalidArgument where the file cannot be written.
    """
    sections = report(findings)
    as_json = as_json or path.endswith(".json")
    shown = json.dumps(sections, indent=1) + "\n" if as_json else text(sections)
    if path == "-":
        print(shown, end="")
        return
    try:
        Path(path).write_text(shown)
    except OSError as error:
        raise InvalidArgument(f"cannot write the report to {path}: {error.strerror}") from error


def _versions() -> dict[str, str]:
    packages = {
        each.metadata["Name"]: each.version
        for each in importlib.metadata.distributions()
        if _PACKAGES.match(each.metadata["Name"].lower())
    }
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"  # type: ignore[no-untyped-call]
    return {
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "CUDA of torch": torch.version.cuda or "none",
        "NCCL of torch": nccl,
        "NVIDIA driver": driver_version() or "none",
        **dict(sorted(packages.items())),
    }


def _system() -> dict[str, Any]:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        name = "unknown"
    return {
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "distribution": name,
        "cpu": f"{os.cpu_count()} x {cpu_name()}, {len(os.sched_getaffinity(0))} for this process",
        "memory": _lines("/proc/meminfo", ("MemTotal", "MemAvailable", "SwapFree")),
        "process": _lines("/proc/self/status", ("NoNewPrivs", "Seccomp", "CapEff")),
        "container": ", ".join(_container()) or "no sign of one",
    }


def _container() -> list[str]:
    """What shows that this process runs in one."""
    found = [name for name in ("/.dockerenv", "/run/.containerenv") if os.path.exists(name)]
    if _read("/proc/1/sched").split(" ")[0] not in ("systemd", "init", ""):
        found.append("process 1 is no init")
    return found


def _gpus() -> dict[str, Any]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found: dict[str, Any] = {"count": count}
    for device in range(count):
        p = torch.cuda.get_device_properties(device)
        found[f"cuda:{device}"] = f"{p.name}, {p.total_memory} bytes, sm_{p.major}{p.minor}"
    topology = ask_nvidia_smi("topo", "-m")
    if topology is not None:
        found["links"] = _ESCAPE.sub("", topology).partition("\nLegend")[0].rstrip()
    return found


def _limits() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, limit in _LIMITS.items():
        now, most = ("unlimited" if n == -1 else n for n in resource.getrlimit(limit))
        found[name] = f"{now}, at most {most}"
    for name, folder in (("/dev/shm", "/dev/shm"), ("TMPDIR", tempfile.gettempdir())):
        try:
            usage = shutil.disk_usage(folder)
            found[name] = f"{usage.total} bytes, {usage.free} free"
        except OSError as error:
            found[name] = error.strerror or str(error)
    found["memory of the control group"] = _read("/sys/fs/cgroup/memory.max") or "no limit found"
    found["overcommit"] = _read("/proc/sys/vm/overcommit_memory") or "unknown"
    found["ptrace_scope"] = _read("/proc/sys/kernel/yama/ptrace_scope") or "none"
    return found


def _environment() -> dict[str, str]:
    return {name: _shown(name, os.environ[name]) for name in VARIABLES if name in os.environ}


def _shown(name: str, value: str) -> str:
    if name in _SECRETS:
        return "(set)" if value else "(empty)"
    if name in _ADDRESSES and not _is_loopback(value):
        return "(set, no loopback address)"
    return value


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _cache() -> dict[str, Any]:
    try:
        store = Cache()
    except (WeftError, OSError) as error:
        return {"unusable": str(error)}
    entries = store.entries()
    size = sum(entry.bytes for entry in entries)
    return {"path": str(store.path), "entries": len(entries), "bytes": size}


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _lines(path: str, names: tuple[str, ...]) -> str:
    """Those lines of a file in /proc, in one."""
    pairs = (line.split(":", 1) for line in _read(path).splitlines() if ":" in line)
    return ", ".join(f"{name} {' '.join(value.split())}" for name, value in pairs if name in names)


def _private_words() -> dict[re.Pattern[str], str]:
    """What must not be printed -> what is printed instead."""
    homes = {os.environ.get("HOME", ""), os.path.expanduser("~")}
    homes |= {os.path.realpath(home) for home in homes if home}
    users = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        users.add(getpass.getuser())
    host = socket.gethostname()
    hosts = {host, host.partition(".")[0]}
    words = {re.escape(os.environ.get(name, "")): "(secret)" for name in _SECRETS}
    words |= {re.escape(home): "~" for home in homes - {"/"}}
    # Names may be parts of words that mean something else, and root is nobody's.
    edges = "(?<![A-Za-z0-9])", "(?![A-Za-z0-9])"
    words |= {re.escape(user).join(edges): "(user)" for user in users - {"", "root"}}
    words |= {re.escape(each).join(edges): "(host)" for each in hosts - {"", "localhost"}}
    longest = sorted(filter(None, words), key=len, reverse=True)
    return {re.compile(word, re.IGNORECASE): words[word] for word in longest}


def _without(value: Any, words: dict[re.Pattern[str], str]) -> Any:
    """`value` with private words replaced in every text; names of values are weft's own."""
    if isinstance(value, dict):
        return {name: _without(each, words) for name, each in value.items()}
    if isinstance(value, list):
        return [_without(each, words) for each in value]
    if isinstance(value, str):
        for word, instead in words.items():
            value = word.sub(instead, value)
    return value
