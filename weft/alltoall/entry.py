"""How the kernels of dispatch and combine of one Shape are launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.alltoall.args import DispatchArgs
from weft.alltoall.plan import Plan, plan_combine, plan_combine_fp8, plan_dispatch, plan_sums
from weft.alltoall.source import cpu_program, cuda_program, doors
from weft.jit import Launcher
from weft.runtime.entries import Build, CpuEntries, CudaEntries, Entries, Launch
from weft.runtime.layout import vector_bytes
from weft.runtime.stream import loading
from weft.shape import Shape

MOST_TMA_SMS = 32  # up to so many SMs, bulk copies (TMA) move the rows
# From so many 16-byte words on, a launch that overlaps its predecessor only takes room from it: at
# 2048 tokens x 7168 it costs 0.5 %; at 32 it gains 4 %, at 128 up to 1 % (8 x H200, 2026-11-20).
LONG = 256 * 896


class CudaAllToAll(CudaEntries):
    """The kernels of one Shape."""

    def __init__(self, shape: Shape, rank: int, build: Build) -> None:
        tma = takes_tma(shape, build)
        super().__init__(cuda_program(shape, rank, split_phase=build.split_phase, tma=tma), build)
        self._shape, self._tma, self._in_vectors = shape, tma, _in_vectors(shape)
        self._shared = dict.fromkeys(self._program.doors, 0)
        if tma:
            self._shared = dict(
                zip(("dispatch", "combine"), self._table("weft_shared"), strict=True)
            )
        self._launchers: dict[tuple[str, bool], Launcher] = {}
        for name, struct in self._program.doors.items():
            function = self._module.function(name, shared=self._shared[name])
            for early in {False, build.programmatic}:
                self._launchers[name, early] = Launcher(function, struct, programmatic=early)

    def _find(self, name: str, tokens: int) -> Launch:
        p = self._plan(name, tokens)
        early = self._build.programmatic and tokens * self._in_vectors < LONG
        fields = (("pushers", p.pushers), ("strips", p.strips)) if p.strips else ()
        return Launch(self._launchers[name, early], (p.workers, p.chunks, 1), p.threads, fields)

    def _plan(self, name: str, tokens: int) -> Plan:
        shape, out_vectors = self._shape, self._shape.out_bytes // 16
        pushes = shape.combine in ("push", "push_fp8")

        def per_sm(threads: int) -> int:
            return self._module.occupancy(name, threads, shared=self._shared[name])

        if self._tma:
            threads = doors(split_phase=False, tma=True)[name].threads
            return Plan(workers=self._sms, chunks=1, threads=threads)
        if name == "dispatch_receive" or (name == "combine_send" and not pushes):
            return Plan(workers=1, chunks=1, threads=64)  # flags only
        if name.startswith("dispatch"):
            return plan_dispatch(tokens, self._in_vectors, sms=self._sms, per_sm=per_sm)
        if shape.combine == "push_fp8":
            return self._plan_combine_fp8(name, tokens, per_sm)
        if not pushes or name == "combine_receive":
            return plan_combine(tokens, out_vectors, sms=self._sms, per_sm=per_sm)
        return self._plan_push(tokens, per_sm)

    def _plan_push(self, tokens: int, per_sm: Callable[[int], int]) -> Plan:
        """Rows of all sources are pushed, about as many as this rank's tokens have peers.

        A whole combine is resident as a whole, because its CTAs wait for what all of them pushed.
        """
        shape = self._shape
        rows = max(tokens, _planned_tokens(shape)) * min(shape.ranks, shape.top_k)
        p = plan_combine(rows, shape.out_bytes // 16, sms=self._sms, per_sm=per_sm)
        most = self._sms * max(1, per_sm(p.threads))
        return Plan(p.workers, min(p.chunks, most), p.threads)

    def _plan_combine_fp8(self, name: str, tokens: int, per_sm: Callable[[int], int]) -> Plan:
        """Rows of all sources are pushed, about as many as this rank's tokens have slots."""
        shape = self._shape
        if name == "combine_receive":
            return plan_sums(tokens, shape.hidden, sms=self._sms, per_sm=per_sm)
        slots = max(tokens, min(shape.tokens, 8)) * shape.ranks
        taken = tokens if name == "combine" else 0
        return plan_combine_fp8(
            taken, slots, shape.hidden, sms=self._sms, per_sm=per_sm, whole=self._whole
        )


def load_entries(device: torch.device, rank: int, shape: Shape, build: Build) -> Entries:
    """Compile and load the operations of a Shape for one rank's device."""
    if device.type == "cpu":
        return CpuEntries(cpu_program(shape), build)
    with loading(device):
        return CudaAllToAll(shape, rank, build)


def takes_tma(shape: Shape, build: Build) -> bool:
    """Do bulk copies move the rows?"""
    granted = build.num_sms is not None and build.num_sms <= MOST_TMA_SMS
    return granted and not build.split_phase and _fits_tma(shape)


def _planned_tokens(shape: Shape) -> int:
    """Tokens that a push plans for at least: peers may send rows to a rank that has none itself."""
    return min(shape.tokens, 16)


def _fits_tma(shape: Shape) -> bool:
    """Rows that bulk copies can move: whole 16-byte words, opaque, three of them in 200 KiB."""
    row = shape.row_bytes[0]
    plain = shape.combine == "pull" and shape.quant == "none"
    return plain and row % 16 == 0 and row <= 66 * 1024 and shape.ranks <= 16


def _in_vectors(shape: Shape) -> int:
    """Loads of one token's payload: vectors of each row, or 16 columns of a quantised one."""
    quantised = shape.quant != "none"
    copied = shape.row_bytes[2:] if quantised else shape.row_bytes
    columns = shape.hidden if quantised else 0
    return columns // 16 + sum(size // vector_bytes(size) for size in copied)


def place_payload(args: DispatchArgs, tensors: Sequence[torch.Tensor], *, quantized: bool) -> None:
    """Put the addresses of the payload tensors, by plane, into the arguments.

    A quantised first payload arrives as two planes, numbers and scales, so the others move up.
    """
    planes = args.payload
    for i, tensor in enumerate(tensors):
        planes[i + 1 if quantized and i else i] = tensor.data_ptr()
