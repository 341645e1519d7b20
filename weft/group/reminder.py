# SPDX-License-Identifier: Apache-2.0
"""When a wait for other ranks is logged: after 5 s, then after 10 s, 20 s and so on."""

from __future__ import annotations

import time

FIRST = 5.0  # seconds of a wait before it is logged; tests lower it


class Reminder:
    """The clock of one wait, which begins now."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = FIRST

    def due(self) -> float | None:
        """Return the seconds waited so far if the wait is to be logged now, else None."""
        waited = time.monotonic() - self._began
        if waited < self._next:
            return None
        while self._next <= waited:
            self._next *= 2
        return waited

    def earlier(self, deadline: float) -> float:
        """Return `deadline` (time.monotonic seconds), or when the wait is logged next."""
        return min(deadline, self._began + self._next)
