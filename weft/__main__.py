# SPDX-License-Identifier: Apache-2.0
"""The command `weft`, also `python -m weft`. `--version` imports none of the other commands."""

import sys


def main() -> None:
    """Print the version for `weft --version`; otherwise run the command line."""
    if sys.argv[1:] == ["--version"]:
        from weft.cli.version import version_text

        print(version_text())
        return
    from weft.cli import commands as cli

    cli.main()


if __name__ == "__main__":
    main()
