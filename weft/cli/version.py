# SPDX-License-Identifier: Apache-2.0
"""The versions that `weft --version` prints; no torch is imported for it."""

from weft import __version__
from weft.distribution import torch_version


def version_text() -> str:
    """Return weft's version and torch's, from the metadata of what is installed."""
    return f"weft {__version__}, torch {torch_version() or '(not installed)'}"
