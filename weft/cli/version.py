# SPDX-License-Identifier: Apache-2.0
"""Versions that `weft --version` prints, without importing torch."""

from weft import __version__
from weft.distribution import torch_version


def version_text() -> str:
    """Return weft's and torch's versions from package metadata."""
    return f"weft {__version__}, torch {torch_version() or '(not installed)'}"
