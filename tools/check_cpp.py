# SPDX-License-Identifier: Apache-2.0
"""Check includes, inline assembly and loads of the C++ and CUDA sources.

device/ includes only device/, and an operator only itself and device/ (MAY_INCLUDE). All other
includes are standard headers in angle brackets. Inline asm is in a few files, and in the generated
source of one tensor-core instruction. Non-coherent loads and [[no_unique_address]] are not allowed.
Tests may include sources.

Usage: check_cpp.py [root]    prints `path:line: problem`; returns 1 if there are any
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("weft", "tests")
CPP = {".cuh", ".cu", ".cpp", ".hpp", ".h"}
# An operator needs device/ only; grouping reads what an all-to-all received.
MAY_INCLUDE = {
    "device": ("device",),
    "alltoall": ("alltoall", "device"),
    "lowlatency": ("lowlatency", "device"),
    "allreduce": ("allreduce", "device"),
    "gemm": ("gemm", "device"),
    "grouping": ("grouping", "alltoall", "device"),
    "moe": ("moe", "device"),
    "compat": ("compat", "grouping", "alltoall", "device"),
}
POSIX = {
    "errno.h",
    "immintrin.h",
    "linux/futex.h",
    "sched.h",
    "signal.h",
    "sys/mman.h",
    "time.h",
    "unistd.h",
    "ucontext.h",
}
ASM_FILES = {
    *("order.cuh", "copy.cuh", "quantize_warp.cuh", "team.cuh", "tma.cuh", "wgmma.cuh"),
}
ASM_STRINGS = {"weft/gemm/kernels.py"}  # one instruction for each width
# Strings and characters are matched as well: a comment sign inside of one starts no comment.
CPP_TEXT = re.compile(
    r"""("(?:\\.|[^"\\\n])*"|'(?:\\.[^'\n]*|[^'\\\n])')|//[^\n]*|/\*.*?\*/""", re.DOTALL
)
ASM = re.compile(r"\b(asm|__asm|__asm__)\b")
ASM_CALL = re.compile(r"\b(asm|__asm|__asm__)\s*(volatile\s*)?\(")
SPLIT_LAYOUT = re.compile(r"\bno_unique_address\b")
NON_COHERENT = re.compile(r"\bld\.global\.nc\b|\b__ldg\b")
Fault = tuple[int, str]  # line and problem


def without_comments(text: str) -> str:
    """Replace comments in C++ by spaces, and keep newlines."""
    return CPP_TEXT.sub(lambda m: m[1] or "\n" * m[0].count("\n") + " ", text)


def check_cpp(path: Path, text: str) -> Iterator[Fault]:
    """Check includes and inline asm of one C++ file; `path` is relative to the root."""
    folder = path.parts[1] if len(path.parts) > 2 and path.parts[0] == "weft" else ""
    allowed = MAY_INCLUDE.get(folder)
    endings = "cuh|hpp|cpp" if path.parts[0] == "tests" else "cuh|hpp"
    for number, line in enumerate(without_comments(text).splitlines(), 1):
        if include := re.match(r"\s*#\s*include\s*(.*)", line):
            header = include[1].strip()
            inner = re.fullmatch(rf"<weft/(\w+)/[\w/]+\.({endings})>", header)
            standard = re.fullmatch(r"<([a-z_]+)>", header) or header.strip("<>") in POSIX
            if header.startswith('"') or not (inner or standard):
                yield number, f"includes {header}: use <weft/...> or a standard header"
            elif inner and allowed and inner[1] not in allowed:
                names = " and ".join(allowed)
                yield number, f"{folder}/ includes {header}: it may include only {names}"
        elif NON_COHERENT.search(line):
            yield number, "a non-coherent load: peers and overlapped kernels write while it reads"
        elif SPLIT_LAYOUT.search(line):
            yield number, "no_unique_address: NVRTC 13.0 has two layouts for it"
        elif path.name not in ASM_FILES and ASM.search(CPP_TEXT.sub("", line)):
            yield number, f"inline asm: it belongs in {', '.join(sorted(ASM_FILES))}"


def check_generated(path: Path, text: str) -> Iterator[Fault]:
    """Check inline asm and non-coherent loads in strings of one Python file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if ASM_CALL.search(node.value) and path.as_posix() not in ASM_STRINGS:
                yield node.lineno, f"inline asm: it belongs in {', '.join(sorted(ASM_FILES))}"
            elif NON_COHERENT.search(node.value):
                yield node.lineno, "a non-coherent load in generated source"


def check(root: Path) -> list[str]:
    """Return all problems below `root`, as `path:line: text`."""
    faults = []
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*")):
        relative, found = path.relative_to(root), list[Fault]()
        if path.suffix in CPP:
            found = list(check_cpp(relative, path.read_text()))
        elif path.suffix == ".py" and relative.parts[0] == "weft":
            found = list(check_generated(relative, path.read_text()))
        faults += [f"{relative}:{line}: {problem}" for line, problem in found]
    return faults


if __name__ == "__main__":
    breaches = check(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
    print("\n".join(breaches) if breaches else "check_cpp: clean")
    sys.exit(1 if breaches else 0)
