# SPDX-License-Identifier: Apache-2.0
"""C++ programs of tests, compiled once per source text, options and weft headers."""

import hashlib
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.kept import kept_file
from tests.mutations import Mutation, source_of
from weft.jit import Cache
from weft.jit.host import compile_code


def compile_program(
    *sources: Path, name: str, options: Sequence[str] = (), mutation: Mutation | None = None
) -> Path:
    text = "".join(source.read_text() for source in sources)
    text = text if mutation is None else inline_headers(text, mutation, set())
    code = compile_code(text, name=name, options=options, cache=Cache())

    def write(output: Path) -> None:
        output.write_bytes(code)
        output.chmod(0o700)

    return kept_file(hashlib.sha256(code).hexdigest(), name, write)


def inline_headers(text: str, mutation: Mutation, included: set[str]) -> str:
    """Replace the first include of each weft header by its text, with a fault if given."""

    def include(match: re.Match[str]) -> str:
        if match[1] in included:
            return ""
        included.add(match[1])
        header = mutation.apply(match[1], source_of(match[1])).replace("#pragma once", "")
        return inline_headers(header, mutation, included)

    return re.sub(r"^#include <weft/(.*)>$", include, text, flags=re.MULTILINE)


def run_program(
    sources: Sequence[Path],
    *arguments: object,
    name: str,
    options: Sequence[str],
    mutation: Mutation | None = None,
) -> tuple[int, str]:
    """Run a program and return its exit status and output, reduced to the first data race."""
    program = compile_program(*sources, name=name, options=options, mutation=mutation)
    done = subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
    )
    return done.returncode, done.stdout + done.stderr
