# SPDX-License-Identifier: Apache-2.0
"""Writes the PTX litmus tests of patterns.txt in the dialect that Dartagnan reads, and expect.tsv.

Usage: gen.py [directory]    (without one: this directory)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Litmus:
    """One test: a column of instructions for each thread, and the bad outcome."""

    name: str
    expect: str
    doc: str
    init: str
    threads: tuple[tuple[str, ...], ...]
    outcome: str

    @classmethod
    def parse(cls, block: str) -> Litmus:
        """Reads one block of patterns.txt (its head says how a block is written)."""
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        (name, expect), doc, init = lines[0].split(), lines[1], lines[2]
        if expect not in ("allowed", "forbidden") or not lines[-1].startswith("exists "):
            raise ValueError(
                f"{name}: want 'allowed' or 'forbidden', and 'exists' in the last line"
            )
        threads = []
        for line in lines[3:-1]:
            place, _, code = line.partition(": ")
            threads.append((place, *code.split("; ")))
        return cls(name, expect, doc, init, tuple(threads), lines[-1].removeprefix("exists "))

    def text(self) -> str:
        """The test as Dartagnan reads it."""
        height = max(len(thread) for thread in self.threads)
        columns = [[*thread, *[""] * (height - len(thread))] for thread in self.threads]
        widths = [max(len(cell) for cell in column) for column in columns]
        rows = [
            " " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " ;"
            for row in zip(*columns, strict=True)
        ]
        head = [f"PTX {self.name}", f'"{self.doc}; bad outcome expected {self.expect}"']
        return "\n".join([*head, "{", self.init, "}", *rows, "~exists", self.outcome, ""])


def read() -> list[Litmus]:
    """Every test of patterns.txt, in its order."""
    blocks = (HERE / "patterns.txt").read_text().split("\n\n")[1:]
    return [Litmus.parse(block) for block in blocks if block.strip()]


def write(directory: Path) -> None:
    """Writes every test and expect.tsv into `directory`."""
    tests = read()
    for test in tests:
        (directory / f"{test.name}.litmus").write_text(test.text())
    (directory / "expect.tsv").write_text("".join(f"{t.name}\t{t.expect}\n" for t in tests))


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
