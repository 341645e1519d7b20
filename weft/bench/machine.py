"""What a figure was measured on: without it a figure means nothing."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from weft.errors import InvalidArgument


def describe_machine(gpus: list[str]) -> dict[str, Any]:
    """Return names and versions as JSON. gpus: name of each rank's GPU; empty for CPU ranks."""
    return {
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
    """Return the machine in one line, for captions."""
    day = str(machine["date"])[:10]
    names: list[str] = machine["gpus"]
    if names:
        counted = ", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))
        driver = f"driver {machine['driver'] or 'unknown'}, CUDA {machine['cuda']}"
        return f"{counted}, {driver}, torch {machine['torch']}, {day}"
    return f"CPU ranks on {machine['cpus']} x {machine['cpu']}, torch {machine['torch']}, {day}"


def measured_on(machine: dict[str, Any]) -> tuple[str, str, str]:
    """(name of the GPU, "" for CPU ranks; date; the rest in words), as tables of times keep them.

    Raises InvalidArgument where GPUs of several kinds took part.
    """
    names = sorted(set(machine["gpus"]))
    if len(names) > 1:
        raise InvalidArgument(
            f"GPUs of several kinds take part: {', '.join(names)}; a table is of one kind: choose "
            "them with CUDA_VISIBLE_DEVICES"
        )
    date = str(machine["date"])[:10]
    return names[0] if names else "", date, machine_line(machine).removesuffix(f", {date}")


def driver_version() -> str | None:
    """Return the NVIDIA driver's version as nvidia-smi tells it, or None."""
    text = ask_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0].strip() if text else None


def ask_nvidia_smi(*arguments: str) -> str | None:
    """Return what nvidia-smi prints, or None where it is absent, fails or hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        result = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 and result.stdout.strip() else None


def cpu_name() -> str:
    """Return the CPU's model, or at least its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
