# SPDX-License-Identifier: Apache-2.0
"""The kernels of a combine by FP8 on a CPU give the reference's bits in every launch shape.

Whether a GPU orders memory as they need is for the tests with the gpu marker.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import weft
from tests.alltoall.emulate_alltoall import EmulatedAllToAll, compile_alltoall
from tests.alltoall.test_ways import one_round, strange_rows
from tests.mutations import COMBINE_FP8, Mutation
from tests.patience import hurry
from tests.rounds import Round
from weft.alltoall.kernels import Plan
from weft.errors import PeerTimeout

pytestmark = pytest.mark.slow

# 1152 columns are two strips and a quarter, 4608 are nine.
CASES = {
    "bf16": Round(tokens=(7, 0, 16), hidden=1152, top_k=3, experts=9, add=True),
    "fp32": Round(tokens=(3, 5, 2), hidden=640, dtype=torch.float32, router="holes"),
    "fp16": Round(tokens=(4, 1, 3), hidden=4608, dtype=torch.float16, router="perfect", add=True),
    "ten ranks": Round(tokens=(2, 3) * 5, hidden=128, top_k=10, experts=10, router="perfect"),
}
# The coordinator, those that push and those that sum; threads; strips at once.
PLANS = (
    Plan(3, 1, 64, 1, 1),
    Plan(6, 1, 32, 3, 2),
    Plan(4, 1, 96, 2, 8),
    Plan(20, 1, 64, 12, 4),
)


def make(group: weft.Group, case: Round) -> weft.AllToAll:
    return weft.AllToAll(
        group,
        **case.sizes(16),
        dtype=case.dtype,
        combine_dtype="fp8",
        split_phase=True,
        timeout=600.0,
        first_timeout=600.0,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each Shape is compiled, once for all tests."""
    return tmp_path_factory.mktemp("combine")


def emulate(a2a: weft.AllToAll, folder: Path, mutation: Mutation | None = None) -> EmulatedAllToAll:
    """Let this rank run kernels; rank 0 compiles them for all."""
    shape = a2a.config.shape
    place = folder / f"{shape.ranks}-{shape.dtype}-{shape.hidden}-{shape.top_k}"
    if a2a.rank == 0 and not place.exists():
        place.mkdir()
        compile_alltoall([shape], place, mutation=mutation)
    a2a.group.barrier()
    a2a._kernels = entries = EmulatedAllToAll(place / "kernels.so", 0, a2a)
    return entries


def blank(a2a: weft.AllToAll) -> bool:
    """Is every word of every place absent, as the next round must find it?"""
    shape = a2a.config.shape
    size = (shape.returned_rows * shape.returned_bytes,)
    places = a2a.heap.tensor(size, torch.uint8, offset=a2a.config.offsets.returned)
    return bool((places == 0xFF).all())


def every_shape(group: weft.Group, case: Round, folder: Path, mixed: bool) -> None:
    with make(group, case) as a2a:
        # In a mixed group odd ranks run the CPU's own protocol: it is the same.
        entries = None
        if mixed and group.rank % 2:
            group.barrier()
        else:
            entries = emulate(a2a, folder)
        for seed, plan in enumerate(PLANS):
            if entries:
                entries.combine = plan
            turn = case.next(seed=seed, tokens=case.tokens[seed:] + case.tokens[:seed])
            one_round(a2a, turn, "fp8", split_phase=bool(seed % 2))
            group.barrier()
            assert blank(a2a)
            group.barrier()
        a2a.check()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_launch_shape_has_the_bits_of_the_reference(ranks, folder, name, mixed):
    case = CASES[name]
    ranks(len(case.tokens), "threads")(every_shape, case, folder, mixed)


def strange(group: weft.Group, folder: Path) -> None:
    case = Round(tokens=(16, 16), hidden=640, top_k=2, experts=4)
    with make(group, case) as a2a:
        emulate(a2a, folder).combine = PLANS[1]
        x = strange_rows(640).bfloat16()
        x[8].view(torch.int16)[:] = -1  # NaN with all bits set
        ids = torch.tensor([[0, 2]], dtype=torch.int32).repeat(16, 1)
        for _ in range(2):
            assert strange_round(a2a, x, ids)
            group.barrier()
            assert blank(a2a)
            group.barrier()


def strange_round(a2a: weft.AllToAll, x: torch.Tensor, ids: torch.Tensor) -> bool:
    """A round of strange rows, the ninth a NaN with all bits set: is its result right?"""
    received = a2a.dispatch(x, ids)
    a2a.output().copy_(weft.reference.identity_experts(received, a2a.dtype))
    a2a.output()[:, 8].view(torch.int16)[:] = -1
    if a2a.rank == 1:
        time.sleep(0.2)  # so that rank 0 looks for rows before they come
    out = a2a.combine()
    wanted = weft.reference.identity_round_trip(
        x, ids, None, a2a.placement, ranks=2, combine_dtype="fp8"
    )
    values = [rows.nan_to_num(7.0) for rows in (out, wanted)]
    return torch.equal(out.isnan(), wanted.isnan()) and torch.equal(*values)


def test_rows_of_zeros_and_of_no_numbers_look_like_no_blank(ranks, folder):
    ranks(2, "threads")(strange, folder)


def broken(group: weft.Group, folder: Path, how: Mutation | None) -> bool:
    """Rounds until one is wrong on some rank: is there one?"""
    case = Round(tokens=(9, 9), hidden=1152, top_k=2, experts=4)
    with make(group, case) as a2a:
        emulate(a2a, folder, how).combine = PLANS[1]
        x = strange_rows(1152)[:9].bfloat16()
        x[8].view(torch.int16)[:] = -1
        ids = torch.tensor([[0, 2], [1, -1], [3, -1]], dtype=torch.int32).repeat(3, 1)
        ids[8] = torch.tensor([0, 2])
        if how is not None:
            hurry(a2a, 8.0)
        for _ in range(2):
            try:
                right = strange_round(a2a, x, ids)
            except PeerTimeout:
                right = False
            group.barrier()
            if not all(group.all_gather(right and blank(a2a))):
                return True
        return False


@pytest.mark.parametrize("name", [None, *COMBINE_FP8])
def test_a_broken_kernel_is_noticed(ranks, tmp_path, name):
    how = None if name is None else COMBINE_FP8[name]
    assert ranks(2, "threads")(broken, tmp_path, how) == [name is not None] * 2


def absent(group: weft.Group, folder: Path) -> str:
    """Rank 1 stays away from the second combine: rows are missing, and news of its inbox."""
    case = CASES["bf16"].next(tokens=(4, 4, 4))
    with make(group, case) as a2a:
        emulate(a2a, folder).combine = PLANS[1]
        one_round(a2a, case, "fp8", split_phase=False)
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


def test_a_combine_ends_when_rows_do_not_come(ranks, folder):
    said = ranks(3, "threads")(absent, folder)
    for rank in (0, 2):
        seen = f"rank {rank}, combine: rank 1 did not publish epoch 2"
        told = f"rank {rank}, combine: rank {2 - rank} waited in vain for rank 1"
        assert seen in said[rank] or told in said[rank], said[rank]
