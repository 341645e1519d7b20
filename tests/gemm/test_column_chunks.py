"""Columns in chunks: each tile once, in the order of the chunks, and counted when it is stored."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.gemm.cases import Case
from tests.gemm.emulate import RULES, EmulatedGemms, compile_gemms, tensor_map
from tests.recorded import reads
from weft.errors import InvalidArgument
from weft.gemm import STORE, GemmPlan, WgmmaPlan, grouped_gemm, kernels, reference
from weft.gemm.config import CLUSTER_N, MXFP4, StoreColumns
from weft.gemm.kernels import OPERANDS, THREADS, GemmArgs, GemmShape

pytestmark = [pytest.mark.usefixtures("one_thread"), reads("tests/emulator/*.hpp")]

# Tiles of several heights, tails, experts without rows, no rows at all; few clusters and many.
CASES = {
    "fp8": (Case(counts=(5, 0, 130, 1, 170), n=1024, k=256), 64),
    "fp8, split": (Case(counts=(300, 40, 0, 513), n=1024, k=128), 256),
    "mxfp4, masked": (Case(MXFP4, counts=(17, 0, 97), n=512, k=128, masked=True), 96),
    "bf16": (Case(torch.bfloat16, counts=(5, 0, 150), n=512, k=64), 64),
    "no rows": (Case(counts=(0, 0), n=512, k=128), 32),
}
CTAS = (2, 6, 30)
# What a cluster finds in the result when its second CTA counts a chunk: a copy after the counters.
COUNT = "add_acq_rel(&a.progress[counted], 1);"
COPY = (
    f"{{ {COUNT} const u64 bytes = u64(a.rows) * S.n * 2; memcpy(reinterpret_cast<u8*>(a.progress) "
    "+ 64 + (blockIdx.x / 2 * (S.column_chunks - 1) + counted) * bytes, a.out, bytes); }"
)
MUTATIONS = {
    "warps do not meet": {"    sync_math_warps();\n#pragma unroll 1": ""},
    "one chunk early": {"S.chunk_n_blocks());": "S.chunk_n_blocks() + 1);"},
    "no end": {"count_stored_chunks<S>(a, counted, S.column_chunks - 1);": ";"},
    "tiles of the first chunk": {"chunk * n_blocks + offset / m_blocks": "offset / m_blocks"},
}  # fmt: skip
TILES = """\
extern "C" __attribute__((visibility("default"))) void tiles_of(
    const weft::GemmArgs* a, unsigned ctas, unsigned room, unsigned* out, unsigned* broken) {{
    constexpr weft::GemmShape S = {literal};
    emulated::launch_pairs(ctas, {threads}, sizeof(weft::GemmShared<S>), 1, emulated::Policy(0),
                           broken, {{}}, [=] {{
        auto& smem = *reinterpret_cast<weft::GemmShared<S>*>(emulated::dynamic_shared());
        if (threadIdx.x < 32) weft::schedule_tiles(*a, smem, threadIdx.x);
        if (threadIdx.x != 0 || blockIdx.x % 2 != 0) return;
        weft::TileScheduler<S> scheduler{{smem}};
        weft::Tile tile;
        unsigned* to = out + blockIdx.x / 2 * room * 4;
        for (; scheduler.next(tile); to += 4) {{
            const unsigned found[] = {{tile.expert, tile.n_block, tile.first_row, tile.valid_m}};
            memcpy(to, found, sizeof found);
        }}
    }});
}}
"""


@dataclass(frozen=True)
class Chunked:
    """A case whose columns are in chunks, and its library: with 1 chunk, then with `chunks`."""

    case: Case
    block_m: int
    chunks: int
    library: ctypes.CDLL
    shapes: tuple[GemmShape, ...]

    @classmethod
    def of(cls, name: str, chunks: int, folder: Path, texts: dict[str, str]) -> Chunked:
        case, block_m = CASES[name]
        sizes = (len(case.counts), case.n, case.k, WgmmaPlan(block_m), "store")
        one = GemmShape(*sizes, operand=OPERANDS[case.dtype])
        shapes = (one, replace(one, column_chunks=chunks))
        more = TILES.format(literal=shapes[1].literal, threads=THREADS)
        path = compile_gemms(shapes, folder, {**texts, COUNT: COPY}, more)
        return cls(case, block_m, chunks, ctypes.CDLL(str(path)), shapes)

    def tiles(self, ctas: int) -> list[list[tuple[int, ...]]]:
        """(expert, n_block, first row, rows) of each cluster's tiles, in order."""
        case, counts = self.case, torch.tensor(self.case.counts, dtype=torch.int32)
        starts = torch.tensor(case.starts, dtype=torch.int32)
        args = GemmArgs(rows=case.rows, max_rows=case.max_rows if case.masked else case.rows)
        args.counts = counts.data_ptr()
        args.starts = 0 if case.masked else starts.data_ptr()
        room = sum(-(-count // 16) for count in case.counts) * case.n // CLUSTER_N + 1
        out = torch.full((ctas // 2, room, 4), -1, dtype=torch.int32)
        broken = (ctypes.c_uint32 * len(RULES))()
        to = ctypes.c_void_p(out.data_ptr())
        self.library.tiles_of(ctypes.byref(args), ctas, room, to, broken)
        assert not any(broken)
        return [[tuple(t) for t in mine.tolist() if t[0] >= 0] for mine in out]

    def check(self, ctas: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        case, chunks, made = self.case, self.chunks, self.case.make()
        plan, per_chunk = WgmmaPlan(self.block_m), self.case.n // CLUSTER_N // self.chunks
        gemms = EmulatedGemms(self.library, self.shapes, seed, seed % 3)
        monkeypatch.setattr(reference, "compute", gemms.compute)
        wanted = made.call(STORE, plan).numbers.view(case.rows, case.n)
        copies = ctas // 2 * (chunks - 1)
        # One more: broken kernels count in chunks that are not counted.
        memory = torch.zeros(32 + (copies + 1) * case.rows * case.n, dtype=torch.int16)
        how = StoreColumns(chunks, memory.data_ptr(), ctas)
        got = made.call(how, plan).numbers.view(case.rows, case.n)
        assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))
        counters = memory[:32].view(torch.int32)
        assert counters[: chunks - 1].tolist() == [ctas] * (chunks - 1)
        assert not counters[chunks - 1 :].any()
        seen = (
            memory[32:].view(copies + 1, case.rows, case.n)[:copies].unflatten(0, (-1, chunks - 1))
        )
        for tiles, found in zip(self.tiles(ctas), seen, strict=True):
            for _, n_block, row, rows in tiles:
                if (chunk := n_block // per_chunk) == chunks - 1:
                    continue
                at = slice(row, row + rows), slice(n_block * CLUSTER_N, (n_block + 1) * CLUSTER_N)
                stored = got.view(torch.int16)[at]
                assert torch.equal(found[chunk][at], stored), "counted before it is stored"


@pytest.fixture(autouse=True)
def maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "tensor_map", tensor_map)


@pytest.mark.parametrize("name", CASES)
def test_every_tile_is_computed_once_and_counted_when_stored(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for chunks in {2, CASES[name][0].n // CLUSTER_N}:
        chunked = Chunked.of(name, chunks, tmp_path / str(chunks), {})
        case, per_chunk = chunked.case, chunked.case.n // CLUSTER_N // chunks
        for seed, ctas in enumerate(CTAS):
            by_cluster = chunked.tiles(ctas)
            for mine in by_cluster:
                order = [n_block // per_chunk for _, n_block, *_ in mine]
                assert order == sorted(order)
            most, least = max(map(len, by_cluster)), min(map(len, by_cluster))
            assert most - least <= 1, "chunks are dealt without a gap"
            covered = torch.zeros((case.rows, case.n // CLUSTER_N), dtype=torch.int32)
            for _, n_block, row, rows in (tile for mine in by_cluster for tile in mine):
                covered[row : row + rows, n_block] += 1
            assert torch.equal(covered, case.live()[:, None].expand_as(covered).int())
            chunked.check(ctas, seed, monkeypatch)


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_broken_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chunked = Chunked.of("fp8", 4, tmp_path, MUTATIONS[name])

    def check() -> None:
        for seed in range(20):
            chunked.check(CTAS[seed % 2 + 1], seed, monkeypatch)

    with pytest.raises(AssertionError):
        check()


def test_what_is_refused():
    made = Case(counts=(5, 3), n=512, k=256).make()
    for plan, chunks, words in (
        (WgmmaPlan(32), 3, "has 3 chunks of n in multiples of 256 columns; n is 512"),
        (GemmPlan(64), 2, "stores no chunks of columns: use a WgmmaPlan"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            grouped_gemm(
                made.a, made.b, plan=plan, epilogue=StoreColumns(chunks, 16, 2), **made.given
            )
