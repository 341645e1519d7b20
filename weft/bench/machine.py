# SPDX-License-Identifier: Apache-2.0
"""Description of the machine and the code of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

INCLUDE_ROOT = Path(__file__).resolve().parents[2]  # equal to weft.jit.source's
COMMIT = "WEFT_COMMIT"  # environment variable with the commit, for code outside of a checkout


def describe_code() -> dict[str, Any]:
    """Return the version, the commit and the sha256 of the kernel headers as JSON values.

    The commit is WEFT_COMMIT or, in a checkout, its commit with "-dirty" if tracked files differ;
    otherwise None.
    """
    from weft import __version__
    from weft.jit.source import header_digest  # imports torch, which `weft doctor` must not need

    commit = os.environ.get(COMMIT) or _read_commit(INCLUDE_ROOT)
    return {"version": __version__, "commit": commit, "headers": header_digest()}


def _read_commit(root: Path) -> str | None:
    """Return the commit of the checkout whose top-level folder is `root`, or None.

    A package that is installed inside another project's checkout has no commit.
    """
    top = _run_command("git", "-C", str(root), "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return None
    describe = ("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    return _run_command("git", "-C", str(root), *describe)


def _run_command(*command: str) -> str | None:
    """Return the output of a command; None if it is missing, fails, times out or prints nothing."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def describe_machine(gpus: list[str]) -> dict[str, Any]:
    """Return the names and versions of the hardware, the software and the code as JSON values.

    `gpus` are the ranks' GPU names, empty for CPU ranks.
    """
    import torch  # `weft doctor` imports this module without torch

    return {
        "weft": describe_code(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpus": gpus,
        "driver": read_driver_version(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": read_cpu_name(),
        "cpus": os.cpu_count(),
    }


def format_machine(machine: dict[str, Any]) -> str:
    """Format the result of `describe_machine` in one line."""
    day = str(machine["date"])[:10]
    if "weft" in machine:  # missing in old results
        day = f"{_format_code(machine['weft'])}, {day}"
    names: list[str] = machine["gpus"]
    if names:
        gpus = ", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))
        driver = f"driver {machine['driver'] or 'unknown'}, CUDA {machine['cuda']}"
        return f"{gpus}, {driver}, torch {machine['torch']}, {day}"
    return f"CPU ranks on {machine['cpus']} x {machine['cpu']}, torch {machine['torch']}, {day}"


def _format_code(code: dict[str, Any]) -> str:
    """Format the version and, if known, the abbreviated commit."""
    commit, dash, dirty = str(code["commit"] or "").partition("-")
    return f"weft {code['version']}" + (f" {commit[:12]}{dash}{dirty}" if commit else "")


def read_driver_version() -> str | None:
    """Read the version of the NVIDIA driver from nvidia-smi; None if unknown."""
    text = query_nvidia_smi("--query-gpu=read_driver_version", "--format=csv,noheader")
    return text.splitlines()[0].strip() if text else None


def query_nvidia_smi(*arguments: str) -> str | None:
    """Return the output of nvidia-smi; None if it is missing, fails or times out."""
    return _run_command("nvidia-smi", *arguments)


def read_cpu_name() -> str:
    """Read the CPU model name; the architecture if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
