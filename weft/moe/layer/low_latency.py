# SPDX-License-Identifier: Apache-2.0
"""mode="low_latency": expert-major rows from LowLatencyAllToAll, returned one by one."""

from __future__ import annotations

import torch

from weft.arguments import check_instance
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.results import ExpertRows
from weft.moe.experts.torch_experts import RowsByExpert, select_torch_layout
from weft.moe.experts.weights import ExpertWeights
from weft.moe.layer.config import LayerPlan, build_exchange_kwargs
from weft.moe.layer.workspace import LayerWorkspace, SharedExpert
from weft.moe.routing.router import Routed

# Tokens per rank from which the first GEMM starts late, so that the shared expert can start before
# it. A GEMM that starts while dispatch runs occupies the SMs and waits on them, so the shared
# expert's two GEMMs run after the routed experts' two. An early start takes 15 us less at 8 and 16
# tokens, 12 us more at 32, and 2 to 6 us more from 64 on (DeepSeek-V3, 4 x H200, 2026-11-22).
LATE_START_TOKENS = 32


def uses_packed_rows(plan: LayerPlan, device: torch.device) -> bool:
    """Whether the experts use all blocks as one packed tensor."""
    return plan.gemm == "torch" and select_torch_layout(device) == "contiguous"


class LowLatencyWorkspace(LayerWorkspace[ExpertRows]):
    """Workspace on LowLatencyAllToAll. Combine reads results in place, or the GEMM pushes them."""

    exchange: LowLatencyAllToAll

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
        if out is not None:
            self.exchange.check_not_symmetric("out", out)
        ids = routed.ids
        sent, scale = self._prepare_rows(x, routed.weights)
        self._tokens = len(x)
        self._mark_side_stream(shared)
        received = self.exchange.dispatch(sent, ids, scale)
        add = self._run_shared(shared, x)
        y = self.run_experts(weights, received)
        self.side_stream.join()
        return self.exchange.combine(y, ids, scale, received.handle, out=out, add=add)

    def run_experts(self, weights: ExpertWeights, received: ExpertRows) -> torch.Tensor | None:
        """Return `[local_experts, rows, hidden]` for combine, or None if the rows were pushed.

        The next call overwrites the result.
        """
        check_instance(
            "received", received, ExpertRows, "pass the result of layer.exchange.dispatch"
        )
        late = self.side_stream.is_busy and self._tokens >= LATE_START_TOKENS
        rows, tokens = self._build_rows_by_expert(received), self._tokens
        if received.dst_addr is not None:
            self.experts.run_push(weights, rows, tokens=tokens, early=not late)
            return None
        y = self.experts.run(weights, rows, tokens=tokens, early=not late)
        return y.view(*received.x.shape[:2], self.config.hidden)

    def _build_rows_by_expert(self, received: ExpertRows) -> RowsByExpert:
        scales = () if received.scales is None else (received.scales,)
        rows: tuple[torch.Tensor, ...] = (received.x, *scales)
        if self._packed:
            rows = tuple(part.flatten(0, 1) for part in rows)  # views: blocks are contiguous
        dst_addr = None if received.dst_addr is None else received.dst_addr.view(-1)
        return RowsByExpert(rows, self._offsets, received.counts, dst_addr, received.abort_flag)

    def _create_exchange(self) -> LowLatencyAllToAll:
        sizes = build_exchange_kwargs(self.config, self.options, self.plan)
        return LowLatencyAllToAll(self.group, **sizes, **self.options.get_run_options())

    def _allocate_rows(self) -> tuple[int, ...]:
        self._packed = uses_packed_rows(self.plan, self.group.device)
        exchange = self.exchange
        experts, rows = exchange.num_local_experts, exchange.ep_size * exchange.max_tokens
        starts = torch.arange(experts + 1, dtype=torch.int32, device=self.group.device)
        self._offsets = starts * rows
        return (experts * rows,) if self._packed else (experts, rows)
