# SPDX-License-Identifier: Apache-2.0
"""Flags from annotated fields, which 0.5.23's command line is made of."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, get_type_hints


@dataclass
class Arg:
    choices: list[str] | None = None


def add_cli_args_from_dataclass(
    parser: argparse.ArgumentParser, cls: Any, *, fields: list[str] | None = None
) -> None:
    for name, hint in get_type_hints(cls, include_extras=True).items():
        flag, choices = "--" + name.replace("_", "-"), hint.__metadata__[0].choices
        parser.add_argument(flag, choices=choices, default=getattr(cls, name, "none"))
