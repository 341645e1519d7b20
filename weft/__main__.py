# SPDX-License-Identifier: Apache-2.0
"""The command `weft`, also as `python -m weft`. Its version loads none of the others."""

import sys


def main() -> None:
    """Answer `weft --version`, or run the command line."""
    if sys.argv[1:] == ["--version"]:
        from weft.cli.version import version_text

        print(version_text())
        return
    from weft.cli import commands as cli

    cli.main()


if __name__ == "__main__":
    main()
