# SPDX-License-Identifier: Apache-2.0
"""C++ programs of tests: each is compiled once for its text, its options and weft's headers."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from weft.jit import Cache
from weft.jit.host import compile_code


def compile_program(*sources: Path, name: str, options: Sequence[str] = ()) -> Path:
    """The program that these files make, one after the other; what they include is weft's."""
    text = "".join(source.read_text() for source in sources)
    cache = Cache()
    code = compile_code(text, name=name, options=options, cache=cache)
    program = cache.path / f"{name}-{hashlib.sha256(code).hexdigest()[:16]}"
    if not program.exists():
        fresh = program.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(code)
        fresh.chmod(0o700)
        fresh.replace(program)
    return program


def run_program(
    sources: Sequence[Path], *arguments: object, name: str, options: Sequence[str]
) -> tuple[int, str]:
    """Its exit status and what it printed. Of data races the first report is the verdict."""
    done = subprocess.run(
        [str(compile_program(*sources, name=name, options=options)), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
    )
    return done.returncode, done.stdout + done.stderr
