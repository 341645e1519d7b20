# SPDX-License-Identifier: Apache-2.0
"""Helpers for resource tests: handles that a process holds, errors of a call, killed ranks."""

import contextlib
import functools
import gc
import os
import re
import signal
import time
from pathlib import Path

import pytest

NESTED = functools.reduce(lambda inner, _: [inner], range(100_000), list[object]())


def shares_mapped():
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum("weft-share" in line for line in file)


def open_files():
    """Return the number of descriptors, without those that serve `weft top` of any process."""
    gc.collect()
    status = re.findall(rb"(\d+) @weft-status-", Path("/proc/net/unix").read_bytes())
    targets = (_link_target(fd) for fd in os.listdir("/proc/self/fd"))
    return len([target for target in targets if target not in status])


def _link_target(fd):
    """Return the inode of a socket's descriptor, the target of another one's link."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").rstrip("]").encode()
    except FileNotFoundError:  # closed since
        return b""


def resource_counts():
    """Return the numbers of descriptors, mapped shares and all mappings of this process."""
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as file:
        return open_files(), shares_mapped(), len(file.readlines())


def inaccessible_mappings():
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum(line.split()[1] == "---p" for line in file)


def call_outcome(call, *args, **options):
    """Call a function and return [error name or "nothing", error text, seconds] as JSON values."""
    started = time.monotonic()
    try:
        call(*args, **options)
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - started]
    return ["nothing", "", time.monotonic() - started]


@contextlib.contextmanager
def raises_soon(kind, text, seconds=100.0):
    """Like `pytest.raises`, but the error must come well before a deadline."""
    started = time.monotonic()
    with pytest.raises(kind, match=text) as caught:
        yield caught
    assert time.monotonic() - started < seconds


def die():
    os.kill(os.getpid(), signal.SIGKILL)
