# SPDX-License-Identifier: Apache-2.0
"""Watch: ends exchanges that are overdue, or that wait for a rank which an error elsewhere stopped.

A thread compares two counts: of exchanges that have begun, and of those that have ended. On CPUs
the caller counts, before and after it waits. On GPUs the kernels would wait for ever and no host
thread waits for them, so the stream itself counts, in host memory, before an exchange starts and
when it has ended: a replayed CUDA graph is watched as well as an eager call.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import torch

from weft.group.torch_groups import STORE_SECONDS

INTERVAL = 0.1  # seconds between two looks: what a deadline may be late by

# Given the limit in seconds of an exchange that has overrun it, else None. True: look no more.
Look = Callable[[float | None], bool]


class Watch:
    """Calls `look` at every interval in which the same exchange is still under way.

    look: a bound method, held weakly.   timeout, first_timeout: limits in seconds; the second of
    the `first` exchanges.
    """

    def __init__(
        self,
        device: torch.device,
        look: Look,
        *,
        timeout: float,
        first_timeout: float,
        first: int,
    ) -> None:
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # begun, ended
        self._seen = self._counts
        if device.type == "cuda":
            self._seen = torch.zeros(2, dtype=torch.int64).pin_memory()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_watch,
            args=(self._seen, weakref.WeakMethod(look), timeout, first_timeout, first, self._stop),
            name="weft-rail",
            daemon=True,
        )
        self._thread.start()
        weakref.finalize(self, self._stop.set).atexit = False

    def begin(self) -> None:
        """Enqueue that an exchange begins."""
        self._count(0)

    def end(self) -> None:
        """Enqueue that it has ended."""
        self._count(1)

    def close(self) -> None:
        """Look no more, and wait for a look that is under way: Python must not end meanwhile."""
        self._stop.set()
        self._thread.join(3 * STORE_SECONDS)

    def _count(self, place: int) -> None:
        self._counts[place] += 1
        if self._seen is not self._counts:
            self._seen.copy_(self._counts, non_blocking=True)


def _watch(
    seen: torch.Tensor,
    look: weakref.WeakMethod[Look],
    timeout: float,
    first_timeout: float,
    first: int,
    stop: threading.Event,
) -> None:
    under_way, since = 0, 0.0
    while not stop.wait(INTERVAL):
        begun, ended = seen.tolist()
        now = time.monotonic()
        if begun != under_way:
            under_way, since = begun, now
        elif ended < begun:
            limit, found = first_timeout if begun <= first else timeout, look()
            if found is None or found(limit if now - since > limit else None):
                return
