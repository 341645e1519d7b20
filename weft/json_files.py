# SPDX-License-Identifier: Apache-2.0
"""Read JSON files that users pass: bounded, without waiting, and with typed errors."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.errors import InvalidArgument

MAX_JSON_BYTES = 64 << 20  # the index of a checkpoint with 10,000 tensors takes about 1 MB


def read_json(path: Path, what: str) -> Any:
    """Return the JSON value of a regular file of at most MAX_JSON_BYTES.

    Args:
        path: The file. A device, a pipe or a folder is refused without waiting for it.
        what: What the file is, for errors.

    Raises:
        InvalidArgument: the file cannot be read or holds no JSON; names it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument(f"{what} {path} is no regular file: pass a file with JSON")
            data = file.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise InvalidArgument(
                f"{what} {path} has more than {MAX_JSON_BYTES >> 20} MiB, which no such file has"
            )
        return json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except InvalidArgument:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"cannot read {what} {path}: {error}") from error


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return values


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")
