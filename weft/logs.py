# SPDX-License-Identifier: Apache-2.0
"""What weft logs of its decisions, through Python's `logging`, under names that begin with `weft`.

INFO: what was compiled or found in the cache, and how long it took; how the ranks met; the memory
of every heap; what "auto" takes, by which table, and why. DEBUG: what that rests on. WARNING: what
works, but not as well as it could, and waits for other ranks that last longer than 5 s. A decision
is logged when it is made, never again in the calls that follow it. What is equal on all ranks is
logged by rank 0.

weft adds no handler, so Python prints warnings to stderr and nothing else. A program that sets up
`logging` gets the records as those of any library. `WEFT_LOG` is for all others: ranks are
processes that a launcher starts, where no program may have set up anything, but every process
inherits its environment.
"""

from __future__ import annotations

import logging
import os
import sys

from weft.errors import InvalidArgument

LEVELS = ("debug", "info", "warning", "error")
VARIABLE = "WEFT_LOG"
_FORMAT = "%(asctime)s %(levelname)s %(name)s, process %(process)d: %(message)s"
_LOGGER = logging.getLogger("weft")


def set_up() -> None:
    """Write to stderr what `WEFT_LOG` asks for: debug, info, warning or error.

    Read when weft is imported, and by every rank that `weft.launch` starts. Without the variable
    weft has no handler of its own. Raises InvalidArgument for a level that is none.
    """
    level = os.environ.get(VARIABLE, "")
    if level and level.lower() not in LEVELS:
        raise InvalidArgument(f"{VARIABLE} is {level!r}; set it to {', '.join(LEVELS)}")
    mine = [each for each in _LOGGER.handlers if isinstance(each, _ToStderr)]
    for each in mine:  # of an earlier launch: ranks are forked by a server that outlives it
        _LOGGER.removeHandler(each)
    if level or mine:
        _LOGGER.setLevel(level.upper() or logging.NOTSET)
    if level:
        _LOGGER.addHandler(_ToStderr())


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """The handler of WEFT_LOG.

    It leaves out what the root logger writes to the terminal itself: an engine such as SGLang sets
    up `logging` after weft is imported, and each line would appear twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record unless a handler of the root logger does."""
        if not any(_writes_to_terminal(each, record) for each in logging.getLogger().handlers):
            super().emit(record)


def _writes_to_terminal(handler: logging.Handler, record: logging.LogRecord) -> bool:
    return (
        isinstance(handler, logging.StreamHandler)
        and handler.stream in (sys.stderr, sys.__stderr__, sys.stdout, sys.__stdout__)
        and record.levelno >= handler.level
        and _LOGGER.propagate
    )
