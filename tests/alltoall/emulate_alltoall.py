# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine compiled for a CPU, whole and in halves, behind the entries' interface."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import weft
from tests.emulator.emulate import Emulated, build_library, emulated_tree, entry
from tests.emulator.watch import Watch
from tests.headers import HEADER_BYTES, Header
from tests.mutations import Mutation
from weft.alltoall.config import Offsets
from weft.alltoall.kernels import PHASES, Plan
from weft.runtime.kernels import in_parts
from weft.shape import Shape

FLAGS_ONLY = Plan(1, 1, 64)


def compile_alltoall(
    shapes: Sequence[Shape],
    folder: Path,
    *,
    defines: Sequence[str] = (),
    mutation: Mutation | None = None,
) -> Path:
    """Return the shared library of all entries of some Shapes; those that pull know their rank."""
    root = emulated_tree(folder, mutation)
    lines = ["#include <weft/alltoall/combine.cuh>", "#include <weft/alltoall/dispatch.cuh>"]
    for i, shape in enumerate(shapes):
        lines += [f"namespace shape_{i} {{", f"constexpr weft::Shape S = {shape.literal()};"]
        for rank in range(known_ranks(shape)):
            before = f"constexpr weft::u32 rank = {rank}; (void)rank; "
            lines += [
                entry(f"{name}_{i}_{rank}", struct.__name__, call, before=before)
                for name, (struct, call) in in_parts(PHASES, split_phase=True).items()
            ]
        lines.append("}")
    return build_library(root, "\n".join(lines) + "\n", defines=defines)


def known_ranks(shape: Shape) -> int:
    """For how many ranks there are entries: one serves all where no entry knows its rank."""
    return shape.ranks if shape.combine == "pull" else 1


class EmulatedAllToAll(Emulated):
    """Entries that run the kernels of one rank in given launch shapes.

    dispatch, combine: how the next kernels are launched.
    """

    def __init__(self, library: Path, number: int, a2a: weft.AllToAll) -> None:
        super().__init__(library)
        self._shape, self._rank = a2a.config.shape, a2a.rank
        self._suffix = f"_{number}_{self._rank % known_ranks(self._shape)}"
        self.watch = Watch(self.library, a2a._site.stride)
        self._offsets, self.dispatch, self.combine = a2a.config.offsets, FLAGS_ONLY, FLAGS_ONLY

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run one operation to its end."""
        combine, plan = (
            self._shape.combine,
            self.dispatch if name.startswith("dispatch") else self.combine,
        )
        if name == "dispatch_receive" or (
            name == "combine_send" and combine in ("pull", "gemm_push")
        ):
            plan = FLAGS_ONLY  # as on a GPU
        if combine == "push_fp8" and name.startswith("combine"):
            args.pushers, args.strips = plan.pushers, plan.strips
        if name.startswith("combine") and not name.endswith("receive") and combine != "gemm_push":
            self._host(range(self._offsets.outbox, self._offsets.destinations), writes=True)
        kernel = name + self._suffix
        self.launch(kernel, args, plan.workers, plan.threads, chunks=plan.chunks)
        if name in ("dispatch", "dispatch_receive"):
            end = self._offsets.returned or self._offsets.stats or self._offsets.outbox
            self._host(range(self._offsets.route, end))

    def _host(self, place: range, *, writes: bool = False) -> None:
        """The experts between the two kernels: they read what came, and write what returns."""
        self.watch.host(self._rank, self._rank, place.start, len(place), writes=writes)


def places(shape: Shape) -> dict[str, range]:
    """The parts of a share by name."""
    layout = Offsets.of(shape)
    flags = 8 * shape.ranks
    ready = HEADER_BYTES + -(-flags // 128) * 128
    found = {
        "dispatched": range(HEADER_BYTES, HEADER_BYTES + flags),
        "ready": range(ready, ready + flags),
        "arrived": range(Header.arrived.offset, Header.arrived.offset + 4),
        "failed": range(Header.failed.offset, Header.failed.offset + 4),
        "refusing": range(Header.refusing.offset, Header.refusing.offset + 4),
        "route": range(layout.route, layout.planes[0]),
        "outbox": range(layout.outbox, layout.destinations),
    }
    if layout.returned:
        size = shape.returned_rows * shape.returned_bytes
        found["returned"] = range(layout.returned, layout.returned + size)
    for i, (at, pitch) in enumerate(zip(layout.planes, layout.pitches, strict=True)):
        found[f"plane {i}"] = range(at, at + shape.ranks * shape.tokens * pitch)
    return found
