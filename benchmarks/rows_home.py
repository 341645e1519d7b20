"""Every way in which unquantised rows come home, timed in one run: pairs of dispatch and combine.

    pull                owners read rows from their peers' outboxes, once their flags have come
    push                the experts' ranks store rows at their owners, and flags after them
    flag in data        the same, and each row is its own flag; it is summed as it arrives
    send, push          `ExpertGroups.gather` and `send` between the two, as the MoE layer does
    send, flag in data  the same

All bits are compared with the reference before and after timing. At each size the ways are timed
one after the other, in one process of each GPU.

Usage: python benchmarks/rows_home.py [--ranks 8] [--tokens 1,8,32,128,512,2048] [--out OUT.json]
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import weft
from weft.bench.harness import TIMEOUT, Trials, run
from weft.bench.moe import MoECase, MoETrial
from weft.bench.report import as_json, print_report, write_json
from weft.cli.bench import parse_sizes
from weft.cli.options import wide_console
from weft.grouping.operator import ExpertGroups

WAYS: dict[str, dict[str, Any]] = {
    "pull": {},
    "push": {"combine": "push"},
    "flag in data": {"combine": "push", "_flag_in_data": True},
}
SENT = ("push", "flag in data")


class RowsHome(MoECase):
    """The same pairs in every way."""

    def trials(self, group: weft.Group) -> Trials:
        with ExitStack() as opened:
            exchanges = {way: opened.enter_context(self._open(group, way)) for way in WAYS}
            groups = {way: ExpertGroups(exchanges[way]) for way in SENT}
            for tokens in self.tokens:
                for way, exchange in exchanges.items():
                    yield WayTrial(way, group, self, exchange, tokens)
                for way in SENT:
                    yield SendTrial(way, groups[way], group, self, exchanges[way], tokens)

    def _open(self, group: weft.Group, way: str) -> weft.AllToAll:
        sizes = self.sizes(self.capacity)
        return weft.AllToAll(group, **sizes, **WAYS[way], split_phase=True, timeout=TIMEOUT)

    @property
    def wire(self) -> str:
        return f"{self.dtype} both ways"


class WayTrial(MoETrial):
    """A pair in one way."""

    def __init__(self, way: str, *given: Any) -> None:
        super().__init__(*given)
        self.variant = way


class SendTrial(MoETrial):
    """A pair whose sums `ExpertGroups.send` makes and sends."""

    def __init__(self, way: str, groups: ExpertGroups, *given: Any) -> None:
        super().__init__(*given)
        self.variant, self._groups = f"send, {way}", groups

    def _dispatch(self) -> weft.Received:
        received = super()._dispatch()
        self._rows = self._groups.gather(received).x
        return received

    def _combine(self) -> torch.Tensor:
        self._groups.send(self._rows)
        return self.exchange.combine_recv(out=self.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", default="1,8,32,128,512,2048")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--routing", default="perfect")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report = run(
        RowsHome(
            ranks=given.ranks,
            device=given.device,
            tokens=parse_sizes(given.tokens),
            hidden=given.hidden,
            routing=given.routing,
            samples=given.samples,
        )
    )
    if given.out is not None:
        write_json(given.out, as_json(report))
    print_report(wide_console(), report)
    if report.problem is not None:
        raise SystemExit(f"check failed: {report.problem}")


if __name__ == "__main__":
    main()
