"""The small kernels of deep_ep's normal mode do on a CPU what their functions in torch do."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.emulator.emulate import build_library, emulated_tree
from tests.emulator.machine_code import frames
from tests.recorded import NVRTC, reads
from weft.compat import rank_layout
from weft.compat.rank_layout import KERNELS, THREADS, AnnouncementArgs, LayoutArgs, LocalArgs, ctas
from weft.jit.nvrtc import CUDA_OPTIONS, compile_cubin

RANKS, EXPERTS, TOP_K = 3, 12, 5
SIZES = (0, 1, 31, 128, 300)  # tokens: none, one warp, one CTA, more
WORDS = tuple(range(7, 7 + rank_layout.WORDS))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    root = emulated_tree(tmp_path_factory.mktemp("layout"))
    names = [(k.name.removeprefix("weft_"), k.args.__name__) for k in KERNELS]
    entries = "".join(
        'extern "C" __attribute__((visibility("default"))) '
        f"void {name}(const weft::{args}* a, unsigned ctas) {{ "
        f"emulated::launch(ctas, {THREADS}, 1, [a] {{ weft::{name}(*a); }}); }}\n"
        for name, args in names
    )
    return ctypes.CDLL(
        str(build_library(root, f"#include <weft/compat/rank_layout.cuh>\n{entries}"))
    )


def ids_of(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Experts, none, and what names neither."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-3, EXPERTS + 3, (tokens, TOP_K), generator=generator, dtype=dtype)
    if dtype == torch.int64 and tokens > 1:
        ids[1, :2] = torch.tensor([1 << 40, -(1 << 63)])
    return ids


def test_what_torch_counts_for_cpu_ranks():
    ids = torch.tensor([[0, 1], [4, -1], [11, 99], [-1, -7]])
    layout = rank_layout.dispatch_layout(ids, EXPERTS, RANKS)
    assert layout.per_rank.tolist() == [1, 1, 1]
    assert layout.per_expert.tolist() == [1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]
    true, false = True, False
    rows = [[true, false, false], [false, true, false], [false, false, true], [false] * 3]
    assert layout.in_rank.tolist() == rows
    refused = torch.tensor([5], dtype=torch.int32)
    numbers, ranks = rank_layout.announcement(WORDS, ids, layout, refused)
    assert numbers.tolist() == [*WORDS, 2, 1, 1, 1, 1, 1, 1, *layout.per_expert.tolist()]
    assert ranks.tolist() == [[0, -1, -1], [-1, 1, -1], [-1, -1, 2], [-1] * 3]
    assert int(refused) == 7
    topk = ids.clone(), torch.ones(ids.shape)
    slots = torch.tensor([0, 9, 17, -1], dtype=torch.int32)
    assert rank_layout.localize(topk, slots, 8, 4, 4).tolist() == [0, 1, 1, -1]
    assert topk[0].tolist() == [[-1, -1], [0, -1], [-1, -1], [-1, -1]]
    assert topk[1].tolist() == [[0, 0], [1, 0], [0, 0], [0, 0]]


@reads("tests/emulator/*.hpp")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", SIZES)
def test_layouts_and_announcements(kernels, tokens, dtype):
    ids = ids_of(tokens, dtype)
    want = rank_layout.dispatch_layout(ids, EXPERTS, RANKS)
    in_rank = torch.ones((tokens, RANKS), dtype=torch.bool)
    counts = torch.zeros(RANKS + EXPERTS, dtype=torch.int32)
    args = LayoutArgs(
        ids=ids.data_ptr(),
        in_rank=in_rank.data_ptr(),
        counts=counts.data_ptr(),
        tokens=tokens,
        top_k=TOP_K,
        ids_bytes=ids.itemsize,
        ranks=RANKS,
        experts=EXPERTS,
    )
    kernels.dispatch_layout(ctypes.byref(args), ctas(tokens))
    assert torch.equal(counts, torch.cat((want.per_rank, want.per_expert)))
    assert torch.equal(in_rank, want.in_rank)
    for given in (ids, None):
        refused = torch.tensor([[3], [3]], dtype=torch.int32)
        numbers, ranks = rank_layout.announcement(WORDS, given, want, refused[0])
        told = torch.zeros_like(numbers)
        rank_ids = torch.full((tokens, RANKS), 77, dtype=torch.int32)
        announced = AnnouncementArgs(
            ids=0 if given is None else ids.data_ptr(),
            in_rank=want.in_rank.data_ptr(),
            per_rank=want.per_rank.data_ptr(),
            per_expert=want.per_expert.data_ptr(),
            rank_ids=rank_ids.data_ptr(),
            numbers=told.data_ptr(),
            refused=refused[1].data_ptr(),
            tokens=tokens,
            top_k=0 if given is None else TOP_K,
            ids_bytes=ids.itemsize,
            ranks=RANKS,
            experts=EXPERTS,
            words=(ctypes.c_uint32 * rank_layout.WORDS)(*WORDS),
        )
        kernels.announcement(ctypes.byref(announced), max(1, ctas(tokens)))
        assert torch.equal(told, numbers)
        assert torch.equal(rank_ids, ranks)
        assert refused[0] == refused[1]


@reads("tests/emulator/*.hpp")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", SIZES)
def test_local_ids(kernels, rows, dtype):
    ids, weights = ids_of(rows, dtype), torch.rand((rows, TOP_K))
    slots = torch.randint(-1, 24, (rows,), dtype=torch.int32)
    want = ids.clone(), weights.clone()
    wanted_tokens = rank_layout.localize(want, slots, 8, 4, 4)
    for with_ids in (False, True):
        tokens = torch.full((rows,), 77, dtype=torch.int32)
        entries = ids.numel() if with_ids else 0
        args = LocalArgs(
            ids=ids.data_ptr() if with_ids else 0,
            weights=weights.data_ptr(),
            slots=slots.data_ptr(),
            tokens=tokens.data_ptr(),
            entries=entries,
            rows=rows,
            ids_bytes=ids.itemsize,
            max_tokens=8,
            first=4,
            count=4,
        )
        kernels.localize(ctypes.byref(args), ctas(max(entries, rows)))
        assert torch.equal(tokens, wanted_tokens)
    assert torch.equal(ids, want[0])
    assert torch.equal(weights, want[1])


@reads(tools=(NVRTC,))
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_compile_without_spills(kernel, arch: str) -> None:
    cubin = compile_cubin(kernel.source(), name=kernel.name, arch=arch, options=CUDA_OPTIONS)
    assert kernel.name.encode() in cubin
    assert set(frames(cubin).values()) == {0}
