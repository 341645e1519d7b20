# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of grouping, and of combine by choices, compiled for a CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from tests.emulator.emulate import Emulated, build_library, emulated_tree, entry
from weft.grouping.config import GroupConfig
from weft.grouping.kernels import COUNTING, results
from weft.grouping.operator import RowGroups
from weft.shape import Shape


def compile_groups(shape: Shape, grouping: GroupConfig, folder: Path) -> Path:
    """The shared library of all kernels of one Grouping, and of combine's receiving half."""
    names = ("group", "gather", *results(shape, True))
    entries = [entry(n, "GroupArgs", f"{n}<S, G>") for n in names]
    if shape.combine != "push_fp8":  # those are for combine's own tests
        call = "combine<S, 0, weft::PhasePart::recv>"
        entries.append(entry("combine_receive", "CombineArgs", call))
    return build_library(
        emulated_tree(folder),
        "#include <weft/alltoall/combine.cuh>\n#include <weft/grouping/send.cuh>\n"
        f"constexpr weft::Shape S = {shape.literal()};\n"
        f"constexpr weft::Grouping G = {grouping.literal()};\n{''.join(entries)}",
    )


class EmulatedGroups(Emulated):
    """Entries of a grouping, each with `ctas` CTAs of `threads`."""

    def __init__(self, library: Path, groups: RowGroups, ctas: int, threads: int) -> None:
        super().__init__(library, ctas, threads)
        shape, grouping = groups._a2a.config.shape, groups.config
        entries = (shape.ranks, shape.tokens, shape.top_k)
        self._tiles = grouping.tiles(shape)
        self._within = torch.zeros(entries, dtype=torch.int32)
        self._before = torch.zeros((self._tiles, grouping.groups), dtype=torch.int32)

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run one operation: both kernels of a gather."""
        if name == "gather":
            args.within, args.before = self._within.data_ptr(), self._before.data_ptr()
            self.launch("group", args, self._tiles, COUNTING)
        super().run(name, args, tokens)
