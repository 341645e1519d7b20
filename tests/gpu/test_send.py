"""Sends beside their products: tiles that are signalled, rows that are stored at their homes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from tests.rounds import Round, bits
from tests.sending import make
from weft.errors import InvalidArgument, SignalTimeout
from weft.ops.grouping import ExpertGroups, Grouped

triton = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")
pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 16, 128
CASE = Round(tokens=(64, 64), hidden=7168, top_k=8, experts=32, router="holes")


@triton.jit
def multiply(
    source, to, offsets, counts, cells, home, hidden,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AT_HOME: tl.constexpr,
):  # fmt: skip
    """Copy the rows of each expert, tile by tile, as an epilogue stores them."""
    expert, block = tl.program_id(0), tl.program_id(2)
    count, start = tl.load(counts + expert), tl.load(offsets + expert)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(1) * ROWS < count:
        mask = (row[:, None] < count) & (column[None, :] < hidden)
        at = (start + row).to(tl.int64)[:, None] * hidden + column[None, :]
        value = tl.load(source + at, mask)
        if AT_HOME:
            address = tl.load(home + start + row, row < count, other=0)
            tl.store(
                address.to(tl.pointer_type(tl.bfloat16))[:, None] + column[None, :], value, mask
            )
        else:
            tl.store(to + at, value, mask)
            tl.debug_barrier()
            tl.atomic_add(cells + block, 1, sem="release", scope="gpu")


class Layer:
    """One all-to-all with results to send, and one that scatters the same."""

    def __init__(self, group: weft.Group, way: str, **options: object) -> None:
        plain = "fp8" if way == "fp8" else "pull"
        sizes = {"max_tokens": 64, "timeout": 10.0, **options}
        self.a2a = make(group, CASE, combine_by=way, **sizes)
        self.beside = make(group, CASE, combine_by=plain, **sizes)
        self.groups, self.others = ExpertGroups(self.a2a), ExpertGroups(self.beside)
        d, shape = group.device, self.groups._y_shape
        self.source = torch.randn(shape, device=d).bfloat16()
        self.written = torch.full_like(self.source, torch.nan)
        self.cells = torch.zeros(CASE.hidden // COLUMNS, dtype=torch.int32, device=d)
        self.inputs = tuple(t.clone() for t in CASE.of(group.rank, d)[:3])
        self.out, self.other = torch.empty_like(self.inputs[0]), torch.cuda.Stream()
        self.signal = weft.Signal(self.cells, ROWS, COLUMNS)

    def product(self, grouped: Grouped, at_home: bool = False) -> None:
        experts = len(grouped.counts)
        grid = (experts, -(-len(self.source) // ROWS), len(self.cells))
        home = grouped.slot if grouped.home is None else grouped.home
        multiply[grid](
            self.source, self.written, grouped.offsets, grouped.counts, self.cells, home,
            CASE.hidden, ROWS, COLUMNS, at_home,
        )  # fmt: skip

    def gather(self) -> Grouped:
        return self.groups.gather(self.a2a.dispatch(*self.inputs))

    def signalled(self) -> None:
        """The product in this stream, the send beside it."""
        grouped = self.gather()
        self.other.wait_stream(torch.cuda.current_stream())
        self.product(grouped)
        with torch.cuda.stream(self.other):
            self.groups.send(self.written, signal=self.signal, num_sms=8)
            self.a2a.combine_recv(out=self.out)
        torch.cuda.current_stream().wait_stream(self.other)

    def stored(self) -> None:
        """The product stores every row at its home."""
        self.product(self.gather(), at_home=True)
        self.groups.sent()
        self.a2a.combine_recv(out=self.out)

    def check(self) -> None:
        """The same round scattered gives the same bits; nothing is left in the cells."""
        self.others.gather(self.beside.dispatch(*self.inputs))
        self.others.scatter(self.source)
        wanted = self.beside.combine()
        torch.cuda.synchronize()
        self.a2a.check()
        assert torch.equal(bits(self.out), bits(wanted))
        assert not bool(self.cells.any())


def replayed(group: weft.Group, way: str, name: str) -> None:
    layer = Layer(group, way)
    run: Callable[[], None] = getattr(layer, name)
    for _ in range(3):
        run()
        layer.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(50):
        fresh = CASE.next(seed=seed).of(group.rank, group.device)
        for mine, new in zip(layer.inputs, fresh[:3], strict=True):
            mine.copy_(new)
        layer.written.fill_(torch.nan)
        graph.replay()
        layer.check()


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("push", "signalled"),
        ("fp8", "signalled"),
        ("choices", "signalled"),
        ("choices", "stored"),
    ],
)
def test_results_come_home_beside_their_product(ranks, way, name):
    ranks(2, "cuda")(replayed, way, name)


def crowded(group: weft.Group) -> None:
    """A send that came first, and waits on all SMs but one, does not keep its product out."""
    layer = Layer(group, "push")
    layer.signalled()  # everything is loaded now
    layer.check()
    sms = torch.cuda.get_device_properties().multi_processor_count
    grouped = layer.gather()
    with pytest.raises(InvalidArgument, match=f"this GPU has 1..{sms - 1} to a send that waits"):
        layer.groups.send(layer.written, signal=layer.signal, num_sms=sms)
    layer.other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(layer.other):
        layer.groups.send(layer.written, signal=layer.signal, num_sms=sms - 1)
        layer.a2a.combine_recv(out=layer.out)
    layer.product(grouped)
    torch.cuda.current_stream().wait_stream(layer.other)
    layer.check()


def test_a_waiting_send_leaves_room_for_its_product(ranks):
    ranks(1, "cuda")(crowded)


def unsignalled(group: weft.Group) -> str:
    layer = Layer(group, "push", timeout=1.0, first_timeout=1.0)
    layer.gather()
    layer.groups.send(layer.written, signal=layer.signal, num_sms=4)
    torch.cuda.synchronize()
    with pytest.raises(SignalTimeout) as caught:
        layer.a2a.check()
    return str(caught.value)


def test_a_product_that_does_not_come_ends_in_time(ranks):
    (text,) = ranks(1, "cuda")(unsignalled)
    assert "block 0 of columns shows 0 of" in text
