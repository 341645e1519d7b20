"""The kernel that stores packed rows at their owners stores on a CPU what the CPU's own does."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

import weft
from tests.alltoall.test_compile import numbers_of
from tests.compat.test_deep_ep_normal import batch, layout, on, whole
from tests.emulator.emulate import build_library, emulated_tree
from tests.emulator.watch import watching
from tests.grouping.emulate_groups import DOOR
from tests.recorded import NVRTC, reads
from tests.rounds import bits
from weft.compat import return_rows
from weft.compat.deep_ep import Buffer
from weft.jit.cache import Cache
from weft.jit.nvrtc import CUDA_OPTIONS, compile_cubin
from weft.runtime.entries import Program
from weft.runtime.layout import compare
from weft.shape import Shape

TOKENS = (9, 70, 0)
BACK = Shape(8, 4096, 8, 8, 7168, "bf16", (16,), combine="gemm_push")
PROGRAMS: dict[str, Program] = {
    "return rows": return_rows.program(BACK, device=True),
    "return weights": return_rows.program(
        Shape(3, 64, 3, 3, 12, "fp32", (16,), combine="gemm_push"), device=True
    ),
}


def compile_emulated(shape: Shape, folder: Path) -> Path:
    """The shared library of the kernel of one Shape."""
    door = DOOR.format(name="return_rows", args="ReturnArgs", call="return_rows<S>")
    return build_library(
        emulated_tree(folder),
        "#include <weft/compat/return_rows.cuh>\n"
        f"constexpr weft::Shape S = {shape.literal()};\n{door}",
    )


class Emulated:
    """The entry of one Shape, with `ctas` CTAs of `threads`."""

    def __init__(self, library: Path, ctas: int, threads: int) -> None:
        self.library, self._launch = ctypes.CDLL(str(library)), (ctas, threads)

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run the kernel."""
        getattr(self.library, name)(ctypes.byref(args), (ctypes.c_uint32 * 2)(*self._launch))

    def close(self) -> None:
        """Nothing is held."""


def emulated(group: weft.Group, folder: str) -> None:
    buffer = Buffer(group, timeout=600.0)
    mine = on(group, batch(group.rank, TOKENS))
    args = {**layout(buffer, mine), "topk_idx": mine.ids, "topk_weights": mine.weights}
    got, _, weights, _, handle, _ = buffer.dispatch(mine.x, **args)
    assert handle is not None
    x = whole(got) * 3
    wanted = buffer.combine(x, handle, weights)
    for number, exchange in enumerate(buffer._normal._back.values()):
        own, place = exchange._entries, Path(folder) / str(number)
        library = place / "kernels.so"
        if group.rank == 0:
            place.mkdir()
            library = compile_emulated(exchange.a2a._geometry.shape, place)
        group.barrier()
        for ctas, threads in ((1, 32), (3, 96)):
            exchange._entries = entries = Emulated(library, ctas, threads)
            sums, of_weights, _ = buffer.combine(x, handle, weights)
            assert torch.equal(bits(sums), bits(wanted[0]))
            assert of_weights is not None
            assert wanted[1] is not None
            assert torch.equal(bits(of_weights), bits(wanted[1]))
        with watching(
            group, entries.library, exchange.a2a._workspace.site.stride, whole=False
        ) as watch:
            buffer.combine(x, handle, weights)
        flags = {e.how for e in watch.events() if "release" in e.how}
        assert flags == {"writes release sys"}
        assert {e.how for e in watch.events() if "updates" in e.how} == {"updates acq_rel gpu"}
        exchange._entries = own
    buffer.check()
    buffer.destroy()


@reads("tests/emulator/*.hpp")
@pytest.mark.parametrize("ranks_there", [2, 3])
def test_the_kernel_stores_what_the_cpu_stores(ranks, tmp_path, ranks_there):
    ranks(ranks_there, "threads")(emulated, str(tmp_path))


def misled(group: weft.Group) -> None:
    """A handle's tensors that were overwritten: nothing is stored outside of the inbox's rows."""
    buffer, mine = Buffer(group), on(group, batch(group.rank, (40, 40)))
    got, _, _, _, handle, _ = buffer.dispatch(mine.x, **layout(buffer, mine))
    assert handle is not None
    x, want = whole(got), buffer.combine(whole(got), handle)[0]
    (exchange,) = buffer._normal._back.values()
    share = exchange.a2a._workspace.heap.tensor(
        (exchange.a2a._geometry.layout.share_bytes,), torch.uint8
    )
    returned, shape = exchange.a2a._geometry.layout.returned, exchange.a2a._geometry.shape
    end = returned + shape.ranks * shape.tokens * shape.out_bytes
    saved = [each.clone() for each in (handle.returning.tokens, handle.returning.until)]
    for value in (-1, 64, 1 << 30, -(1 << 31)):
        group.barrier()
        behind = share[end:].clone()
        group.barrier()
        handle.returning.tokens.fill_(value)
        buffer.combine(x, handle)
        group.barrier()
        # destinations and saved routings are as they were: the same tokens come back
        assert torch.equal(share[end:], behind)
        handle.returning.tokens.copy_(saved[0])
        handle.returning.until.fill_(value)
        buffer.combine(x, handle)
        group.barrier()
        assert torch.equal(share[end:], behind)
        handle.returning.until.copy_(saved[1])
    assert torch.equal(bits(buffer.combine(x, handle)[0]), bits(want))
    buffer.check()
    buffer.destroy()


def test_tensors_of_a_handle_are_no_addresses(ranks):
    ranks(2, "threads")(misled)


@reads(tools=(NVRTC,))
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_compile_without_spills(name: str, arch: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    cubin = compile_cubin(
        program.source,
        name=program.name,
        arch=arch,
        options=(*CUDA_OPTIONS, "--ptxas-options=-v"),
        cache=Cache(tmp_path),
    )
    for symbol, numbers in program.tables.items():
        compare(numbers, numbers_of(cubin, symbol.encode()))
    (sidecar,) = tmp_path.rglob("*.json")
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", sidecar.read_text())
    assert set(spills) == {("0", "0")}, sidecar.read_text()
