"""The versions that `weft --version` prints; no torch is imported for it."""

from importlib.metadata import version

from weft import __version__


def version_text() -> str:
    """weft's version and torch's."""
    return f"weft {__version__}, torch {version('torch')}"
