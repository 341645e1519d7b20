# SPDX-License-Identifier: Apache-2.0
"""The machine and the code that a result was measured with."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

INCLUDE_ROOT = Path(__file__).resolve().parents[2]  # equal to weft.jit.source's
COMMIT = "WEFT_COMMIT"  # environment variable with the commit, for code without its .git


def describe_code() -> dict[str, Any]:
    """Return version, commit and the sha256 of the kernels' headers, as JSON values.

    The commit is WEFT_COMMIT, or that of the checkout of this package, with "-dirty" if tracked
    files differ, or None.
    """
    from weft import __version__
    from weft.jit.source import header_digest  # needs torch; the doctor's report must not

    commit = os.environ.get(COMMIT) or _commit_of(INCLUDE_ROOT)
    return {"version": __version__, "commit": commit, "headers": header_digest()}


def _commit_of(root: Path) -> str | None:
    """Return the commit of a checkout with top-level folder `root`, or None.

    A package that is installed inside another project's checkout has no commit.
    """
    top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return None
    describe = ("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    return _output("git", "-C", str(root), *describe)


def _output(*command: str) -> str | None:
    """Return a program's output, or None if it is absent, fails, hangs or prints nothing."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def describe_machine(gpus: list[str]) -> dict[str, Any]:
    """Return names and versions of the machine and the code, as JSON values.

    `gpus` are the ranks' GPU names, empty for CPU ranks.
    """
    import torch  # not needed for the doctor's report

    return {
        "weft": describe_code(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpus": gpus,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """Return the machine and the code in one line, for captions."""
    day = str(machine["date"])[:10]
    if "weft" in machine:  # absent in records of old versions
        day = f"{_code_line(machine['weft'])}, {day}"
    names: list[str] = machine["gpus"]
    if names:
        counted = ", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))
        driver = f"driver {machine['driver'] or 'unknown'}, CUDA {machine['cuda']}"
        return f"{counted}, {driver}, torch {machine['torch']}, {day}"
    return f"CPU ranks on {machine['cpus']} x {machine['cpu']}, torch {machine['torch']}, {day}"


def _code_line(code: dict[str, Any]) -> str:
    """Return the version, with the abbreviated commit if known."""
    commit, dash, dirty = str(code["commit"] or "").partition("-")
    return f"weft {code['version']}" + (f" {commit[:12]}{dash}{dirty}" if commit else "")


def driver_version() -> str | None:
    """Return the NVIDIA driver's version from nvidia-smi, or None."""
    text = ask_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0].strip() if text else None


def ask_nvidia_smi(*arguments: str) -> str | None:
    """Return the output of nvidia-smi, or None if it is absent, fails or hangs."""
    return _output("nvidia-smi", *arguments)


def cpu_name() -> str:
    """Return the CPU's model, or its architecture if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
