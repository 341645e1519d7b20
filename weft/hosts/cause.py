# SPDX-License-Identifier: Apache-2.0
"""Which error came first: between hosts a rank that leaves for it can tell nobody but the store.

Ranks of other hosts ask while they wait. The store is that of torch.distributed's default group. It
may be on the host that is gone, and then answers nobody: every question has a limit, after which
the rank goes on without an answer.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable

from torch.distributed import distributed_c10d

from weft.memory import Group

LIMIT = 1.0  # seconds
_asking: set[threading.Thread] = set()  # that wait for the store


class FirstCause:
    """The text of the first error of a group's exchanges, the same for all ranks that ask later."""

    def __init__(self, group: Group) -> None:
        self._store = distributed_c10d._get_default_store()
        self._key = f"weft/first-cause/{group.token}"
        self._silent = False  # a question had no answer in time

    def tell(self, text: str) -> None:
        """Leave an error, unless there is one."""
        self._within(lambda: self._store.compare_set(self._key, "", text).decode())

    def ask(self) -> str:
        """The first error; nothing where there is none, or no answer now or before."""
        return "" if self._silent else self._within(self._look)

    def _look(self) -> str:
        return self._store.get(self._key).decode() if self._store.check([self._key]) else ""

    def _within(self, step: Callable[[], str]) -> str:
        said = [""]

        def run() -> None:
            # Without an answer the store is gone: its host may be the one that is.
            with contextlib.suppress(RuntimeError):
                said[0] = step()
            _asking.discard(thread)

        thread = threading.Thread(target=run, name="weft-first-cause", daemon=True)
        _asking.add(thread)
        thread.start()
        thread.join(LIMIT)
        self._silent = thread.is_alive()
        return said[0]


@atexit.register
def _let_them_end() -> None:
    """An answer that comes while Python ends aborts the process (up to Python 3.13).

    It comes where the store's process ends, too, which mostly is the same moment.
    """
    until = time.monotonic() + 3 * LIMIT
    for thread in list(_asking):
        thread.join(max(0.0, until - time.monotonic()))
