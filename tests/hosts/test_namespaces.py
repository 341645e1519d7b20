# SPDX-License-Identifier: Apache-2.0
"""Network namespaces that simulate hosts are removed completely."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from weft.cli.namespaces import Namespaces, can_create_namespaces, run_ip

MAKES = """
import os, signal
from weft.cli.namespaces import Namespaces
Namespaces(1).__enter__()
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not can_create_namespaces(), reason="no network namespaces here")
def test_namespaces_of_a_killed_process_are_removed_later() -> None:
    killed = subprocess.run([sys.executable, "-c", MAKES], capture_output=True, text=True)
    left = f"weft-{int(killed.stdout)}-"
    assert left in run_ip("netns", "list")
    with Namespaces(2):
        assert left not in run_ip("netns", "list")
        assert f"weft-{os.getpid()}-1" in run_ip("netns", "list")
    assert f"weft-{os.getpid()}-" not in run_ip("netns", "list")
