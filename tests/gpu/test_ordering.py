# SPDX-License-Identifier: Apache-2.0
"""The tail of dispatch between two GPUs under NVLink load: no word may be older than its flag.

`models/ptx` says what the memory model allows; this says what the machine does. It is the tail
alone, with the package's verbs, because stale words show only when rounds follow one another as
fast as the link allows and other traffic fills it.
"""

from __future__ import annotations

import ctypes
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft.errors import PeerTimeout
from weft.jit import CudaModule, Launcher, compile_cubin, current_arch
from weft.jit.cache import Cache
from weft.runtime.layout import static_asserts

pytestmark = pytest.mark.gpu(2)  # on one, nothing crosses a link

RUNS, ROUNDS = 4, 200_000
RUN_SECONDS = 15.0  # a kernel gives up after this; a round takes 10.5 us (2 x H200, 2026-11-20)


class Word(ctypes.Structure):
    """One word in a line of its own."""

    _fields_ = (("value", ctypes.c_uint64), ("unused", ctypes.c_uint8 * 120))


class Board(ctypes.Structure):
    """Mirror of ordering::Board: the words of a rank's share."""

    _fields_ = tuple(
        (name, Word) for name in ("flag", "go", "done", "arrived", "left", "stale", "late")
    )


class Args(ctypes.Structure):
    """Mirror of ordering::Args."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("limit_ns", ctypes.c_uint64),
        ("rank", ctypes.c_uint32),
        ("rounds", ctypes.c_uint32),
    )


KERNEL = """\
extern "C" __global__ void __launch_bounds__({bounds}, 1)
{name}(const __grid_constant__ ordering::Args a) {{ {call}(a); }}
"""
SOURCE = "".join(
    [
        Path(__file__).with_name("ordering.cuh").read_text().replace("#pragma once", ""),
        "namespace weft { using ordering::Args; using ordering::Board; }\n",
        static_asserts((Args, Board)),
        'extern "C" { extern __device__ const unsigned long long sizes[5]; }\n',
        "__device__ const unsigned long long sizes[5] = {sizeof(ordering::Share), ordering::ctas, ",
        "ordering::threads, ordering::noise_ctas, ordering::noise_threads};\n",
        *(
            KERNEL.format(name=name, call=f"ordering::{call}", bounds=f"ordering::{bounds}")
            for name, call, bounds in (
                ("ours", "produce<ordering::Form::ours>", "threads"),
                ("hole", "produce<ordering::Form::hole>", "threads"),
                ("early", "produce<ordering::Form::early>", "threads"),
                ("consume", "consume", "threads"),
                ("disturb", "disturb", "noise_threads"),
            )
        ),
    ]
)


def compile_litmus(arch: str, cache: Cache | None = None) -> bytes:
    """Return the cubin of all kernels; needs no GPU."""
    return compile_cubin(
        SOURCE,
        name="ordering",
        arch=arch,
        options=("-default-device",),
        cache=cache,
    )


class Litmus:
    """One rank's kernels, heap and streams: rank 0 produces, rank 1 consumes, both add traffic."""

    def __init__(self, group: weft.Group, form: str) -> None:
        self.group = group
        module = CudaModule(compile_litmus(current_arch()), name="ordering")
        share_bytes, *self.sizes = _numbers(module, "sizes")
        name = form if group.rank == 0 else "consume"
        self.kernel = Launcher(module.function(name), Args)
        self.disturb = Launcher(module.function("disturb"), Args)
        self.module = module
        self.heap = weft.Heap.create(group, share_bytes)
        self.streams = torch.cuda.Stream(), torch.cuda.Stream()

    def run(self, first: int, rounds: int) -> dict[str, Any]:
        """Run rounds first + 1 .. first + rounds; return this rank's observations. Collective."""
        args = Args(
            base=self.heap.base,
            stride=self.heap.stride,
            first=first,
            limit_ns=int(RUN_SECONDS * 1e9),
            rank=self.group.rank,
            rounds=rounds,
        )
        before = self.board()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        ctas, threads, noise_ctas, noise_threads = self.sizes
        beside, main = self.streams
        self.group.barrier()
        self.disturb(args, (noise_ctas, 1, 1), noise_threads, beside.cuda_stream)
        start.record(main)
        self.kernel(args, (ctas, 1, 1), threads, main.cuda_stream)
        end.record(main)
        torch.cuda.synchronize()  # every kernel has a deadline
        after = self.board()
        return {
            "stale": after.stale.value - before.stale.value,
            "late": after.late.value - before.late.value,
            "us": start.elapsed_time(end) * 1e3 / rounds,
        }

    def board(self) -> Board:
        """Return a copy of this rank's words."""
        raw = self.heap.tensor((ctypes.sizeof(Board),), torch.uint8).cpu()
        return Board.from_buffer_copy(bytes(raw.tolist()))


def _numbers(module: CudaModule, name: str) -> tuple[int, ...]:
    raw = module.global_bytes(name)
    return struct.unpack(f"<{len(raw) // 8}Q", raw)


def litmus(group: weft.Group, form: str, runs: int, rounds: int) -> list[dict[str, Any]]:
    """Return every run's stale vectors and us per round. Raises PeerTimeout on both ranks."""
    test = Litmus(group, form)
    result = []
    for run in range(runs):
        producer, consumer = group.all_gather(test.run(run * rounds, rounds))
        if producer["late"] or consumer["late"]:
            raise PeerTimeout(
                f"run {run} of {runs}, form {form!r}: {producer['late']} CTAs of the producer and "
                f"{consumer['late']} of the consumer waited past {RUN_SECONDS:g} s; is anything "
                "else running on these GPUs?"
            )
        result.append({"stale": consumer["stale"], "us": round(consumer["us"], 2)})
    group.barrier()  # no rank unmaps what a peer still uses
    test.heap.close()
    test.module.unload()
    return result


def measured(
    ranks: Any, record: Any, form: str, runs: int = RUNS, rounds: int = ROUNDS
) -> list[int]:
    """Return stale 16-byte vectors of each run; the report has them and the time of a round."""
    start = time.monotonic()
    first, second = ranks(2, "cuda")(litmus, form, runs, rounds, timeout=70.0)
    assert first == second
    record(f"stale_vectors_{form}", [run["stale"] for run in first])
    record(f"us_per_round_{form}", [run["us"] for run in first])
    print(f"{form}: {runs} runs of {rounds} rounds in {time.monotonic() - start:.0f} s: {first}")
    return [run["stale"] for run in first]


@pytest.mark.timeout(90)
def test_no_word_is_older_than_its_flag(ranks, record_property):
    assert measured(ranks, record_property, "ours") == [0] * RUNS


@pytest.mark.timeout(90)
def test_stale_words_of_the_unordered_tail_are_counted(ranks, record_property):
    """The count is reported, not asserted, because it depends on the load."""
    assert len(measured(ranks, record_property, "hole")) == RUNS


@pytest.mark.timeout(90)
def test_a_flag_before_its_rows_is_detected(ranks, record_property):
    """Shows that the counter counts, so that zero stale words mean something."""
    (stale,) = measured(ranks, record_property, "early", 1, 2000)
    assert stale > 0
