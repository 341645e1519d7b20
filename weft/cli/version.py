# SPDX-License-Identifier: Apache-2.0
"""Output of `weft --version`, which does not import torch."""

from weft import __version__
from weft.distribution import torch_version


def format_versions() -> str:
    """Format the versions of weft and torch from package metadata."""
    return f"weft {__version__}, torch {torch_version() or '(not installed)'}"
