"""C++ programs of tests: each is compiled once for its text, its options and weft's headers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.jit import Cache
from weft.jit.host import compile_file


def compile_program(source: Path, *, name: str, options: Sequence[str] = ()) -> Path:
    """The program that the file at `source` is; what it includes is weft's, or in its directory."""
    options = (f"-I{source.parent}", *options)
    program = compile_file(source.read_text(), name=name, options=options, cache=Cache())
    program.chmod(0o700)
    return program
