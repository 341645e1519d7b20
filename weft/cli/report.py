# SPDX-License-Identifier: Apache-2.0
"""Bug reports of `weft doctor --report`, which do not need torch.

A report contains no private names. It has only the environment variables of a fixed list, with
private values masked, and the names of user, host and home directory are replaced in every text.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
from pathlib import Path
from typing import Any

from weft import __version__
from weft.bench.machine import describe_code, query_nvidia_smi, read_cpu_name
from weft.cli.findings import Finding, find_torch_error
from weft.errors import InvalidArgument

# All variables that weft or its dependencies read, as in docs/user/environment.md.
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CXX", "GLOO_SOCKET_IFNAME", "LD_LIBRARY_PATH", "LOCAL_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "NVSHMEM_QP_DEPTH", "RANK", "TMPDIR"),
    *("WEFT_CACHE", "WEFT_COMMIT", "WEFT_DEBUG", "WEFT_HOST", "WEFT_LOG"),
    *("WEFT_SGLANG_COMBINE_DTYPE", "WEFT_SGLANG_DECODE"),
    *("WEFT_SGLANG_FORM", "WEFT_SGLANG_OVERLAP", "WEFT_SGLANG_PREFILL_TOKENS"),
    *("WEFT_SGLANG_ALLREDUCE", "WEFT_SGLANG_TIMEOUT", "WEFT_VLLM", "WEFT_VLLM_ALLREDUCE"),
    *("WEFT_VLLM_COMBINE_DTYPE", "WEFT_VLLM_DECODE", "WEFT_VLLM_OVERLAP"),
    *("WEFT_VLLM_PREFILL_TOKENS", "WEFT_VLLM_TIMEOUT", "WORLD_SIZE", "XDG_CACHE_HOME"),
)
MASKED = ("MASTER_ADDR",)  # usually a host name
PACKAGE_PATTERN = re.compile(
    r"cuda[-_]|nvidia[-_]|(torch|triton|numpy|sglang|vllm|transformers|flashinfer.*|deep[-_]ep)$"
)


def build_report(findings: list[Finding]) -> dict[str, Any]:
    """Build a bug report as JSON values: section -> name -> value."""
    topology = query_nvidia_smi("topo", "-m") or "none"
    packages = {
        distribution.metadata["Name"]: distribution.version
        for distribution in importlib.metadata.distributions()
        if PACKAGE_PATTERN.match(distribution.metadata["Name"].lower())
    }
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    sections = {
        "weft": describe_code() if find_torch_error() is None else {"version": __version__},
        "packages": dict(sorted(packages.items())),
        "system": {
            "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
            "libc": " ".join(platform.libc_ver()),
            "cpu": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} x {read_cpu_name()}",
            "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') >> 20} MiB",
            "memory of the control group": _read_text("/sys/fs/cgroup/memory.max"),
            "/dev/shm": f"{shared.free >> 20} of {shared.total >> 20} MiB free" if shared else "",
            "ptrace_scope": _read_text("/proc/sys/kernel/yama/ptrace_scope"),
            "container": str(any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))),
            "links": re.sub(r"\x1b\[[0-9;]*m", "", topology).partition("\nLegend")[0].rstrip(),
        },
        "environment": {
            name: "(set)" if name in MASKED else os.environ[name]
            for name in VARIABLES
            if name in os.environ
        },
        "findings": {
            finding.name: f"{finding.status}  {finding.detail}"
            + (finding.remedy and f" -> {finding.remedy}")
            for finding in findings
        },
    }
    patterns = _build_redactions()
    return {
        section: {name: _redact(value, patterns) for name, value in values.items()}
        for section, values in sections.items()
    }


def write_report(path: str, findings: list[Finding], *, as_json: bool) -> None:
    """Write the report to a file, or to stdout if `path` is "-". JSON if `path` ends in .json.

    Raises InvalidArgument if the file cannot be written.
    """
    sections = build_report(findings)
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


def _read_text(path: str) -> str:
    return Path(path).read_text().strip() if os.path.exists(path) else "unknown"


def _build_redactions() -> dict[str, str]:
    """Build patterns of private names and their replacements, the longest first."""
    home, host = os.path.expanduser("~"), socket.gethostname()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user has no name
        user = ""
    patterns = {re.escape(path): "~" for path in {home, os.path.realpath(home)} - {"/"}}
    names = {user: "(user)", host: "(host)", host.partition(".")[0]: "(host)"}
    for name, replacement in names.items():  # as whole words; "root" is not private
        if name not in ("", "root", "localhost"):
            patterns[rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"] = replacement
    return dict(sorted(patterns.items(), key=lambda item: -len(item[0])))


def _redact(value: Any, patterns: dict[str, str]) -> Any:
    if isinstance(value, str):
        for pattern, replacement in patterns.items():
            value = re.sub(pattern, replacement, value, flags=re.IGNORECASE)
    return value
