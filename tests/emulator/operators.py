# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of both all-to-alls and of grouping, compiled for a CPU, as entries."""

import ctypes
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.emulator.emulate import Emulated, build_library, emulated_tree, entry
from tests.emulator.watch import Watch
from tests.headers import HEADER_BYTES, Header
from tests.mutations import Mutation
from weft.alltoall import kernels as alltoall
from weft.alltoall.config import AllToAllConfig, Offsets
from weft.alltoall.kernels import LaunchPlan
from weft.grouping.config import GroupConfig
from weft.grouping.kernels import COUNT_THREADS, result_entries
from weft.lowlatency import kernels as lowlatency
from weft.lowlatency.config import LowLatencyShape
from weft.runtime.kernels import Build, Kernels, split_entries
from weft.shape import Shape

FLAGS_ONLY = LaunchPlan(1, 1, 64)
# Launch shapes that rounds take in turn: workers, parts of a row, threads.
DISPATCH = (LaunchPlan(3, 1, 32), LaunchPlan(1, 2, 64), LaunchPlan(2, 2, 32), LaunchPlan(1, 1, 96))
COMBINE = (LaunchPlan(2, 2, 32), LaunchPlan(3, 1, 64), LaunchPlan(1, 1, 32), LaunchPlan(2, 1, 96))
# Also CTAs that push, and strips that a warp pushes at a time.
COMBINE_FP8 = (
    *(
        LaunchPlan(3, 1, 64, 1, 1),
        LaunchPlan(6, 1, 32, 3, 2),
        LaunchPlan(4, 1, 96, 2, 8),
        LaunchPlan(20, 1, 64, 12, 4),
    ),
)
SMS, RESIDENT = 2, 8  # of the GPU of low-latency kernels: each of few CTAs does several units


def compile_alltoall(
    shape: Shape, *, defines: Sequence[str] = (), mutation: Mutation | None = None
) -> Path:
    """Return the shared library of all entries of a Shape; pulling ones know their rank."""
    lines = ["#include <weft/alltoall/combine.cuh>", "#include <weft/alltoall/dispatch.cuh>"]
    lines.append(f"constexpr weft::Shape S = {shape.to_cpp()};")
    for rank in range(known_ranks(shape)):
        before = f"constexpr weft::u32 rank = {rank}; (void)rank; "
        lines += [
            entry(f"{name}_{rank}", struct.__name__, call, before=before)
            for name, (struct, call) in split_entries(alltoall.PHASES, split_phase=True).items()
        ]
    return build_library(emulated_tree(mutation), "\n".join(lines) + "\n", defines=defines)


def known_ranks(shape: Shape) -> int:
    """Return the number of ranks that need entries of their own: one if no entry knows its rank."""
    return shape.ranks if shape.combine == "pull" else 1


class EmulatedAllToAll(Emulated):
    """Entries that run the kernels of one rank, with launch shapes that vary by round."""

    def __init__(self, library: Path, shape: Shape, rank: int) -> None:
        super().__init__(library)
        self._shape, self._rank, self._offsets = shape, rank, Offsets.from_shape(shape)
        self._suffix = f"_{rank % known_ranks(shape)}"
        self.combines: tuple[LaunchPlan, ...] = (
            COMBINE_FP8 if shape.combine == "push_fp8" else COMBINE
        )
        self._turns = {"dispatch": itertools.count(rank), "combine": itertools.count(rank)}
        self._turn = dict.fromkeys(self._turns, 0)
        self.watch: Watch | None = None

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        combine, phase = self._shape.combine, name.partition("_")[0]
        if not name.endswith("receive"):
            self._turn[phase] = next(self._turns[phase])
        plans = DISPATCH if phase == "dispatch" else self.combines
        plan = plans[self._turn[phase] % len(plans)]
        if name == "dispatch_receive" or (
            name == "combine_send" and combine in ("pull", "gemm_push")
        ):
            plan = FLAGS_ONLY  # as on a GPU
        if combine == "push_fp8" and phase == "combine":
            args.pushers, args.strips = plan.pushers, plan.strips
        if phase == "combine" and not name.endswith("receive") and combine != "gemm_push":
            self._host(range(self._offsets.outbox, self._offsets.destinations), writes=True)
        kernel = name + self._suffix
        self.launch(kernel, args, plan.workers, plan.threads, chunks=plan.chunks)
        if name in ("dispatch", "dispatch_receive"):
            end = self._offsets.returned or self._offsets.stats or self._offsets.outbox
            self._host(range(self._offsets.route, end))

    def _host(self, place: range, *, writes: bool = False) -> None:
        """Report what experts read and write between the two kernels."""
        if self.watch is not None:
            self.watch.host(self._rank, self._rank, place.start, len(place), writes=writes)


def places(shape: Shape) -> dict[str, range]:
    layout, flags = Offsets.from_shape(shape), 8 * shape.ranks
    ready = HEADER_BYTES + -(-flags // 128) * 128
    result = {
        "dispatched": range(HEADER_BYTES, HEADER_BYTES + flags),
        "ready": range(ready, ready + flags),
        "route": range(layout.route, layout.planes[0]),
        "outbox": range(layout.outbox, layout.destinations),
    }
    for name in ("arrived", "failed", "refusing"):
        at = getattr(Header, name).offset
        result[name] = range(at, at + 4)
    if layout.returned:
        size = shape.returned_rows * shape.returned_bytes
        result["returned"] = range(layout.returned, layout.returned + size)
    for i, (at, pitch) in enumerate(zip(layout.planes, layout.pitches, strict=True)):
        result[f"plane {i}"] = range(at, at + shape.ranks * shape.tokens * pitch)
    return result


def compile_low(shape: LowLatencyShape, *, defines: Sequence[str] = ()) -> Path:
    entries = "".join(
        entry(name, struct.__name__, call)
        for name, (struct, call) in split_entries(lowlatency.PHASES, split_phase=True).items()
    )
    text = (
        "#include <weft/lowlatency/combine.cuh>\n"
        "#include <weft/lowlatency/dispatch.cuh>\n"
        f"constexpr weft::LowLatencyShape S = {shape.to_cpp()};\n{entries}"
    )
    return build_library(emulated_tree(), text, defines=defines)


class EmulatedLow(Emulated):
    """Entries that run low-latency kernels on a GPU of few SMs."""

    def __init__(self, library: Path, shape: LowLatencyShape) -> None:
        super().__init__(library)
        self._shape = shape
        self.plans: dict[str, lowlatency.LowLatencyPlan] = {}  # the latest of each entry

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        threads = lowlatency.FEW_THREADS
        plan = lowlatency.plan_launch(self._shape, name, tokens, threads, SMS, RESIDENT)
        args.senders = plan.senders
        self.plans[name] = plan
        self.launch(name, args, plan.ctas, plan.threads)


def compile_groups(shape: Shape, grouping: GroupConfig) -> Path:
    names = ("group", "gather", *result_entries(shape, shape.combine != "pull"))
    return build_library(
        emulated_tree(),
        "#include <weft/grouping/send.cuh>\n"
        f"constexpr weft::Shape S = {shape.to_cpp()};\n"
        f"constexpr weft::Grouping G = {grouping.to_cpp()};\n"
        + "".join(entry(n, "GroupArgs", f"{n}<S, G>") for n in names),
    )


class EmulatedGroups(Emulated):
    def __init__(self, library: Path, shape: Shape, grouping: GroupConfig) -> None:
        super().__init__(library)
        entries = (shape.ranks, shape.tokens, shape.top_k)
        self._tiles, self._turns = grouping.tiles(shape), itertools.count()
        self._within = torch.zeros(entries, dtype=torch.int32)
        self._before = torch.zeros((self._tiles, grouping.groups), dtype=torch.int32)

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        ctas, threads = ((1, 32), (3, 96))[next(self._turns) // 2 % 2]
        if name == "gather":
            args.within, args.before = self._within.data_ptr(), self._before.data_ptr()
            self.launch("group", args, self._tiles, COUNT_THREADS)
        self.launch(name, args, ctas, threads)


def run_emulated(patch: pytest.MonkeyPatch) -> None:
    def all_to_all(
        device: torch.device, rank: int, config: AllToAllConfig, build: Build
    ) -> Kernels:
        library = compile_alltoall(config.shape, defines=tuple(build.defines))
        return EmulatedAllToAll(library, config.shape, rank)

    def low_latency(device: torch.device, shape: LowLatencyShape, build: Build) -> Kernels:
        return EmulatedLow(compile_low(shape, defines=tuple(build.defines)), shape)

    def groups(
        device: torch.device, shape: Shape, config: GroupConfig, build: Build, *, sends: bool
    ) -> Kernels:
        return EmulatedGroups(compile_groups(shape, config), shape, config)

    loaders = {"alltoall": all_to_all, "lowlatency": low_latency, "grouping": groups}
    for name, load in loaders.items():
        patch.setattr(f"weft.{name}.operator.load_kernels", load)


def watched(a2a: weft.AllToAll) -> Watch:
    """Return the watch of an emulated all-to-all, which includes its experts' accesses."""
    entries: Any = a2a._local.kernels
    entries.watch = watch = Watch(entries.library, a2a.site.stride)
    return watch
