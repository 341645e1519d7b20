# SPDX-License-Identifier: Apache-2.0
"""Reading of JSON files that users pass, with bounded size and typed errors."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.errors import InvalidArgument

MAX_JSON_BYTES = 64 << 20  # the index of a checkpoint with 10,000 tensors has about 1 MB


def read_json(path: Path, label: str) -> Any:
    """Read the JSON value of a regular file of at most MAX_JSON_BYTES.

    Args:
        path: Path of the file. A device, a pipe or a directory is rejected without blocking.
        label: Description of the file, for errors.

    Raises:
        InvalidArgument: the file cannot be read or is not JSON. Names the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument(f"{label} {path} is not a regular file: pass a JSON file")
            data = file.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise InvalidArgument(
                f"{label} {path} exceeds the limit of {MAX_JSON_BYTES >> 20} MiB for JSON files"
            )
        return json.loads(
            data.decode(), object_pairs_hook=_build_dict, parse_constant=_reject_constant
        )
    except InvalidArgument:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"cannot read {label} {path}: {error}") from error


def _build_dict(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        key = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"duplicate key {key!r}")
    return values


def _reject_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
