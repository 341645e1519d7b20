"""Groups of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.runtime_context import STATE


def get_moe_ep_group() -> Any:
    return SimpleNamespace(cpu_group=STATE.processes)
