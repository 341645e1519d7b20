# SPDX-License-Identifier: Apache-2.0
"""What a process holds, and what a call raised and when: for counting before and after."""

import gc
import os
import time


def shares_mapped():
    """Mappings of heaps."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum("weft-share" in line for line in file)


def state():
    """Descriptors, mapped shares and all mappings of this process."""
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as file:
        return len(os.listdir("/proc/self/fd")), shares_mapped(), len(file.readlines())


def raised(call, *args, **options):
    """[the error's name or "nothing", its text, seconds]; a list, for control messages."""
    started = time.monotonic()
    try:
        call(*args, **options)
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - started]
    return ["nothing", "", time.monotonic() - started]
