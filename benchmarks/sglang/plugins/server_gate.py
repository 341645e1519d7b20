# SPDX-License-Identifier: Apache-2.0
"""SGLang's plug-in "weft_gate": ranks wait before they use a GPU.

SERVER_GATE names a file that appears when it is this server's turn. The server creates the file
with "-waits" appended once a process of it waits.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path


def register() -> None:
    """Wait for this server's turn, except in the launcher, which parses flags first."""
    gate = os.environ.get("SERVER_GATE")
    if not gate or multiprocessing.current_process().name == "MainProcess":
        return
    Path(f"{gate}-waits").touch()
    while not Path(gate).exists():
        time.sleep(0.1)
