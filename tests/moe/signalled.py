"""A tiled product and the send that waits for its tiles, whichever was enqueued first."""

from __future__ import annotations

import torch

import weft
from tests.moe.overlapping import MOST_TOKENS
from tests.moe.test_layer import settle
from tests.rounds import Round, bits
from tests.sending import make
from weft.gemm import grouped_gemm, plan
from weft.ops.grouping import ExpertGroups, Grouped


class Signalled:
    """A tiled product and the send that waits for its tiles, in two streams."""

    def __init__(self, group: weft.Group, way: str) -> None:
        case = Round(tokens=(MOST_TOKENS,) * group.size, top_k=3, experts=8, hidden=384)
        self.case, self.group, self.turn = case, group, 0
        self.a2a = make(group, case, combine_by=way, max_tokens=MOST_TOKENS, timeout=600.0)
        self.groups = ExpertGroups(self.a2a)
        rows, experts, hidden = self.groups.max_rows, self.groups.num_local_experts, case.hidden
        d = group.device
        generator = torch.Generator(d).manual_seed(group.rank)
        weights = torch.randn(experts, hidden, hidden, generator=generator, device=d) / 20
        self.weights, self.y = weights.bfloat16(), torch.zeros(self.groups._y_shape, device=d)
        self.y = self.y.bfloat16()
        self.plan = plan(experts, 16, hidden, hidden, torch.bfloat16, order="column")
        cells = self.plan.cells(rows, experts, hidden)
        self.cells = torch.zeros(cells, dtype=torch.int32, device=d)
        self.signal = weft.Signal(self.cells, self.plan.block_rows, self.plan.block_columns)
        self.beside: torch.cuda.Stream | None = None
        if d.type == "cuda":
            self.beside = torch.cuda.Stream(priority=-5)

    def product(self, grouped: Grouped) -> None:
        grouped_gemm(
            grouped.x, self.weights, counts=grouped.counts, offsets=grouped.offsets,
            out=self.y, plan=self.plan, signal=self.cells,
        )  # fmt: skip

    def round(self, *, consumer_first: bool) -> torch.Tensor:
        """One round; without a second stream the product can only come first."""
        self.turn += 1
        x, ids, weights, _ = self.case.next(seed=self.turn).of(self.group.rank, self.group.device)
        grouped = self.groups.gather(self.a2a.dispatch(x, ids, weights))
        self.y.fill_(torch.nan)
        out = torch.full_like(x, torch.nan)
        if self.beside is None or not consumer_first:
            self.product(grouped)
        if self.beside is None:
            self.groups.send(self.y, signal=self.signal)
            return self.a2a.combine_recv(out=out)
        self.beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.beside):
            self.groups.send(self.y, signal=self.signal, num_sms=16)
            self.a2a.combine_recv(out=out)
        if consumer_first:
            self.product(grouped)
        torch.cuda.current_stream().wait_stream(self.beside)
        return out

    def plain(self) -> torch.Tensor:
        """The same round, one thing after the other."""
        x, ids, weights, _ = self.case.next(seed=self.turn).of(self.group.rank, self.group.device)
        grouped = self.groups.gather(self.a2a.dispatch(x, ids, weights))
        self.product(grouped)
        self.cells.zero_()
        self.groups.send(self.y)
        return self.a2a.combine_recv()


def signalled(group: weft.Group, rounds: int, consumer_first: bool) -> int:
    """Bytes that differ from the same rounds with one thing after the other."""
    wrong = torch.zeros((), dtype=torch.int64, device=group.device)
    for way in ("push", "choices"):
        layer = Signalled(group, way)
        with layer.a2a:
            for number in range(rounds):
                ahead = consumer_first and number > 1  # loading a kernel may wait for all others
                found = layer.round(consumer_first=ahead)
                wrong += (bits(found) != bits(layer.plain())).sum()
            settle(group)
            layer.a2a.check()
            layer.groups.close()
    return int(wrong)
