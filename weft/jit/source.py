# SPDX-License-Identifier: Apache-2.0
"""The header tree that every entry includes, and how an entry is shown to a reader."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from weft.errors import InvalidArgument

PACKAGE = Path(__file__).resolve().parents[1]
INCLUDE_ROOT = PACKAGE.parent  # so that headers are named <weft/device/header.cuh>

_SUFFIXES = frozenset((".cuh", ".hpp", ".cpp"))
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_LOG_LIMIT = 16_000  # characters; template errors can be megabytes


@functools.cache
def header_digest() -> str:
    """Return the sha256 of every C++ file below weft/, paths included.

    Read once per process: edit a header and start anew.
    """
    digest = hashlib.sha256()
    for path in sorted(p for p in PACKAGE.rglob("*") if p.suffix in _SUFFIXES and p.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def checked_name(name: str) -> str:
    """Return `name` if it can name a file. Raises InvalidArgument."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"entry name {name!r} cannot name a file; use letters, digits, '_', '.' and '-', "
            "at most 100"
        )
    return name


def numbered(source: str) -> str:
    """Return `source` with line numbers, as compile errors show it."""
    return "\n".join(f"{n:4d} | {line}" for n, line in enumerate(source.splitlines(), start=1))


def clipped(log: str) -> str:
    """Return a compiler's log, shortened if it is very long, saying by how much."""
    log = log.replace("\0", "").strip()
    if len(log) <= _LOG_LIMIT:
        return log or "(the compiler said nothing)"
    return f"{log[:_LOG_LIMIT]}\n... and {len(log) - _LOG_LIMIT} characters more"
