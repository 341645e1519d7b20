# SPDX-License-Identifier: Apache-2.0
"""Questions to the store of torch.distributed's default group, each with a limit.

The store may be on a host that is gone, and then answers nobody.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed import distributed_c10d

LIMIT = 1.0  # seconds of one question
_asking: set[threading.Thread] = set()  # that wait for the store


class BoundedStore:
    """The default store. A question without an answer in time is the last that waits."""

    def __init__(self) -> None:
        self._store = distributed_c10d._get_default_store()
        self._is_silent = False

    def set(self, key: str, text: str) -> None:
        """Write a value."""
        self._within(lambda: self._store.set(key, text))

    def set_first(self, key: str, text: str) -> None:
        """Write a value, unless there is one."""
        self._within(lambda: self._store.compare_set(key, "", text))

    def get(self, keys: Sequence[str]) -> list[str] | None:
        """Return the values of keys, "" for one without; None where the store does not answer."""
        values: list[str] = []

        def read() -> None:
            for key in keys:
                values.append(self._store.get(key).decode() if self._store.check([key]) else "")

        self._within(read)
        return values if len(values) == len(keys) else None

    def _within(self, step: Callable[[], object]) -> None:
        if self._is_silent:
            return

        def run() -> None:
            # Without an answer the store is gone: its host may be the one that is.
            with contextlib.suppress(RuntimeError):
                step()
            _asking.discard(thread)

        thread = threading.Thread(target=run, name="weft-store", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread is free: errors name no ranks then, and nothing else
            self._is_silent = True
            return
        _asking.add(thread)
        thread.join(LIMIT)
        self._is_silent = thread.is_alive()


@atexit.register
def _join_threads() -> None:
    """An answer that comes while Python ends aborts the process (up to Python 3.13).

    It comes where the store's process ends, too, which mostly is the same moment.
    """
    until = time.monotonic() + 3 * LIMIT
    for thread in list(_asking):
        thread.join(max(0.0, until - time.monotonic()))
