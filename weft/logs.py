# SPDX-License-Identifier: Apache-2.0
"""Logging through Python's `logging`, under logger names that begin with `weft`.

INFO: compilations and cache hits with their times, the rendezvous, the memory of every heap, and
the backend that "auto" selects with the table and the reason. DEBUG: the inputs of these decisions.
WARNING: degraded operation, and waits for other ranks that last longer than 5 s. Each decision is
logged once. Records that are equal on all ranks are logged by rank 0.

By default weft adds no handler, so Python prints only warnings, to stderr. A program that
configures `logging` receives the records like those of any library. `WEFT_LOG` is for ranks whose
program does not configure `logging`: they inherit the variable from the launcher.
"""

from __future__ import annotations

import logging
import os
import sys
import time

from weft.errors import InvalidArgument

LEVELS = ("debug", "info", "warning", "error")
VARIABLE = "WEFT_LOG"
FIRST_LOG_SECONDS = 5.0  # duration of a wait before it is first logged; tests lower it
_FORMAT = "%(asctime)s %(levelname)s %(name)s, process %(process)d: %(message)s"
_LOGGER = logging.getLogger("weft")


def configure() -> None:
    """Write records of the level in `WEFT_LOG` (debug, info, warning, error) or above to stderr.

    Called when weft is imported and in every rank that `weft.launch` starts. Without the variable
    weft adds no handler.

    Raises:
        InvalidArgument: the level is unknown.
    """
    level = os.environ.get(VARIABLE, "")
    if level and level.lower() not in LEVELS:
        raise InvalidArgument(f"{VARIABLE} is {level!r}; set it to {', '.join(LEVELS)}")
    # A rank may inherit a handler from the fork server, which outlives a launch.
    inherited = [handler for handler in _LOGGER.handlers if isinstance(handler, _ToStderr)]
    for handler in inherited:
        _LOGGER.removeHandler(handler)
    if level or inherited:
        _LOGGER.setLevel(level.upper() or logging.NOTSET)
    if level:
        _LOGGER.addHandler(_ToStderr())


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Write records to stderr unless the root logger already writes them to the terminal.

    An engine such as SGLang configures `logging` after it imports weft, and each line would then
    be printed twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record unless a handler of the root logger writes it to the terminal."""
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
    """Timer that determines when to log a wait: 5 s, 10 s, 20 s ... after its construction."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = FIRST_LOG_SECONDS

    def due(self) -> float | None:
        """Return the elapsed seconds if the wait should be logged now, else None."""
        waited = time.monotonic() - self._began
        if waited < self._next:
            return None
        while self._next <= waited:
            self._next *= 2
        return waited

    def next_wakeup(self, deadline: float) -> float:
        """Return the earlier of `deadline` and the next time to log, in time.monotonic seconds."""
        return min(deadline, self._began + self._next)
