# SPDX-License-Identifier: Apache-2.0
"""Headers of generated sources, and formatting of sources and logs for errors."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from weft.errors import InvalidArgument

PACKAGE = Path(__file__).resolve().parents[1]
INCLUDE_ROOT = PACKAGE.parent  # headers are included as <weft/device/header.cuh>

_SUFFIXES = frozenset((".cuh", ".hpp", ".cpp"))
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_LOG_LIMIT = 16_000  # characters; template errors can be megabytes


@functools.cache
def header_digest() -> str:
    """Return the SHA-256 of all C++ files below weft/ and their paths.

    The files are read once per process; changed headers take effect in a new process.
    """
    digest = hashlib.sha256()
    for path in sorted(p for p in PACKAGE.rglob("*") if p.suffix in _SUFFIXES and p.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def check_name(name: str) -> str:
    """Return `name` if it is a valid file name. Raises InvalidArgument."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"entry name {name!r} is not a valid file name; use at most 100 letters, digits, '_', "
            "'.' and '-'"
        )
    return name


def number_lines(source: str) -> str:
    """Return `source` with line numbers, for compile errors."""
    return "\n".join(f"{n:4d} | {line}" for n, line in enumerate(source.splitlines(), start=1))


def truncate_log(log: str) -> str:
    """Return a compiler's log, truncated to 16,000 characters."""
    log = log.replace("\0", "").strip()
    if len(log) <= _LOG_LIMIT:
        return log or "(the compiler printed nothing)"
    return f"{log[:_LOG_LIMIT]}\n... and {len(log) - _LOG_LIMIT} characters more"
