"""The command `weft`, also as `python -m weft`. Its version needs no more than this file."""

import sys


def main() -> None:
    """Answer `weft --version`, or run the command line."""
    if sys.argv[1:] == ["--version"]:
        from importlib.metadata import version

        from weft import __version__

        print(f"weft {__version__}, torch {version('torch')}")
        return
    from weft import cli

    cli.main()


if __name__ == "__main__":
    main()
