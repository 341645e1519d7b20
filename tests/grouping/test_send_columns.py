"""Columns that are sent while a GEMM still makes others: the bits of `send`, and a named end.

The kernels run on a CPU; a thread is the GEMM, which stores and counts chunk after chunk.
"""

from __future__ import annotations

import threading
import time
from ctypes import Structure
from pathlib import Path

import pytest
import torch

import weft
from tests.emulator.watch import watching
from tests.grouping.emulate_groups import EmulatedGroups, compile_groups
from tests.patience import hurry
from tests.recorded import reads
from tests.rounds import Round, bits, combining
from tests.sending import make, round_trip, sent
from weft.errors import Aborted, PeerTimeout
from weft.grouping.operator import ExpertGroups
from weft.runtime.kernels import Kernels

pytestmark = reads("tests/emulator/*.hpp")

CTAS = 6
CASE = Round(tokens=(16, 5), top_k=5, experts=12, hidden=1024, router="holes", add=True)
CASES = (CASE, CASE.next(tokens=(0, 9), seed=1), CASE.next(tokens=(0, 0), seed=2))
LAYOUTS: dict[str, dict[str, object]] = {
    "contiguous": {"align": 8},
    "too few rows": {"layout": "masked", "max_rows": 2},
}
ORDERS = ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2])  # of a GEMM's chunks


class Gemm:
    """Makes y in chunks of columns, one after the other; of those in `stuck` some CTAs never."""

    def __init__(
        self, groups: ExpertGroups, wanted: torch.Tensor, order: list[int], stuck: tuple[int, ...]
    ) -> None:
        self.y = torch.full_like(wanted, float("nan"))
        self._parts = list(zip(self.y.chunk(4, -1), wanted.chunk(4, -1), strict=True))
        self._counters, self._order, self._stuck = groups._buffers.progress, order, stuck
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        for chunk in self._order:
            time.sleep(0.002)
            to, source = self._parts[chunk]
            to.copy_(source)
            if chunk < 3:
                for _ in range(CTAS - 2 * (chunk in self._stuck)):
                    self._counters[chunk] += 1


class Following:
    """Entries of which `send_last` begins when the GEMM has ended, as on a GPU."""

    def __init__(self, entries: Kernels) -> None:
        self.entries = entries
        self.gemm: Gemm | None = None

    def run(self, name: str, args: Structure, tokens: int) -> None:
        if name == "send_last" and self.gemm is not None:
            self.gemm.thread.join()
        self.entries.run(name, args, tokens)

    def close(self) -> None:
        self.entries.close()


class Sender:
    """Groups on a CPU whose kernels are emulated, and who gives back beside a Gemm."""

    def __init__(self, a2a: weft.AllToAll, folder: str, layout: str = "contiguous") -> None:
        given = {"_column_chunks": 4, "_gemm_ctas": CTAS, **LAYOUTS[layout]}
        self.a2a, self.groups = a2a, ExpertGroups(a2a, **given)  # type: ignore[arg-type]
        self.library = Path(folder) / "kernels.so"
        if a2a.rank == 0:
            compile_groups(a2a.config.shape, self.groups.config, Path(folder))
        a2a.group.barrier()
        self.order: list[int] = ORDERS[0]
        self.stuck: tuple[int, ...] = ()
        self.shape(1, 32)

    def shape(self, ctas: int, threads: int) -> None:
        entries = EmulatedGroups(self.library, self.groups, ctas, threads)
        self.groups._kernels = self.kernels = Following(entries)

    def __call__(self, a2a: weft.AllToAll, groups: ExpertGroups, y: torch.Tensor) -> None:
        assert not groups._buffers.progress.any(), "gather begins to count anew"
        self.kernels.gemm = gemm = Gemm(groups, y, self.order, self.stuck)
        groups._send_beside(gemm.y)
        gemm.thread.join()


def same_bits(group: weft.Group, way: str, layout: str, folder: str) -> None:
    with make(group, CASE, **combining(way), timeout=600.0) as a2a:
        sender = Sender(a2a, folder, layout)
        for ctas, threads in ((1, 32), (3, 96)):
            sender.shape(ctas, threads)
            for case in CASES:
                wanted = round_trip(a2a, sender.groups, case, sent)
                for sender.order in ORDERS if case is CASE else ORDERS[:1]:
                    got = round_trip(a2a, sender.groups, case, sender)
                    assert torch.equal(bits(got), bits(wanted))
        entries = sender.kernels.entries
        assert isinstance(entries, EmulatedGroups)
        with watching(group, entries.library, a2a._site.stride, whole=False) as watch:
            round_trip(a2a, sender.groups, CASE, sender)
        counters = sender.groups._buffers.progress
        begin, end = counters.data_ptr(), counters.data_ptr() + counters.nbytes
        own = [e for e in watch.events() if e.share < 0 and e.rank == group.rank]
        how = {event.how for event in own if begin <= event.offset < end}
        assert how - {"writes weak"} == {"reads acquire gpu"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", ["push", "fp8"])
def test_every_order_of_chunks_gives_the_bits_of_send(ranks, tmp_path, way, layout):
    ranks(2, "threads")(same_bits, way, layout, str(tmp_path))


def ended(group: weft.Group, folder: str, aborts: bool) -> None:
    """Rank 1's GEMM never ends a chunk: both ranks hear of it, and nothing hangs."""
    with make(group, CASE, **combining("push")) as a2a:
        sender = Sender(a2a, folder)
        round_trip(a2a, sender.groups, CASE, sender)
        round_trip(a2a, sender.groups, CASE, sender)
        hurry(a2a, 600.0 if aborts else 1.0)
        sender.stuck = (1,) if group.rank == 1 else ()
        if aborts and group.rank == 1:
            threading.Timer(0.5, a2a.abort).start()
        with pytest.raises(Aborted if aborts else PeerTimeout) as caught:
            round_trip(a2a, sender.groups, CASE, sender)
        words = str(caught.value)
        if aborts:
            assert "called abort()" in words
        elif group.rank == 1:
            assert "rank 1, send_columns, epoch 3: 4 of 6 CTAs of this rank's down" in words
            assert "raise timeout=" in words
        else:
            assert "rank 1 gave up, waiting for its own part" in words
        group.barrier()


@pytest.mark.parametrize("aborts", [False, True], ids=["deadline", "abort"])
def test_a_gemm_that_never_ends_is_named(ranks, tmp_path, aborts):
    ranks(2, "threads")(ended, str(tmp_path), aborts)
