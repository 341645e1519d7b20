# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of the fused all-reduce compiled for a CPU, behind the entries' interface."""

from __future__ import annotations

import atexit
import ctypes
import functools
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.emulator.instructions import translated
from tests.mutations import Mutation
from weft.allreduce.config import ReduceConfig
from weft.allreduce.kernels import KERNELS, MOE, ReducePlan
from weft.jit.host import find_compiler
from weft.jit.source import INCLUDE_ROOT, PACKAGE

# The emulator, in the order of its parts.
EMULATOR = tuple(
    Path(__file__).with_name(f"{part}.hpp")
    for part in ("threads", "memory", "emulator", "intrinsics")
)
NUMBERS = Path(__file__).with_name("numbers.cpp")
# What stands for functions whose assembly finds its operands by addresses of a GPU, by head.
BODIES: dict[str, dict[str, str]] = {
    "team.cuh": {
        "void store_at(u32 neighbour, u64* at, u64 value) const": (
            "__atomic_store_n(emulated::neighbour(neighbour, at), value, __ATOMIC_RELEASE);"
        ),
    },
}
TRANSLATED = ("device/order.cuh", "device/team.cuh", "device/copy.cuh", "device/quantize_warp.cuh")


def emulated_tree(folder: Path, mutation: Mutation | None = None) -> Path:
    """Copy weft's headers without assembly, with a fault or none; return the include root."""
    for header in (path for end in ("cuh", "hpp", "cpp") for path in PACKAGE.rglob(f"*.{end}")):
        name, text = header.relative_to(PACKAGE), header.read_text()
        copy = folder / "weft" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(mutation.apply(name.as_posix(), text) if mutation else text)
    for file, bodies in BODIES.items():
        replace_bodies(folder / "weft/device" / file, bodies)
    for file in TRANSLATED:
        path = folder / "weft" / file
        path.write_text(translated(path.read_text()))
    return folder


def replace_bodies(path: Path, bodies: dict[str, str]) -> None:
    """Give functions of a header, by their heads, other bodies."""
    text = path.read_text()
    for head, body in bodies.items():
        text = _replaced(text, head, body)
    path.write_text(text)


def _replaced(text: str, head: str, body: str) -> str:
    at = text.index(f"WEFT_FN {head} {{") + len(f"WEFT_FN {head} ")
    depth, end = 0, at
    while True:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
        if depth == 0:
            return f"{text[:at]}{{ {body} }}{text[end:]}"


def compile_emulated(reduction: ReduceConfig, folder: Path, *, defines: Sequence[str] = ()) -> Path:
    """The shared library of all kernels of a ReduceConfig."""
    root = emulated_tree(folder)
    entries = "".join(
        entry(f"{name}{end}", "ReduceArgs", kernel.call.format(moe=moe), ranks="R.ranks")
        for name, kernel in KERNELS.items()
        for end, moe in (("", "false"), (MOE, "true"))
    )
    includes = "".join(f"#include <weft/allreduce/{name}.cuh>\n" for name in ("oneshot", "twoshot"))
    constants = f"constexpr weft::Reduction R = {reduction.to_cpp()};\n"
    return build_library(root, includes + constants + entries, defines=defines)


def entry(
    name: str, args: str, call: str, *, ranks: str | None = "S.ranks", before: str = ""
) -> str:
    """A kernel as a function of a library, for `Emulated.launch`.

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


def build_library(root: Path, text: str, *, defines: Sequence[str] = ()) -> Path:
    """The shared library of an emulated tree and what includes its kernels."""
    source = root / "kernels.cpp"
    source.write_text("\n".join([*(part.read_text() for part in EMULATOR), text]))
    library = root / "kernels.so"
    flags = ["-shared", "-include", str(_standard_headers()), f"-I{root}"]
    flags += [f"-D{define}" for define in defines]
    _compile([*flags, str(source), str(_numbers()), "-o", str(library)])
    return library


@functools.cache
def _numbers() -> Path:
    """The object file of number conversions, made once for many builds."""
    made = _standard_headers().with_name("numbers.o")
    _compile(["-c", f"-I{INCLUDE_ROOT}", str(NUMBERS), "-o", str(made)])
    return made


@functools.cache
def _standard_headers() -> Path:
    """The standard library's headers, read once for many builds."""
    folder = tempfile.TemporaryDirectory(prefix="weft-headers-")
    atexit.register(folder.cleanup)
    found = {
        name
        for path in (*EMULATOR, *(PACKAGE / "device").iterdir())
        for name in re.findall(r"^#include <(\w+)>$", path.read_text(), re.MULTILINE)
    }
    header = Path(folder.name) / "standard.hpp"
    header.write_text("".join(f"#include <{name}>\n" for name in sorted(found)))
    _compile(["-x", "c++-header", str(header), "-o", f"{header}.gch"])
    return header


def _compile(arguments: Sequence[str]) -> None:
    flags = ["-std=c++20", "-O1", "-fPIC", "-pthread", "-ffp-contract=off", "-Wno-unknown-pragmas"]
    # Hidden: two libraries in one process must not share their thread-local memory.
    flags += ["-fvisibility=hidden", "-fno-strict-aliasing"]
    command = [*find_compiler(), *flags, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


class Emulated:
    """Entries that run the kernels of a library, each with `ctas` CTAs of `threads`."""

    def __init__(self, library: Path, ctas: int = 1, threads: int = 32) -> None:
        self.library = ctypes.CDLL(str(library))
        self._ctas, self._threads = ctas, threads

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run one operation to its end."""
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
        """Run one kernel to its end, on ctas x chunks CTAs."""
        grid = (ctypes.c_uint32 * 4)(ctas, chunks, threads, cluster)
        getattr(self.library, name)(ctypes.byref(args), grid)

    def close(self) -> None:
        """Nothing is held."""


class EmulatedEntries(Emulated):
    """Entries that run kernels in given launch shapes, by backend and tokens.

    forms: kernels that stand for a backend's own.
    """

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        self.plans: dict[tuple[str, int], ReducePlan] = {}
        self.forms: dict[str, str] = {}

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run one all-reduce to its end."""
        backend = name.removesuffix(MOE)
        kernel = self.forms.get(backend, backend) + name.removeprefix(backend)
        p = self.plans[backend, tokens]
        args.pushers = p.pushers
        self.launch(kernel, args, p.ctas, p.threads, cluster=p.cluster)
