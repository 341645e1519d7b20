"""The kernels for few SMs compiled for a CPU, with an engine that copies late and in any order."""

from __future__ import annotations

import ctypes
from pathlib import Path

from tests.emulator.emulate import build_library, emulated_tree, replace_bodies
from weft.alltoall.kernels import entry_points
from weft.shape import Shape

ENGINE = Path(__file__).parents[1] / "emulator/engine.hpp"
HEADER = "alltoall/dispatch_combine_tma.cuh"
SHARED = "extern __shared__ __align__(128) u8 shared[];"
BARRIER = "reinterpret_cast<emulated::Barrier*>({})"
BODIES = {
    "u32 address()": "return 0;",
    "void init(u32 count)": f"{BARRIER.format('&word')}->init(count);",
    "void arrive()": f"{BARRIER.format('&word')}->arrive();",
    "void arrive_expect_tx(u32 bytes)": f"{BARRIER.format('&word')}->expect(bytes);",
    "void wait(u32 parity)": f"emulated::engine.await(*{BARRIER.format('&word')}, parity);",
    "void bulk_load(void* to, const void* from, u32 bytes, Mbarrier& mbarrier)": (
        f"emulated::engine.load(to, from, bytes, {BARRIER.format('&mbarrier.word')});"
    ),
    "void bulk_store(void* to, const void* from, u32 bytes)": (
        "emulated::engine.store(to, from, bytes);"
    ),
    "void bulk_commit()": "++emulated::engine.mine().group;",
    "void bulk_wait_read()": "emulated::engine.drain(open, false);",
    "void bulk_wait_written()": "emulated::engine.drain(0, true);",
    "void fence_for_bulk()": "emulated::engine.fence(true);",
    "void fence_shared_for_bulk()": "emulated::engine.fence(false);",
}
RULES = ("behind_the_flags", "behind_the_readers", "aligned", "finished", "one_whole_fence")


def compile_few(shape: Shape, folder: Path, old: str = "", new: str = "") -> Path:
    """The shared library of both kernels for every rank of a Shape.

    old, new: a text of the header and what it becomes: a mutation that a test must notice.
    """
    root = emulated_tree(folder)
    replace_bodies(root / "weft/device/bulk.cuh", BODIES)
    path = root / "weft" / HEADER
    text = path.read_text()
    for ring in ("RowRing", "PieceRing"):
        text = _changed(text, SHARED, f"u8* shared = emulated::dynamic_shared(sizeof({ring}<S>));")
    assert SHARED not in text
    path.write_text(_changed(text, old, new) if old else text)
    entries = "".join(
        'extern "C" __attribute__((visibility("default"))) '
        f"void {name}_{rank}(const weft::{entry.struct}* a, unsigned ctas) {{ "
        f"constexpr weft::u32 rank = {rank}; (void)rank; "
        f"emulated::launch(ctas, {entry.threads}, 1, [a] {{ weft::{entry.call}(*a); }}); }}\n"
        for name, entry in entry_points(split_phase=False, tma=True).items()
        for rank in range(shape.ranks)
    )
    exports = (
        'extern "C" __attribute__((visibility("default"))) unsigned broken_rule(unsigned i) '
        "{ return emulated::broken[i]; }\n"
    )
    constants = f"constexpr weft::Shape S = {shape.literal()};\n"
    return build_library(
        root,
        f"{ENGINE.read_text()}\n#include <weft/{HEADER}>\n{constants}{exports}{entries}",
    )


class EmulatedFew:
    """Entries that run the kernels of one rank on a made-up GPU that grants `ctas` SMs."""

    def __init__(self, library: Path, rank: int, ctas: int) -> None:
        self._library, self._rank, self.ctas = ctypes.CDLL(str(library)), rank, ctas

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run one operation to its end."""
        getattr(self._library, f"{name}_{self._rank}")(ctypes.byref(args), self.ctas)

    def broken(self) -> list[str]:
        """The rules that any kernel of this library has broken."""
        return [rule for i, rule in enumerate(RULES) if self._library.broken_rule(i)]

    def close(self) -> None:
        """Nothing is held."""


def _changed(text: str, old: str, new: str) -> str:
    assert old in text, f"{HEADER} has no {old!r}"
    return text.replace(old, new, 1)
