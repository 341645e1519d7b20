# SPDX-License-Identifier: Apache-2.0
"""Ranks wait before they touch a GPU: SGLang's plug-in "weft_gate".

SERVER_GATE names a file that is there once it is this server's turn.
Another one with "-waits" after its name says that a process of the server has come to it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path


def register() -> None:
    """Return when it is this server's turn; at once in the launcher, which reads flags first."""
    gate = os.environ.get("SERVER_GATE")
    if not gate or multiprocessing.current_process().name == "MainProcess":
        return
    Path(f"{gate}-waits").touch()
    while not Path(gate).exists():
        time.sleep(0.1)
