# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels that pack and return rows, in the emulator, equal the CPU kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import weft
from tests.compat.buffers import buffered
from tests.compat.test_low_latency import whole
from tests.compat.test_normal_mode import batch, layout, made, on, sent
from tests.emulator.emulate import Emulated, build_library, emulated_tree, entry
from tests.emulator.machine_code import frames
from tests.emulator.operators import EmulatedGroups
from tests.emulator.watch import watching
from tests.rounds import bits
from weft.compat import packed_rows, rank_layout
from weft.compat.deep_ep import Buffer
from weft.compat.row_exchange import RowCombine, RowDispatch, RowFetch
from weft.errors import TokenOverflow
from weft.runtime.kernels import Program
from weft.shape import Shape

TOKENS = (9, 70, 0)
GATHER = ("group", "gather")
THERE = Shape(8, 512, 8, 8, 7168, "bf16", (16,))
BACK = Shape(8, 4096, 8, 8, 7168, "bf16", (16,), combine="gemm_push")
WEIGHTS = Shape(3, 64, 3, 3, 12, "fp32", (16,), combine="gemm_push")
PROGRAMS: dict[str, Program] = {
    "fetch": packed_rows.build_program("fetch_rows", THERE, device=True),
    "return": packed_rows.build_program("return_rows", BACK, device=True),
    "return weights": packed_rows.build_program("return_rows", WEIGHTS, device=True),
}


def compile_emulated(name: str, shape: Shape) -> Path:
    """Return the shared library of one kernel of one Shape."""
    kernel = entry(name, packed_rows.ENTRY_ARGS[name].__name__, f"{name}<S>")
    return build_library(
        emulated_tree(),
        "#include <weft/compat/packed_rows.cuh>\n"
        f"constexpr weft::Shape S = {shape.to_cpp()};\n{kernel}",
    )


@buffered(timeout=600.0)
def emulated(group: weft.Group, buffer: Buffer) -> None:
    own_rows = on(group, batch(group.rank, TOKENS))
    args = {**layout(buffer, own_rows), "topk_idx": own_rows.ids, "topk_weights": own_rows.weights}
    got, _, weights, _, handle, _ = buffer.dispatch(own_rows.x, **args)
    assert handle is not None
    got_fp8, *_ = buffer.dispatch(own_rows.fp8(), handle=handle)
    x = whole(got) * 3

    def calls() -> list[torch.Tensor]:
        sums, of_weights, _ = buffer.combine(x, handle, weights)
        rows, *_ = buffer.dispatch(own_rows.x, handle=handle)
        numbers, *_ = buffer.dispatch(own_rows.fp8(), handle=handle)
        assert of_weights is not None
        return [sums, of_weights, whole(rows), *numbers]

    expected = calls()
    assert torch.equal(bits(expected[2]), bits(whole(got)))
    assert torch.equal(bits(expected[3]), bits(got_fp8[0]))
    kernels = [("fetch_rows", e) for e in made(buffer, RowFetch)]
    kernels += [("return_rows", e) for e in made(buffer, RowCombine)]
    for name, exchange in kernels:
        own, library = exchange._kernels, compile_emulated(name, exchange.a2a.config.shape)
        for ctas, threads in ((1, 32), (3, 96)):
            exchange._kernels = entries = Emulated(library, ctas, threads)
            for value, want in zip(calls(), expected, strict=True):
                assert torch.equal(bits(value), bits(want))
        stride = exchange.a2a.site.stride
        with watching(group, entries.library, stride, whole=False) as watch:
            calls()
        how = {event.how for event in watch.events()}
        flags = {"writes release sys"} if name == "return_rows" else set()
        assert {each for each in how if "release" in each or "acquire" in each} == flags
        own_counters = {"updates acq_rel gpu"} if name == "return_rows" else set()
        assert {each for each in how if "updates" in each} == own_counters
        exchange._kernels = own


@pytest.mark.slow
def test_the_kernels_equal_the_cpu_kernels(ranks):
    ranks(3, "threads")(emulated)


@buffered(timeout=600.0)
def packed(group: weft.Group, buffer: Buffer) -> None:
    """Pack as many rows as arrive, more, and fewer, where the rest is dropped."""
    own_rows = on(group, batch(group.rank, TOKENS))
    args = {**layout(buffer, own_rows), "topk_idx": own_rows.ids, "topk_weights": own_rows.weights}
    room = (2 * max(TOKENS), 1)[group.rank]  # rank 1 has no more than a row for what comes

    def calls() -> list[torch.Tensor]:
        exact = buffer.dispatch(own_rows.x, **args)
        more = buffer.dispatch(own_rows.x, **args, num_worst_tokens=2 * max(TOKENS))
        after = whole(more[0])[: len(exact[0])]  # rows that no rank sent are undefined
        result = [t for t in (*exact[:3], after, *more[1:3]) if isinstance(t, torch.Tensor)]
        assert len(result) == 6
        (finding,) = made(buffer, RowDispatch)
        into = [torch.full((room + 2, size), 77, dtype=torch.uint8) for size in (24, 12)]
        sent = own_rows.ids.view(torch.uint8), own_rows.weights.view(torch.uint8)
        ranks = rank_layout.build_count_message(
            (), None, rank_layout.compute_layout(own_rows.ids, 12, 2), None
        )[1]
        finding.run(sent, ranks, [t[:room] for t in into])
        if group.rank == 1:
            with pytest.raises(TokenOverflow):
                finding.a2a.check()
        assert all(bool((t[room:] == 77).all()) for t in into)
        return [*result, *(t[:1] for t in into)]

    expected = calls()
    (exchange,) = made(buffer, RowDispatch)
    rounds = exchange._packed
    entries = [entry(name, "GroupArgs", f"{name}<S, G>") for name in GATHER]
    library = build_library(
        emulated_tree(),
        "#include <weft/grouping/rows.cuh>\n"
        f"constexpr weft::Shape S = {exchange.a2a.config.shape.to_cpp()};\n"
        f"constexpr weft::Grouping G = {rounds.config.to_cpp()};\n{''.join(entries)}",
    )
    own = rounds._kernels
    rounds._kernels = EmulatedGroups(library, exchange.a2a.config.shape, rounds.config)
    for _ in range(2):
        for value, want in zip(calls(), expected, strict=True):
            assert torch.equal(bits(value), bits(want))
    rounds._kernels = own


@pytest.mark.slow
def test_kernels_pack_as_the_cpu_does(ranks):
    ranks(2, "threads")(packed)


@buffered()
def overwrite_handle(group: weft.Group, buffer: Buffer) -> None:
    """With overwritten tensors of a handle, nothing is stored outside of the inbox's rows."""
    own = on(group, batch(group.rank, (40, 40)))
    x, handle = sent(buffer, own)
    want = buffer.combine(x, handle)[0]
    (exchange,) = made(buffer, RowCombine)
    share = exchange.a2a.heap.tensor((exchange.a2a.config.offsets.share_bytes,), torch.uint8)
    returned, shape = exchange.a2a.config.offsets.returned, exchange.a2a.config.shape
    end = returned + shape.ranks * shape.tokens * shape.out_bytes
    saved = [each.clone() for each in (handle.packing.tokens, handle.packing.prefix)]
    for value in (-1, 64, 1 << 30, -(1 << 31)):
        group.barrier()
        behind = share[end:].clone()
        group.barrier()
        handle.packing.tokens.fill_(value)
        buffer.combine(x, handle)
        group.barrier()
        # destinations and saved routings are as they were: the same tokens come back
        assert torch.equal(share[end:], behind)
        handle.packing.tokens.copy_(saved[0])
        handle.packing.prefix.fill_(value)
        buffer.combine(x, handle)
        group.barrier()
        assert torch.equal(share[end:], behind)
        handle.packing.prefix.copy_(saved[1])
    assert torch.equal(bits(buffer.combine(x, handle)[0]), bits(want))


def test_overwritten_handles_cause_no_stray_access(ranks):
    ranks(2, "threads")(overwrite_handle)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_compile_without_spills(name: str, arch: str) -> None:
    program = PROGRAMS[name]
    cubin = program.compile_cubin(arch)
    assert all(program.kernel_name(name).encode() in cubin for name in program.entry_points)
    assert set(frames(cubin).values()) == {0}
