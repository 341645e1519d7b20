# SPDX-License-Identifier: Apache-2.0
"""Logging through Python's `logging`, under logger names that begin with `weft`.

INFO: compilations and cache hits with their times, how the ranks met, the memory of every heap, and
the backend that "auto" selects with the table and the reason. DEBUG: the inputs of these decisions.
WARNING: degraded operation, and waits for other ranks that last longer than 5 s. A decision is
logged once, when it is made. Rank 0 logs what is equal on all ranks.

By default weft adds no handler, so Python prints only warnings, to stderr. A program that sets up
`logging` receives the records as from any library. `WEFT_LOG` is for ranks that a launcher starts
without such a program: they inherit the environment.
"""

from __future__ import annotations

import logging
import os
import sys
import time

from weft.errors import InvalidArgument

LEVELS = ("debug", "info", "warning", "error")
VARIABLE = "WEFT_LOG"
FIRST_LOG_SECONDS = 5.0  # seconds of a wait before it is logged; tests lower it
_FORMAT = "%(asctime)s %(levelname)s %(name)s, process %(process)d: %(message)s"
_LOGGER = logging.getLogger("weft")


def configure() -> None:
    """Write records to stderr from the level in `WEFT_LOG` on: debug, info, warning or error.

    Called when weft is imported and in every rank that `weft.launch` starts. Without the variable
    weft has no handler.

    Raises:
        InvalidArgument: the level is unknown.
    """
    level = os.environ.get(VARIABLE, "")
    if level and level.lower() not in LEVELS:
        raise InvalidArgument(f"{VARIABLE} is {level!r}; set it to {', '.join(LEVELS)}")
    # The fork server outlives a launch, so a new rank may inherit the handler of an earlier one.
    inherited = [handler for handler in _LOGGER.handlers if isinstance(handler, _ToStderr)]
    for handler in inherited:
        _LOGGER.removeHandler(handler)
    if level or inherited:
        _LOGGER.setLevel(level.upper() or logging.NOTSET)
    if level:
        _LOGGER.addHandler(_ToStderr())


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Write records to stderr unless the root logger already writes them to the terminal.

    An engine such as SGLang sets up `logging` after weft is imported, and each line would appear
    twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record unless a handler of the root logger writes it."""
        if not any(_writes_to_terminal(h, record) for h in logging.getLogger().handlers):
            super().emit(record)


def _writes_to_terminal(handler: logging.Handler, record: logging.LogRecord) -> bool:
    return (
        isinstance(handler, logging.StreamHandler)
        and handler.stream in (sys.stderr, sys.__stderr__, sys.stdout, sys.__stdout__)
        and record.levelno >= handler.level
        and _LOGGER.propagate
    )


class WaitLogTimer:
    """Schedule for logging one wait that begins now: after 5 s, 10 s, 20 s and so on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = FIRST_LOG_SECONDS

    def due(self) -> float | None:
        """Return the seconds waited so far if the wait is to be logged now, else None."""
        waited = time.monotonic() - self._began
        if waited < self._next:
            return None
        while self._next <= waited:
            self._next *= 2
        return waited

    def next_wakeup(self, deadline: float) -> float:
        """Return `deadline` (time.monotonic seconds), or when the wait is logged next."""
        return min(deadline, self._began + self._next)
