# SPDX-License-Identifier: Apache-2.0
"""mode="throughput": AllToAll brings rows by source rank, ExpertGroups packs them by expert."""

from __future__ import annotations

import torch

from weft.alltoall.operator import AllToAll
from weft.alltoall.received import Received
from weft.arguments import instance
from weft.grouping.config import Layout
from weft.grouping.operator import ExpertGroups, buffer_bytes
from weft.moe.config import LayerPlan, exchange_sizes
from weft.moe.experts import ExpertWeights
from weft.moe.router import Routed
from weft.moe.torch_experts import RowsByExpert, torch_layout
from weft.moe.workspace import LayerWorkspace, Shared


def layout_of(plan: LayerPlan, device: torch.device) -> Layout:
    """How the GEMM wants rows by expert."""
    return "contiguous" if plan.gemm == "grouped" else torch_layout(device)


class ThroughputWorkspace(LayerWorkspace[Received]):
    """Every overlap, and everything that AllToAll can carry."""

    exchange: AllToAll
    _groups: ExpertGroups

    def run(
        self,
        weights: ExpertWeights,
        shared: Shared | None,
        x: torch.Tensor,
        routed: Routed,
        num_tokens: torch.Tensor | None,
        rows: int | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        exchange, experts = self.exchange, self.experts
        if out is not None:
            exchange._check_outside("out", out)  # combine would, when tokens are away
        sent, scale = self._sent(x, routed.weights)
        self._tokens = len(x)
        self._mark(shared)
        # On one host stores go to tokens' slots, so few tokens cost no more with max_tokens.
        most = None if rows is None or self.group.hosts == 1 else max(rows, 1)
        received = exchange.dispatch(sent, routed.ids, scale, num_tokens=num_tokens, rows=most)
        add = self._run_shared(shared, x)
        experts.up(weights, self._gather(received), tokens=len(x))
        if self.plan.gemm_push:
            experts.push(weights)
            self.side_stream.join()
            return exchange.combine(out=out, add=add)
        self._groups.send(experts.down(weights))
        self.side_stream.join()
        return exchange.combine_recv(out=out, add=add)

    def run_experts(self, weights: ExpertWeights, received: Received) -> None:
        """Write the exchange's output: every row's weighted sum over this rank's experts."""
        instance("received", received, Received, "pass what dispatch of layer.exchange returned")
        self.experts.up(weights, self._gather(received), tokens=self._tokens)
        self._groups.scatter(self.experts.down(weights))

    def _gather(self, received: Received) -> RowsByExpert:
        found = self._groups.gather(received)
        return RowsByExpert(found.rows, found.offsets, found.counts, found.dst_addr)

    def close(self) -> None:
        if hasattr(self, "_groups"):  # else opening it failed
            self._groups.close()
        super().close()

    def _open_exchange(self) -> AllToAll:
        sizes = exchange_sizes(self.config, self.options, self.plan)
        # Halves, because sends are calls of their own.
        return AllToAll(self.group, **sizes, **self.options.of_exchange(), split_phase=True)

    def _open_rows(self) -> tuple[int, ...]:
        self._groups = ExpertGroups(
            self.exchange,
            max_rows=self.options.max_rows,
            layout=layout_of(self.plan, self.group.device),
            programmatic_launch=self.options.programmatic_launch,
        )
        return self._groups._y_shape[:-1]

    def _rows_bytes(self) -> int:
        return buffer_bytes(self.exchange.config, self._groups.config, self.group.device)
