"""Results that are sent while they are still being made: tile by tile, in another thread."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import weft
from tests.ops.test_failures import COMBINE_ENTER, JITTER, plan_fault
from tests.ops.test_send import CASES
from tests.patience import hurry
from tests.rounds import Round, bits
from tests.sending import Late, make, results, round_trip, scattered
from weft.errors import Aborted, InvalidArgument, OutOfOrder, SignalTimeout
from weft.ops.grouping import ExpertGroups

KINDS = ["cpu", "threads"]
BEFORE_TILES = 12
NAMES = ("holes", "nobody", "one rank's experts", "fp32")


def late(group: weft.Group, way: str, layout: str) -> None:
    for case in (CASES[name] for name in NAMES):
        with (
            make(group, case, combine_by=way, _defines=("WEFT_FAULTS=1",)) as a2a,
            make(group, case, combine_by="fp8" if way == "fp8" else "pull") as plain,
        ):
            groups = ExpertGroups(a2a, align=4, layout=layout)  # type: ignore[arg-type]
            others = ExpertGroups(plain, align=4, layout=layout)  # type: ignore[arg-type]
            wanted = round_trip(plain, others, case, scattered)
            for product in (Late(4, 128), Late(1, 256), Late(64, 1 << 16), Late(3, 384)):
                got = round_trip(a2a, groups, case, product)
                assert torch.equal(bits(got), bits(wanted)), product
            point = BEFORE_TILES if group.rank == 1 else COMBINE_ENTER
            plan_fault(a2a, point, JITTER, argument=2_000_000)
            for _ in range(3):
                got = round_trip(a2a, groups, case, Late(4, 128))
                assert torch.equal(bits(got), bits(wanted))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("way", "layout"), [("push", "contiguous"), ("fp8", "masked"), ("choices", "masked")]
)
def test_tiles_that_come_late_change_no_byte(ranks, kind, way, layout):
    ranks(3, kind)(late, way, layout)


def missing(group: weft.Group) -> str:
    case = Round(tokens=(16, 16), router="perfect", hidden=1024)
    with make(group, case, combine_by="push") as a2a:
        groups = ExpertGroups(a2a)
        if group.rank == 0:
            hurry(a2a._watched, 2.0)
        group.barrier()
        try:
            round_trip(a2a, groups, case, Late(8, 128, short=5 if group.rank == 0 else -1))
        except weft.errors.GroupError as error:
            with pytest.raises(type(error)):
                a2a.check()
            return f"{type(error).__name__}: {error}"
        return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_tile_that_never_comes_is_named(ranks, kind):
    texts = ranks(2, kind)(missing)
    assert texts[0].startswith("SignalTimeout")
    assert "block 5 of columns shows 7 of 8 tiles after 2." in texts[0]
    assert "rank 0 left the group in the middle of epoch 1: tiles of its product" in texts[1]


def aborted(group: weft.Group) -> None:
    case = Round(tokens=(16,), hidden=256)
    with make(group, case, combine_by="push", timeout=600.0) as a2a:
        groups = ExpertGroups(a2a)
        x, ids, weights, _ = case.of(0, group.device)
        y = results(groups, groups.gather(a2a.dispatch(x, ids, weights)), 1, a2a.dtype)
        cells = torch.zeros(2, dtype=torch.int32)
        timer = threading.Timer(0.2, a2a.abort)
        start = time.monotonic()
        timer.start()
        with pytest.raises(Aborted, match="this rank called abort"):
            groups.send(y, signal=weft.Signal(cells, 8, 128))
        assert time.monotonic() - start < 100.0


def test_abort_ends_a_wait_for_tiles(ranks):
    ranks(1, "threads")(aborted)


def refusals(group: weft.Group) -> None:
    case = Round(tokens=(4,), hidden=640)
    x, ids, weights, _ = case.of(0, group.device)

    def cells(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    for way in ("push", "fp8"):
        with make(group, case, combine_by=way) as a2a:
            groups = ExpertGroups(a2a)
            y = results(groups, groups.gather(a2a.dispatch(x, ids, weights)), 1, a2a.dtype)
            for signal, words in (
                (weft.Signal(cells(4), 8, 128), r"signal.cells has shape \[4\]; it must be \[5\]"),
                (weft.Signal(cells(5, torch.int64), 8, 128), "signal.cells has dtype"),
                (weft.Signal(cells(10)[::2], 8, 128), "signal.cells has strides"),
                (weft.Signal(cells(5), 0, 128), "block_rows is 0"),
                (weft.Signal(cells(5), 8, 100), "block_columns is 100"),
                (weft.Signal(cells(5), 8, 1 << 17), "block_columns is 131072"),
                (weft.Signal(cells(5), 2.0, 128), "block_rows is 2.0"),  # type: ignore[arg-type]
            ):
                with pytest.raises(InvalidArgument, match=words):
                    groups.send(y, signal=signal)
            good = weft.Signal(torch.full((5,), 1000, dtype=torch.int32), 8, 128)
            with pytest.raises(InvalidArgument, match="beside a signal"):
                groups.send(y, signal=good, columns=(0, 128))
            narrow = weft.Signal(torch.full((10,), 1000, dtype=torch.int32), 8, 64)
            if way == "fp8":
                with pytest.raises(InvalidArgument, match="a multiple of 128"):
                    groups.send(y, signal=narrow)
                narrow = good
            groups.send(y, signal=narrow)
            assert not bool(narrow.cells.any())
            a2a.combine_recv()
            groups.gather(a2a.dispatch(x, ids, weights))
            groups.send(y, columns=(0, 128))
            with pytest.raises(OutOfOrder, match="the next begins at 128"):
                groups.send(y, signal=good)


def test_what_the_host_refuses_of_a_signal(ranks):
    ranks(1, "threads")(refusals)


def test_a_signal_timeout_is_an_end_of_the_group():
    assert issubclass(SignalTimeout, weft.errors.GroupError)
