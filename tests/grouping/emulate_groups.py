"""The CUDA kernels of grouping, and of combine by choices, compiled for a CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from tests.emulator.emulate import build_library, emulated_tree
from weft.alltoall.config import CombineArgs
from weft.grouping.config import GroupConfig
from weft.grouping.kernels import COUNTING, results
from weft.grouping.operator import ExpertGroups
from weft.shape import Shape

ENTRY = (
    'extern "C" __attribute__((visibility("default"))) void {name}(const weft::{args}* a, '
    "const unsigned* shape) {{ "
    "emulated::launch(emulated::seen_from(a->site, S.ranks, {{shape[0], 1, shape[1]}}), "
    "[a] {{ weft::{call}(*a); }}); }}\n"
)


def compile_groups(shape: Shape, grouping: GroupConfig, folder: Path) -> Path:
    """The shared library of all kernels of one Grouping, and of combine's receiving half."""
    names = ("group", "gather", *results(shape, True))
    entries = [ENTRY.format(name=n, args="GroupArgs", call=f"{n}<S, G>") for n in names]
    if shape.combine != "push_fp8":  # those are for combine's own tests
        call = "combine<S, 0, weft::PhasePart::recv>"
        entries.append(ENTRY.format(name="combine_receive", args="CombineArgs", call=call))
    return build_library(
        emulated_tree(folder),
        "#include <weft/alltoall/combine.cuh>\n#include <weft/grouping/send.cuh>\n"
        f"constexpr weft::Shape S = {shape.literal()};\n"
        f"constexpr weft::Grouping G = {grouping.literal()};\n{''.join(entries)}",
    )


class EmulatedGroups:
    """Group entries that run kernels, each with `ctas` CTAs of `threads`."""

    def __init__(self, library: Path, groups: ExpertGroups, ctas: int, threads: int) -> None:
        self.library, self._launch = ctypes.CDLL(str(library)), (ctas, threads)
        a2a, grouping = groups._a2a, groups.config
        shape = a2a.config.shape
        entries = (shape.ranks, shape.tokens, shape.top_k)
        self._tiles = grouping.tiles(shape)
        self._within = torch.zeros(entries, dtype=torch.int32)
        self._before = torch.zeros((self._tiles, grouping.groups), dtype=torch.int32)

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run one operation: both kernels of a gather."""
        if name == "gather":
            args.within, args.before = self._within.data_ptr(), self._before.data_ptr()
            self._run("group", args, (self._tiles, COUNTING))
        self._run(name, args, self._launch)

    def combine_receive(self, args: CombineArgs) -> None:
        """Run the receiving half of combine."""
        self._run("combine_receive", args, self._launch)

    def close(self) -> None:
        """Nothing is held."""

    def _run(self, name: str, args: ctypes.Structure, shape: tuple[int, int]) -> None:
        getattr(self.library, name)(ctypes.byref(args), (ctypes.c_uint32 * 2)(*shape))
