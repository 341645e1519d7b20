# SPDX-License-Identifier: Apache-2.0
"""Deadline of the exchanges between hosts, and the poll for errors elsewhere.

A thread compares two counters: exchanges begun, and exchanges ended. On CPUs the caller increments
them before and after its wait. On GPUs the kernels would wait forever and no host thread waits for
them, so the stream increments the counters in host memory. Replays of CUDA graphs are therefore
watched like eager calls.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import torch

from weft.group.torch_groups import STORE_SECONDS

INTERVAL = 0.1  # seconds between two polls; an error may be reported this much after its deadline

# Function of the limit in seconds of an overdue exchange, else None. Returns True to stop polling.
Poll = Callable[[float | None], bool]


class Watch:
    """Calls `poll` in every interval in which the same exchange is in progress.

    Args:
        device: Device of the rank.
        poll: A bound method, held weakly.
        timeout: Limit of an exchange in seconds.
        first_timeout: Limit of the first exchanges in seconds.
        num_first: Number of first exchanges.
    """

    def __init__(
        self,
        device: torch.device,
        poll: Poll,
        *,
        timeout: float,
        first_timeout: float,
        num_first: int,
    ) -> None:
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # begun, ended
        self._host_counts = self._counts
        if device.type == "cuda":
            self._host_counts = torch.zeros(2, dtype=torch.int64).pin_memory()
        self._stop = threading.Event()
        limits = (timeout, first_timeout, num_first)
        self._thread = threading.Thread(
            target=poll_until,
            args=(self._stop, self._host_counts, weakref.WeakMethod(poll), *limits),
            name="weft-rail",
            daemon=True,
        )
        self._thread.start()
        weakref.finalize(self, self._stop.set).atexit = False

    def begin(self) -> None:
        """Count an exchange as begun, in stream order."""
        self._increment(0)

    def end(self) -> None:
        """Count an exchange as ended, in stream order."""
        self._increment(1)

    def close(self) -> None:
        """Stop polling and join the thread, so that it does not run during interpreter shutdown."""
        self._stop.set()
        self._thread.join(3 * STORE_SECONDS)

    def _increment(self, index: int) -> None:
        self._counts[index] += 1
        if self._host_counts is not self._counts:
            self._host_counts.copy_(self._counts, non_blocking=True)


def poll_until(
    stop: threading.Event,
    counts: torch.Tensor,
    poll: weakref.WeakMethod[Poll],
    timeout: float,
    first_timeout: float,
    num_first: int,
) -> None:
    """Poll until `stop` is set, `poll` returns True or its object has been collected.

    Args:
        stop: Ends the polling.
        counts: Exchanges begun and ended.
        poll: As in `Watch`.
        timeout: As in `Watch`.
        first_timeout: As in `Watch`.
        num_first: As in `Watch`.
    """
    current, since = 0, 0.0
    while not stop.wait(INTERVAL):
        begun, ended = counts.tolist()
        now = time.monotonic()
        if begun != current:
            current, since = begun, now
        elif ended < begun:
            limit, call = first_timeout if begun <= num_first else timeout, poll()
            if call is None or call(limit if now - since > limit else None):
                return
