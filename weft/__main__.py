"""The command `weft`, also as `python -m weft`. Its version needs no more than this file."""

import sys


def main() -> None:
    """Answer `weft --version`, or run the command line."""
    if sys.argv[1:] == ["--version"]:
        print(version_text())
        return
    from weft import cli

    cli.main()


def version_text() -> str:
    """The versions of weft and torch, without importing torch."""
    from importlib.metadata import version

    from weft import __version__

    return f"weft {__version__}, torch {version('torch')}"


if __name__ == "__main__":
    main()
