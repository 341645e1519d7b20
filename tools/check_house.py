"""The rules of the house that ruff, mypy and import-linter cannot see.

- C++: device/ includes only device/, an operator only itself and device/ (MAY_INCLUDE); all else
  is a standard header in angle brackets; inline asm stands in seven files; no non-coherent load, no
  [[no_unique_address]]. Tests may include sources, which compiles what they test into them.
- Python: nothing that runs bytes it was sent: pickle, marshal, eval, exec, torch.load, shell=True.
- Every file: a name that says what is in it.

Usage: check_house.py [root]    prints `path:line: what is wrong`; returns 1 if anything is
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("weft", "tests", "tools", "models")
CPP = {".cuh", ".cu", ".cpp", ".hpp", ".h"}
SOURCES = CPP | {".py", ".sh", ".pml"}
BAD_NAMES = {"utils", "util", "common", "helpers", "helper", "core", "base", "misc", "v2"}
# An operator stands on device/ alone; grouping reads what an all-to-all received.
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
    "ucontext.h",
}
ASM_FILES = {
    *("bulk.cuh", "order.cuh", "copy.cuh", "quantize_warp.cuh", "team.cuh"),
    *("tma.cuh", "wgmma.cuh"),
}
BAD_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}
# A launcher and the children that it started itself speak over pipes that nobody else can open.
LAUNCHER = {f"weft/memory/{name}.py" for name in ("launch", "processes", "reports")}
BAD_CALLS = {
    *("eval", "exec", "builtins.eval", "builtins.exec", "torch.load", "torch.jit.load"),
    *("os.system", "os.popen", "subprocess.getoutput"),
}
# Strings and characters are a group of their own: a comment sign in one starts no comment.
CPP_TEXT = re.compile(
    r"""("(?:\\.|[^"\\\n])*"|'(?:\\.[^'\n]*|[^'\\\n])')|//[^\n]*|/\*.*?\*/""", re.DOTALL
)
ASM = re.compile(r"\b(asm|__asm|__asm__)\b")
SPLIT_LAYOUT = re.compile(r"\bno_unique_address\b")
NON_COHERENT = re.compile(r"\bld\.global\.nc\b|\b__ldg\b")
Fault = tuple[int, str]  # line, what is wrong


def without_comments(text: str) -> str:
    """`text` of C++ with each comment blanked and its newlines kept."""
    return CPP_TEXT.sub(lambda m: m[1] or "\n" * m[0].count("\n") + " ", text)


def check_cpp(path: Path, text: str) -> Iterator[Fault]:
    """Includes and inline asm of one C++ file; `path` is relative to the root."""
    room = path.parts[1] if len(path.parts) > 2 and path.parts[0] == "weft" else ""
    allowed = MAY_INCLUDE.get(room)
    endings = "cuh|hpp|cpp" if path.parts[0] == "tests" else "cuh|hpp"
    for number, line in enumerate(without_comments(text).splitlines(), 1):
        if found := re.match(r"\s*#\s*include\s*(.*)", line):
            header = found[1].strip()
            inner = re.fullmatch(rf"<weft/(\w+)/[\w/]+\.({endings})>", header)
            standard = re.fullmatch(r"<([a-z_]+)>", header) or header.strip("<>") in POSIX
            if header.startswith('"') or not (inner or standard):
                yield number, f"includes {header}: want <weft/...> or a standard header"
            elif inner and allowed and inner[1] not in allowed:
                want = " and ".join(allowed)
                yield number, f"{room}/ includes {header}: it may include only {want}"
        elif NON_COHERENT.search(line):
            yield number, "a non-coherent load: peers and overlapped kernels write while it reads"
        elif SPLIT_LAYOUT.search(line):
            yield number, "no_unique_address: NVRTC 13.0 lays it out in two ways"
        elif path.name not in ASM_FILES and ASM.search(CPP_TEXT.sub("", line)):
            yield number, f"inline asm: it belongs in {', '.join(sorted(ASM_FILES))}"


def check_python(path: Path, text: str) -> Iterator[Fault]:
    """Dangerous calls and long functions of one Python file; `path` is relative to the root."""
    for node in ast.walk(ast.parse(text, str(path))):
        match node:
            case ast.Import(names=names):
                modules = [name.name for name in names]
            case ast.ImportFrom(module=str(module), names=names):
                modules = [module, *(f"{module}.{name.name}" for name in names)]
            case ast.Call(func=func, keywords=keywords):
                modules = []
                if ast.unparse(func) in BAD_CALLS:
                    yield node.lineno, f"calls {ast.unparse(func)}"
                for keyword in keywords:
                    if keyword.arg == "shell" and ast.unparse(keyword.value) != "False":
                        yield node.lineno, f"passes shell={ast.unparse(keyword.value)}"
            case _:
                continue
        for module in modules:
            if module == "pickle" and path.as_posix() in LAUNCHER:
                continue
            if module in BAD_CALLS or module.split(".")[0] in BAD_MODULES:
                yield node.lineno, f"imports {module}"


def check_name(path: Path) -> Iterator[Fault]:
    """Names that would fit any file; `path` is relative to the root.

    Below a folder `standin` they are those of the package that it stands in for.
    """
    own = itertools.takewhile(lambda part: part != "standin", path.parts)
    for word in (word for part in own for word in re.split(r"[_.-]", part.lower())):
        if word in BAD_NAMES:
            yield 1, f"the name has '{word}' in it: say what is inside"


def check(root: Path) -> list[str]:
    """Every breach below `root`, as `path:line: text`."""
    faults = []
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*")):
        if path.suffix not in SOURCES or not path.is_file():
            continue
        inside, text = path.relative_to(root), path.read_text()
        found = list(check_name(inside))
        # Programs in models/ stand alone, with the CUDA runtime and verbs of their own.
        if path.suffix in CPP and inside.parts[0] != "models":
            found += check_cpp(inside, text)
        elif path.suffix == ".py":
            found += check_python(inside, text)
        faults += [f"{inside}:{line}: {what}" for line, what in found]
    return faults


if __name__ == "__main__":
    breaches = check(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
    print("\n".join(breaches) if breaches else "house rules: clean")
    sys.exit(1 if breaches else 0)
