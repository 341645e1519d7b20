"""The kernels of a combine by FP8 compiled for a CPU, behind the entries' interface."""

from __future__ import annotations

import ctypes
from pathlib import Path

from tests.emulator.emulate import Emulated, build_library, emulated_tree, entry
from weft.alltoall.config import CombineArgs
from weft.alltoall.kernels import Plan
from weft.runtime.kernels import Kernels
from weft.shape import Shape

CALLS = {
    "combine": "combine<S, 0>",
    "combine_send": "combine<S, 0, weft::PhasePart::send>",
    "combine_receive": "combine<S, 0, weft::PhasePart::recv>",
}


def compile_combine(shape: Shape, folder: Path, broken: tuple[str, str, str] | None = None) -> Path:
    """The shared library of combine and its halves.

    broken: a header, a text that it has once, and what the text becomes.
    """
    root = emulated_tree(folder)
    if broken is not None:
        header, text, becomes = root / "weft" / broken[0], *broken[1:]
        right = header.read_text()
        assert right.count(text) == 1, text
        header.write_text(right.replace(text, becomes))
    entries = "".join(entry(name, "CombineArgs", call) for name, call in CALLS.items())
    return build_library(
        root,
        "#include <weft/alltoall/combine.cuh>\n"
        f"constexpr weft::Shape S = {shape.literal()};\n{entries}",
    )


class EmulatedCombine(Emulated):
    """The entries of an all-to-all, but for combine, whose kernels run in a given launch shape."""

    def __init__(self, library: Path, entries: Kernels) -> None:
        super().__init__(library)
        self._entries, self.plan = entries, Plan(3, 1, 32, 1, 1)

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run one operation to its end."""
        if not isinstance(args, CombineArgs):
            return self._entries.run(name, args, tokens)
        p = self.plan
        args.pushers, args.strips = p.pushers, p.strips
        return self.launch(name, args, p.workers, p.threads)

    def close(self) -> None:
        """Give back the others."""
        self._entries.close()
