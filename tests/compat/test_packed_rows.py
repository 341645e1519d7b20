# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels that pack and return rows, in the emulator, equal the CPU kernels."""

import pytest
import torch

from tests.compat.calls import buffered
from tests.compat.test_normal_mode import batch, made, on, sent, with_topk
from tests.emulator.emulate import Emulated, build_library, emulated_tree, entry
from tests.emulator.machine_code import frames
from tests.emulator.operators import EmulatedGroups
from tests.emulator.watch import watching
from tests.ranks import on_ranks
from tests.rounds import bits
from weft.compat import packed_rows, rank_layout
from weft.compat.row_exchange import RowCombine, RowDispatch, RowFetch
from weft.errors import TokenOverflow
from weft.shape import Shape

TOKENS = (9, 70, 0)
GATHER = ("group", "gather")
PROGRAMS = [
    ("fetch_rows", Shape(8, 512, 8, 8, 7168, "bf16", (16,))),
    ("return_rows", Shape(8, 4096, 8, 8, 7168, "bf16", (16,), combine="gemm_push")),
    ("return_rows", Shape(3, 64, 3, 3, 12, "fp32", (16,), combine="gemm_push")),  # weights
]


@pytest.mark.slow
@on_ranks(3, "threads")
@buffered(timeout=600.0)
def test_the_kernels_equal_the_cpu_kernels(group, buffer):
    own_rows = on(group, batch(group.rank, TOKENS))
    got, _, weights, _, handle, _ = buffer.dispatch(own_rows.x, **with_topk(buffer, own_rows))
    got_fp8, *_ = buffer.dispatch(own_rows.fp8(), handle=handle)
    x = got * 3

    def calls() -> list[torch.Tensor]:
        sums, of_weights, _ = buffer.combine(x, handle, weights)
        rows, *_ = buffer.dispatch(own_rows.x, handle=handle)
        numbers, *_ = buffer.dispatch(own_rows.fp8(), handle=handle)
        return [sums, of_weights, rows, *numbers]

    expected = calls()
    assert torch.equal(bits(expected[2]), bits(got))
    assert torch.equal(bits(expected[3]), bits(got_fp8[0]))
    kernels = [("fetch_rows", e) for e in made(buffer, RowFetch)]
    kernels += [("return_rows", e) for e in made(buffer, RowCombine)]
    for name, exchange in kernels:
        own, shape = exchange._kernels, exchange.a2a.config.shape.to_cpp()
        kernel = entry(name, packed_rows.ENTRY_ARGS[name].__name__, f"{name}<S>")
        source = f"#include <weft/compat/packed_rows.cuh>\nconstexpr weft::Shape S = {shape};\n"
        library = build_library(emulated_tree(), source + kernel)
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
@on_ranks(2, "threads")
@buffered(timeout=600.0)
def test_kernels_pack_as_the_cpu_does(group, buffer):
    """Pack as many rows as arrive, more, and fewer, where the rest is dropped."""
    own_rows = on(group, batch(group.rank, TOKENS))
    args = with_topk(buffer, own_rows)
    room = (2 * max(TOKENS), 1)[group.rank]  # rank 1 has no more than a row for what comes

    def calls() -> list[torch.Tensor]:
        exact = buffer.dispatch(own_rows.x, **args)
        more = buffer.dispatch(own_rows.x, **args, num_worst_tokens=2 * max(TOKENS))
        after = more[0][: len(exact[0])]  # rows that no rank sent are undefined
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


@on_ranks(2, "threads")
@buffered()
def test_overwritten_handles_cause_no_stray_access(group, buffer):
    """With overwritten tensors of a handle, nothing is stored outside of the inbox's rows."""
    own = on(group, batch(group.rank, (40, 40)))
    x, handle = sent(buffer, own)
    want = buffer.combine(x, handle)[0]
    (exchange,) = made(buffer, RowCombine)
    share = exchange.a2a.heap.tensor((exchange.a2a.config.offsets.share_bytes,), torch.uint8)
    returned, shape = exchange.a2a.config.offsets.returned, exchange.a2a.config.shape
    end = returned + shape.ranks * shape.tokens * shape.out_bytes
    group.barrier()
    behind = share[end:].clone()  # destinations and saved routings: the same tokens come back
    for value in (-1, 64, 1 << 30, -(1 << 31)):
        for overwritten in (handle.packing.tokens, handle.packing.prefix):
            saved = overwritten.clone()
            group.barrier()
            overwritten.fill_(value)
            buffer.combine(x, handle)
            group.barrier()
            assert torch.equal(share[end:], behind)
            overwritten.copy_(saved)
    assert torch.equal(bits(buffer.combine(x, handle)[0]), bits(want))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("name", "shape"), PROGRAMS)
def test_kernels_compile_without_spills(name: str, shape: Shape, arch: str) -> None:
    program = packed_rows.build_program(name, shape, device=True)
    cubin = program.compile_cubin(arch)
    assert all(program.kernel_name(name).encode() in cubin for name in program.entry_points)
    assert set(frames(cubin).values()) == {0}
