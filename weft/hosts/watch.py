"""Watch: the deadline of exchanges on GPUs, whose kernels wait for ever and whom no host waits for.

The stream itself counts an exchange in before it starts and out when it has ended, in host memory,
so a replayed CUDA graph is watched as well as an eager call. A thread compares the two counts.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import torch

INTERVAL = 0.05  # seconds between two looks: what a deadline may be late by


class Watch:
    """Calls `late`, once, when an exchange lasts longer than its limit.

    late: a bound method, held weakly.   timeout, first_timeout: seconds; the second of the `first`
    exchanges.
    """

    def __init__(
        self,
        device: torch.device,
        late: Callable[[], None],
        *,
        timeout: float,
        first_timeout: float,
        first: int,
    ) -> None:
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # begun, ended
        self._seen = torch.zeros(2, dtype=torch.int64).pin_memory()
        self._stop = threading.Event()
        run = threading.Thread(
            target=_look,
            args=(self._seen, weakref.WeakMethod(late), timeout, first_timeout, first, self._stop),
            name="weft-rail",
            daemon=True,
        )
        run.start()
        weakref.finalize(self, self._stop.set).atexit = False

    def begin(self) -> None:
        """Enqueue that an exchange begins."""
        self._count(0)

    def end(self) -> None:
        """Enqueue that it has ended."""
        self._count(1)

    def close(self) -> None:
        """Look no more."""
        self._stop.set()

    def _count(self, place: int) -> None:
        self._counts[place] += 1
        self._seen.copy_(self._counts, non_blocking=True)


def _look(
    seen: torch.Tensor,
    late: weakref.WeakMethod[Callable[[], None]],
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
        elif ended < begun and now - since > (first_timeout if begun <= first else timeout):
            found = late()
            if found is not None:
                found()
            return
