"""The CUDA kernels of the fused all-reduce compiled for a CPU, behind the entries' interface."""

from __future__ import annotations

import atexit
import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from weft.jit.host import find_compiler
from weft.jit.source import PACKAGE
from weft.ops.reduce_args import ReduceArgs
from weft.ops.reduce_plan import ReducePlan
from weft.ops.reduce_source import KERNELS, MOE
from weft.ops.reduction import Reduction

EMULATOR = Path(__file__).with_name("emulator.hpp")
# What stands for each function whose body is the GPU's assembly, by file and head.
BODIES: dict[str, dict[str, str]] = {
    # A thread that waits lets the others of its CTA go on.
    "order.cuh": {"void relax(u32 turns)": "(void)turns; if (emulated::cta) emulated::yield();"},
    "team.cuh": {
        "void wait_for_predecessor()": "",
        "void admit_successor()": "",
        "u32 size() const": "return emulated::cta->neighbours;",
        "u32 rank() const": "return emulated::cta->rank;",
        "void arrive() const": "emulated::arrive_cluster();",
        "void wait() const": "emulated::wait_cluster();",
        "void store_at(u32 neighbour, u64* at, u64 value) const": (
            "__atomic_store_n(emulated::neighbour(neighbour, at), value, __ATOMIC_RELEASE);"
        ),
    },
    "copy.cuh": {
        "uint4 load_input(const uint4* at)": "return *at;",
        "uint4 load_shared_row(const uint4* at)": "return *at;",
        "u32 load_early(const void* at)": "return *static_cast<const u32*>(at);",
        "void store(uint4* at, uint4 v)": "*at = v;",
        "uint4 poll_vector(const uint4* at)": (
            "emulated::yield(); u64 w[2]; u64* from = (u64*)at; w[0] = load_acquire(from); "
            "w[1] = load_acquire(from + 1); uint4 v; std::memcpy(&v, w, 16); return v;"
        ),
        "void post_vector(uint4* at, uint4 v)": (
            "u64 w[2]; std::memcpy(w, &v, 16); u64* to = (u64*)at; "
            "store_release(to, w[0]); store_release(to + 1, w[1]);"
        ),
        "uint4 poll_halves(const uint4* at)": "return poll_vector(at);",
        "void post_halves(uint4* at, uint4 v)": "post_vector(at, v);",
        "float low_half(Number number, u32 pair)": (
            "return number == Number::bf16 ? widen<Number::bf16>(u16(pair)) "
            ": widen<Number::fp16>(u16(pair));"
        ),
        "float high_half(Number number, u32 pair)": "return low_half(number, pair >> 16);",
        "u32 pack_halves(Number number, float low, float high)": (
            "if (number == Number::bf16) return narrow<Number::bf16>(low) | "
            "u32(narrow<Number::bf16>(high)) << 16; return narrow<Number::fp16>(low) | "
            "u32(narrow<Number::fp16>(high)) << 16;"
        ),
    },
    "quant.cuh": {
        "u32 pack_e4m3(float first, float second)": (
            "return to_e4m3(first) | u32(to_e4m3(second)) << 8;"
        ),
        "void add_e4m3(float (&sum)[lane_columns], uint4 v, float scale)": (
            "const u8* e = (const u8*)&v; for (u32 i = 0; i < lane_columns; ++i) "
            "sum[i] += from_e4m3(e[i]) * scale;"
        ),
    },
}


def emulated_tree(folder: Path) -> Path:
    """A copy of weft's headers in which no assembly is left; returns the include root."""
    for room in ("protocol", "kernels"):
        shutil.copytree(PACKAGE / room, folder / "weft" / room)
    for name, bodies in BODIES.items():
        room = "protocol" if name == "order.cuh" else "kernels"
        path = folder / "weft" / room / name
        replace_bodies(path, bodies)
        if room == "kernels":
            assert not re.search(r"\basm\b", path.read_text()), f"assembly is left in {name}"
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


def compile_emulated(reduction: Reduction, folder: Path) -> Path:
    """The shared library of all kernels of a Reduction."""
    root = emulated_tree(folder)
    doors = "".join(
        'extern "C" __attribute__((visibility("default"))) '
        f"void {name}{end}(const weft::ReduceArgs* a, const unsigned* shape) {{ "
        f"emulated::launch(shape[0], shape[1], shape[2], [a] {{ "
        f"weft::{kernel.call.format(moe=moe)}(*a); }}); }}\n"
        for name, kernel in KERNELS.items()
        for end, moe in (("", "false"), (MOE, "true"))
    )
    includes = "".join(f"#include <weft/kernels/{name}.cuh>\n" for name in ("oneshot", "twoshot"))
    constants = f"constexpr weft::Reduction R = {reduction.literal()};\n"
    return build_library(root, includes + constants + doors)


def build_library(root: Path, text: str, *, defines: Sequence[str] = ()) -> Path:
    """The shared library of an emulated tree and what includes its kernels."""
    source = root / "kernels.cpp"
    source.write_text(f"{EMULATOR.read_text()}\n#include <weft/protocol/cpu.cpp>\n{text}")
    library = root / "kernels.so"
    flags = ["-shared", "-include", str(_standard_headers()), f"-I{root}"]
    flags += [f"-D{define}" for define in defines]
    _compile([*flags, str(source), "-o", str(library)])
    return library


@functools.cache
def _standard_headers() -> Path:
    """The standard library's headers, read once for many builds."""
    folder = tempfile.TemporaryDirectory(prefix="weft-headers-")
    atexit.register(folder.cleanup)
    found = {
        name
        for path in (EMULATOR, *(PACKAGE / "protocol").iterdir())
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


class EmulatedEntries:
    """Entries that run kernels in given launch shapes, by backend and tokens."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.plans: dict[tuple[str, int], ReducePlan] = {}

    def run(self, name: str, args: ReduceArgs) -> None:
        """Run one all-reduce to its end."""
        p = self.plans[name, args.tokens]
        args.pushers, args.reducers, args.pushers_finish = p.pushers, p.reducers, p.pushers_finish
        shape = (ctypes.c_uint32 * 3)(p.ctas, p.threads, p.cluster)
        getattr(self._library, name if args.x else name + MOE)(ctypes.byref(args), shape)

    def close(self) -> None:
        """Nothing is held."""
