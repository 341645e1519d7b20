# SPDX-License-Identifier: Apache-2.0
"""Plug-ins: each is called, and one that raises is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sglang.srt.plugins.hook_registry import HookRegistry

logger = logging.getLogger(__name__)


def load_plugins(*plugins: Callable[[], None]) -> None:
    """Call them, then apply what they registered."""
    for function in plugins:
        try:
            function()
        except Exception:
            logger.exception("Failed to execute general plugin")
    HookRegistry.apply_hooks()
