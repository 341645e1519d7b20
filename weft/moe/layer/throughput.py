# SPDX-License-Identifier: Apache-2.0
"""mode="throughput": rows by source rank from AllToAll, regrouped by expert with ExpertGroups."""

from __future__ import annotations

import torch

from weft.alltoall.operator import AllToAll
from weft.alltoall.received import Received
from weft.arguments import check_instance
from weft.grouping.config import Layout
from weft.grouping.operator import ExpertGroups
from weft.moe.experts.torch_experts import RowsByExpert, select_torch_layout
from weft.moe.experts.weights import ExpertWeights
from weft.moe.layer.config import LayerPlan, build_exchange_kwargs
from weft.moe.layer.workspace import LayerWorkspace, SharedExpert
from weft.moe.routing.router import Routed


def select_layout(plan: LayerPlan, device: torch.device) -> Layout:
    """Return the layout of rows by expert that the GEMM needs."""
    return "contiguous" if plan.gemm == "grouped" else select_torch_layout(device)


class ThroughputWorkspace(LayerWorkspace[Received]):
    """Workspace on AllToAll, with every overlap and every format that AllToAll supports."""

    exchange: AllToAll
    _groups: ExpertGroups

    def run(
        self,
        weights: ExpertWeights,
        shared: SharedExpert | None,
        x: torch.Tensor,
        routed: Routed,
        num_tokens: torch.Tensor | None,
        rows: int | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        exchange, experts = self.exchange, self.experts
        if out is not None:
            exchange.check_not_symmetric("out", out)  # combine would check it only after dispatch
        sent, scale = self._prepare_rows(x, routed.weights)
        self._tokens = len(x)
        self._mark_side_stream(shared)
        # On one host the cost of dispatch does not depend on `rows`, only on the tokens sent.
        max_rows = None if rows is None or self.group.hosts == 1 else max(rows, 1)
        received = exchange.dispatch(sent, routed.ids, scale, num_tokens=num_tokens, rows=max_rows)
        add = self._run_shared(shared, x)
        grouped = self._gather(received)
        if self.plan.gemm_push:
            experts.run_push(weights, grouped, tokens=len(x))
            self.side_stream.join()
            return exchange.combine(out=out, add=add)
        self._groups.send(experts.run(weights, grouped, tokens=len(x)))
        self.side_stream.join()
        return exchange.combine_recv(out=out, add=add)

    def run_experts(self, weights: ExpertWeights, received: Received) -> None:
        """Write each row's weighted sum over this rank's experts to the exchange's output."""
        check_instance("received", received, Received, "pass the result of layer.exchange.dispatch")
        y = self.experts.run(weights, self._gather(received), tokens=self._tokens)
        self._groups.scatter(y)

    def _gather(self, received: Received) -> RowsByExpert:
        grouped = self._groups.gather(received)
        return RowsByExpert(grouped.rows, grouped.offsets, grouped.counts, grouped.dst_addr)

    def close(self) -> None:
        if hasattr(self, "_groups"):  # not set if the constructor failed early
            self._groups.close()
        super().close()

    def _create_exchange(self) -> AllToAll:
        sizes = build_exchange_kwargs(self.config, self.options, self.plan)
        # ExpertGroups.send replaces the sending half of combine, so combine must be split.
        return AllToAll(self.group, **sizes, **self.options.get_run_options(), split_phase=True)

    def _allocate_rows(self) -> tuple[int, ...]:
        self._groups = ExpertGroups(
            self.exchange,
            max_rows=self.options.max_rows,
            layout=select_layout(self.plan, self.group.device),
            programmatic_launch=self.options.programmatic_launch,
        )
        return self._groups.y_shape[:-1]
