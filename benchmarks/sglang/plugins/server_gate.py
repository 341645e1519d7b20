"""Ranks wait before they touch a GPU: SGLang's plug-in "weft_gate".

SERVER_GATE names a file that is there once it is this server's turn.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path


def register() -> None:
    """Return when it is this server's turn; at once in the launcher, which reads flags first."""
    gate = os.environ.get("SERVER_GATE")
    while (
        gate and multiprocessing.current_process().name != "MainProcess" and not Path(gate).exists()
    ):
        time.sleep(0.1)
