# SPDX-License-Identifier: Apache-2.0
"""Entry point of the command `weft`, also `python -m weft`."""

import sys


def main() -> None:
    """Run the command line; `weft --version` imports no other command."""
    if sys.argv[1:] == ["--version"]:
        from weft.cli.version import format_versions

        print(format_versions())
        return
    from weft.cli import commands as cli

    cli.main()


if __name__ == "__main__":
    main()
