"""The kernels of a combine with flag-in-data on a CPU give the reference's bits in every launch.

Whether a GPU orders memory as they need is for the tests with the gpu marker.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import weft
from tests.alltoall.emulate_combine import EmulatedCombine, compile_combine
from tests.alltoall.test_ways import one_round, strange_rows
from tests.patience import hurry
from tests.recorded import reads
from tests.rounds import Round, combining
from weft.alltoall.kernels import Plan
from weft.errors import PeerTimeout

pytestmark = reads("tests/emulator/*.hpp")

WAYS = ("fp8", "flag in data")
# 1152 columns are two parts and a quarter, 4608 are nine.
BF16 = Round(tokens=(7, 0, 16), hidden=1152, top_k=3, experts=9, add=True)
FP32 = Round(tokens=(3, 5, 2), hidden=640, dtype=torch.float32, router="holes")
FP16 = Round(tokens=(4, 1, 3), hidden=4608, dtype=torch.float16, router="perfect", add=True)
TEN_RANKS = Round(tokens=(2, 3) * 5, hidden=128, top_k=10, experts=10, router="perfect")
CASES = {
    "fp8 of bf16": ("fp8", BF16),
    "fp8 of fp32": ("fp8", FP32),
    "fp8 of fp16": ("fp8", FP16),
    "fp8, ten ranks": ("fp8", TEN_RANKS),
    "bf16": ("flag in data", BF16.next(hidden=1160)),  # and a vector
    "fp32": ("flag in data", FP32.next(hidden=516)),
    "fp16": ("flag in data", FP16),
    "ten ranks": ("flag in data", TEN_RANKS.next(hidden=8)),
}
# The coordinator, those that push and those that sum; threads; parts at once.
PLANS = (
    Plan(3, 1, 64, 1, 1),
    Plan(6, 1, 32, 3, 2),
    Plan(4, 1, 96, 2, 8),
    Plan(20, 1, 64, 12, 4),
)


# A header, a text of it, and what that becomes in a kernel that is broken.
COMBINE, ROW = "alltoall/combine_flag_in_data.cuh", "device/row.cuh"
BROKEN = {
    "a sentinel that is not restored": (ROW, "    rows.restore();\n", ""),
    "a NaN that looks like an empty place": (COMBINE, "without_sentinel(columns)", "columns"),
    "a vector beyond the row": (
        ROW,
        "if (is_in_row<vectors, Columns<D>::vectors * warp_lanes>(at))\n            post_vector",
        "post_vector",
    ),
    "rows that nobody is owed": (COMBINE, "if (wanted) push_fragment", "push_fragment"),
    "parts that nobody pushes": (
        COMBINE,
        "part < fragment.end; ++part",
        "part + 1 < fragment.end; ++part",
    ),
    "a vector that is taken before it has come": (
        ROW,
        "if ((mine >> i & 1) != 0 && !is_ready(v[i])) found",
        "if (false) found",
    ),
}


def make(group: weft.Group, way: str, case: Round) -> weft.AllToAll:
    return weft.AllToAll(
        group,
        **case.sizes(16),
        dtype=case.dtype,
        **combining(way),
        split_phase=True,
        timeout=600.0,
        first_timeout=600.0,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each Shape is compiled, once for all tests."""
    return tmp_path_factory.mktemp("combine")


def emulate(
    a2a: weft.AllToAll, folder: Path, broken: tuple[str, str, str] | None = None
) -> EmulatedCombine:
    """Let this rank's combine run as kernels; rank 0 compiles them for all."""
    shape = a2a.config.shape
    place = folder / f"{shape.ranks}-{shape.dtype}-{shape.hidden}-{shape.top_k}-{shape.combine}"
    if a2a.rank == 0 and not place.exists():
        place.mkdir()
        compile_combine(shape, place, broken)
    a2a.group.barrier()
    entries = EmulatedCombine(place / "kernels.so", a2a._kernels)
    a2a._kernels = entries
    return entries


def blank(a2a: weft.AllToAll) -> bool:
    """Is every word of every place absent, as the next round must find it?"""
    shape = a2a.config.shape
    size = (shape.returned_rows * shape.returned_bytes,)
    places = a2a.heap.tensor(size, torch.uint8, offset=a2a.config.offsets.returned)
    return bool((places == 0xFF).all())


def every_shape(group: weft.Group, way: str, case: Round, folder: Path, mixed: bool) -> None:
    with make(group, way, case) as a2a:
        # In a mixed group odd ranks run the CPU's own protocol: it is the same.
        entries = None
        if mixed and group.rank % 2:
            group.barrier()
        else:
            entries = emulate(a2a, folder)
        for seed, plan in enumerate(PLANS):
            if entries:
                entries.plan = plan
            turn = case.next(seed=seed, tokens=case.tokens[seed:] + case.tokens[:seed])
            one_round(a2a, turn, way, split_phase=bool(seed % 2))
            group.barrier()
            assert blank(a2a)
            group.barrier()
        a2a.check()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_launch_shape_has_the_bits_of_the_reference(ranks, folder, name, mixed):
    way, case = CASES[name]
    ranks(len(case.tokens), "threads")(every_shape, way, case, folder, mixed)


def strange(group: weft.Group, way: str, folder: Path) -> None:
    case = Round(tokens=(16, 16), hidden=640, top_k=2, experts=4)
    with make(group, way, case) as a2a:
        emulate(a2a, folder).plan = PLANS[1]
        x = strange_rows(640).bfloat16()
        x[8].view(torch.int16)[:] = -1  # NaN with all bits set
        ids = torch.tensor([[0, 2]], dtype=torch.int32).repeat(16, 1)
        for _ in range(2):
            assert strange_round(a2a, x, ids, way)
            group.barrier()
            assert blank(a2a)
            group.barrier()


def strange_round(a2a: weft.AllToAll, x: torch.Tensor, ids: torch.Tensor, way: str) -> bool:
    """A round of strange rows, the ninth a NaN with all bits set: is its result right?"""
    received = a2a.dispatch(x, ids)
    a2a.output().copy_(weft.reference.identity_experts(received, a2a.dtype))
    a2a.output()[:, 8].view(torch.int16)[:] = -1
    if a2a.rank == 1:
        time.sleep(0.2)  # so that rank 0 looks for rows before they come
    out = a2a.combine()
    wanted = weft.reference.identity_round_trip(
        x, ids, None, a2a.placement, ranks=2, combine_dtype="fp8" if way == "fp8" else None
    )
    values = [rows.nan_to_num(7.0) for rows in (out, wanted)]
    return torch.equal(out.isnan(), wanted.isnan()) and torch.equal(*values)


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_zeros_and_of_no_numbers_look_like_no_blank(ranks, folder, way):
    ranks(2, "threads")(strange, way, folder)


def broken(group: weft.Group, folder: Path, how: tuple[str, str, str] | None) -> bool:
    """Rounds until one is wrong on some rank: is there one?"""
    case = Round(tokens=(9, 9), hidden=1160, top_k=2, experts=4)
    with make(group, "flag in data", case) as a2a:
        emulate(a2a, folder, how).plan = PLANS[1]
        x = strange_rows(1160)[:9].bfloat16()
        x[8].view(torch.int16)[:] = -1
        ids = torch.tensor([[0, 2], [1, -1], [3, -1]], dtype=torch.int32).repeat(3, 1)
        ids[8] = torch.tensor([0, 2])
        if how is not None:
            hurry(a2a, 8.0)
        for _ in range(2):
            try:
                right = strange_round(a2a, x, ids, "flag in data")
            except PeerTimeout:
                right = False
            group.barrier()
            if not all(group.all_gather(right and blank(a2a))):
                return True
        return False


@pytest.mark.parametrize("name", [None, *BROKEN])
def test_a_broken_kernel_is_noticed(ranks, tmp_path, name):
    how = None if name is None else BROKEN[name]
    assert ranks(2, "threads")(broken, tmp_path, how) == [name is not None] * 2


def absent(group: weft.Group, way: str, folder: Path) -> str:
    """Rank 1 stays away from the second combine: rows are missing, and news of its inbox."""
    case = BF16.next(tokens=(4, 4, 4))
    with make(group, way, case) as a2a:
        emulate(a2a, folder).plan = PLANS[1]
        one_round(a2a, case, way, split_phase=False)
        hurry(a2a, 4.0)
        group.barrier()
        x, ids, weights, _ = case.of(group.rank, group.device)
        a2a.dispatch(x, ids, weights)
        said = ""
        if group.rank != 1:
            with pytest.raises(PeerTimeout) as caught:
                a2a.combine()
            said = str(caught.value)
            with pytest.raises(PeerTimeout):
                a2a.dispatch(x, ids, weights)
        group.barrier()
        return said


@pytest.mark.parametrize("way", WAYS)
def test_a_combine_ends_when_rows_do_not_come(ranks, folder, way):
    said = ranks(3, "threads")(absent, way, folder)
    for rank in (0, 2):
        seen = f"rank {rank}, combine: rank 1 did not publish epoch 2"
        told = f"rank {rank}, combine: rank {2 - rank} waited in vain for rank 1"
        assert seen in said[rank] or told in said[rank], said[rank]
