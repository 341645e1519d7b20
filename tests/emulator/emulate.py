# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels compiled for a CPU, with the interface of a library's entries."""

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.emulator.instructions import translated
from tests.kept import kept_file
from tests.mutations import Mutation
from weft.allreduce.config import ReduceConfig
from weft.allreduce.kernels import KERNELS, MOE, ReducePlan
from weft.jit.cache import build_key
from weft.jit.host import compiler_identity, find_compiler
from weft.jit.source import INCLUDE_ROOT, PACKAGE, header_digest

Tree = dict[str, str]  # texts of headers by their paths
# The emulator, in the order of its parts.
EMULATOR = tuple(
    Path(__file__).with_name(f"{part}.hpp")
    for part in ("threads", "memory", "emulator", "intrinsics", "cluster", "tensor")
)
NUMBERS = Path(__file__).with_name("numbers.cpp")
# Replacements of functions whose assembly takes addresses of a GPU, by head.
BODIES: dict[str, dict[str, str]] = {
    "team.cuh": {
        "void store_at(u32 neighbour, u64* at, u64 value) const": (
            "__atomic_store_n(emulated::neighbour(neighbour, at), value, __ATOMIC_RELEASE);"
        )
    }
}
TRANSLATED = ("device/order.cuh", "device/team.cuh", "device/copy.cuh", "device/quantize_warp.cuh")
# Hidden: two libraries in one process must not share their thread-local memory.
_FLAGS = (
    *("-std=c++20", "-O1", "-fPIC", "-pthread", "-ffp-contract=off", "-Wno-unknown-pragmas"),
    *("-fvisibility=hidden", "-fno-strict-aliasing"),
    # glibc's checked longjmp() takes the stack of another fiber for a frame that has ended.
    "-U_FORTIFY_SOURCE",
)


def emulated_tree(mutation: Mutation | None = None) -> Tree:
    """Return weft's headers without assembly, optionally with a fault."""
    tree = dict(_headers())
    if mutation is not None:
        tree |= {edit.file: mutation.apply(edit.file, tree[edit.file]) for edit in mutation.edits}
    for file, bodies in BODIES.items():
        replace_bodies(tree, f"device/{file}", bodies)
    for name in TRANSLATED:
        tree[name] = translated(tree[name])
    return tree


@functools.cache
def _headers() -> Tree:
    result = (path for end in ("cuh", "hpp", "cpp") for path in PACKAGE.rglob(f"*.{end}"))
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in result}


def replace_bodies(tree: Tree, file: str, bodies: dict[str, str]) -> None:
    for head, body in bodies.items():
        tree[file] = _replaced(tree[file], head, body)


def _replaced(text: str, head: str, body: str) -> str:
    at = text.index(f"WEFT_FN {head} {{") + len(f"WEFT_FN {head} ")
    depth, end = 0, at
    while True:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
        if depth == 0:
            return f"{text[:at]}{{ {body} }}{text[end:]}"


def compile_emulated(reduction: ReduceConfig, *, defines: Sequence[str] = ()) -> Path:
    entries = "".join(
        entry(f"{name}{end}", "ReduceArgs", kernel.call.format(moe=moe), ranks="R.ranks")
        for name, kernel in KERNELS.items()
        for end, moe in (("", "false"), (MOE, "true"))
    )
    includes = "".join(f"#include <weft/allreduce/{name}.cuh>\n" for name in ("oneshot", "twoshot"))
    constants = f"constexpr weft::Reduction R = {reduction.to_cpp()};\n"
    return build_library(emulated_tree(), includes + constants + entries, defines=defines)


def entry(
    name: str, args: str, call: str, *, ranks: str | None = "S.ranks", before: str = ""
) -> str:
    """Return a kernel as a function of a library, for `Emulated.launch`.

    ranks: how many have a share, in C++; None for a kernel without a heap.   before: statements.
    """
    grid = "emulated::Grid{grid[0], grid[1], grid[2], grid[3]}"
    if ranks is not None:
        grid = f"emulated::seen_from(a->site, {ranks}, {grid})"
    return (
        f'extern "C" __attribute__((visibility("default"))) void {name}(const weft::{args}* a, '
        f"const unsigned* grid) {{ {before}emulated::launch({grid}, "
        f"[a] {{ weft::{call}(*a); }}); }}\n"
    )


def build_library(tree: Tree, text: str, *, defines: Sequence[str] = ()) -> Path:
    """Return the shared library of a text that includes kernels of a tree, compiled once."""

    def build(output: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="weft-emulated-") as folder:
            for name, header in tree.items():
                copy = Path(folder, "weft", name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(header)
            source = Path(folder, "kernels.cpp")
            source.write_text(text)
            flags = ["-shared", "-include", str(_emulator()), f"-I{folder}"]
            flags += [f"-D{define}" for define in defines]
            _compile([*flags, str(source), str(_numbers()), "-o", str(output)])

    key = _key(text=text, tree=[*map("\n".join, sorted(tree.items()))], defines=defines)
    return kept_file(key, "emulated.so", build)


def _key(**parts: str | Sequence[str]) -> str:
    emulator = "".join(part.read_text() for part in (*EMULATOR, NUMBERS))
    compiler = compiler_identity(find_compiler())
    return build_key(**parts, emulator=emulator, flags=_FLAGS, compiler=compiler)


def _numbers() -> Path:
    """Return the object file of number conversions, compiled once for all builds."""
    return kept_file(
        _key(numbers=header_digest()),
        "numbers.o",
        lambda output: _compile(["-c", f"-I{INCLUDE_ROOT}", str(NUMBERS), "-o", str(output)]),
    )


def _emulator() -> Path:
    text = "".join(part.read_text() for part in EMULATOR)
    header = kept_file(_key(), "emulator.hpp", lambda output: output.write_text(text))

    def build(output: Path) -> None:
        _compile(["-x", "c++-header", str(header), "-o", str(output)])

    kept_file(_key(), "emulator.hpp.gch", build)
    return header


def _compile(arguments: Sequence[str]) -> None:
    command = [*find_compiler(), *_FLAGS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


class Emulated:
    """Entries that run the kernels of a library, each with `ctas` CTAs of `threads`."""

    def __init__(self, library: Path, ctas: int = 1, threads: int = 32) -> None:
        self.library = ctypes.CDLL(str(library))
        self._ctas, self._threads = ctas, threads

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        self.launch(name, args, self._ctas, self._threads)

    def launch(
        self,
        name: str,
        args: ctypes.Structure,
        ctas: int,
        threads: int,
        *,
        chunks: int = 1,
        cluster: int = 1,
    ) -> None:
        grid = (ctypes.c_uint32 * 4)(ctas, chunks, threads, cluster)
        getattr(self.library, name)(ctypes.byref(args), grid)

    def close(self) -> None:
        """Do nothing."""


class EmulatedEntries(Emulated):
    """Entries that run kernels in given launch shapes, by backend and tokens.

    forms: kernels that stand for a backend's own.
    """

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        self.plans: dict[tuple[str, int], ReducePlan] = {}
        self.forms: dict[str, str] = {}

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        backend = name.removesuffix(MOE)
        kernel = self.forms.get(backend, backend) + name.removeprefix(backend)
        p = self.plans[backend, tokens]
        args.pushers = p.pushers
        self.launch(kernel, args, p.ctas, p.threads, cluster=p.cluster)
