"""A layer on AllToAll: rows come by source rank, are packed by expert, and go home as rank sums."""

from __future__ import annotations

import torch

from weft.alltoall.api import AllToAll
from weft.alltoall.received import Received
from weft.alltoall.rounds import State
from weft.arguments import instance
from weft.errors import OutOfOrder
from weft.grouping.api import ExpertGroups
from weft.moe.experts import ExpertWeights
from weft.moe.mlp import choose_way, layout_for
from weft.moe.options import Chosen, Options
from weft.moe.overlap import check_overlap
from weft.moe.workspace import LayerWorkspace


class RankMajor(LayerWorkspace[Received]):
    """exchange="rank": every overlap, every wire of AllToAll."""

    exchange: AllToAll
    _groups: ExpertGroups | None = None

    @property
    def mid_round(self) -> bool:
        return self.exchange._rounds.state is not State.IDLE

    def dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
    ) -> Received:
        return self.exchange.dispatch(x, ids, weights, num_tokens=num_tokens)

    def run_experts(self, weights: ExpertWeights, received: Received) -> None:
        """Write the exchange's output: every row's weighted sum over this rank's experts."""
        groups = self._ready()
        instance("received", received, Received, "pass what dispatch of layer.exchange returned")
        if self.exchange.num_local_experts:
            self._mlp.up(weights, groups.gather(received))
            groups.scatter(self._mlp.down(weights))

    def finish(
        self,
        weights: ExpertWeights,
        received: Received,
        choice: tuple[torch.Tensor, torch.Tensor | None],
        *,
        out: torch.Tensor | None,
        add: torch.Tensor | None,
    ) -> torch.Tensor:
        exchange, overlap = self.exchange, self.options.overlap
        groups = self._ready()
        grouped = groups.gather(received)
        if exchange.num_local_experts:
            self._mlp.up(weights, grouped)
            self._come_home(weights, groups)
        elif overlap != "push":
            exchange.combine_send()
        self.aside.join()
        end = exchange.combine if overlap == "push" else exchange.combine_recv
        return end(out=out, add=add)

    def close(self) -> None:
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        super().close()

    def _come_home(self, weights: ExpertWeights, groups: ExpertGroups) -> None:
        """The second product, and its sending where the owners do not fetch."""
        if self.options.overlap == "push":
            self._mlp.push(weights)
        else:
            groups.send(self._mlp.down(weights))

    def _ready(self) -> ExpertGroups:
        if self._groups is None:
            raise OutOfOrder("this MoE layer was closed; make a new one")
        return self._groups

    def _choose(self, options: Options) -> Chosen:
        config = self.config
        quantize = options.quantize or ("fp8" if options.fp8 else None)
        device = self.group.device
        way = choose_way(options.gemm, device, config, fp8=options.fp8, quantize=quantize)
        home = check_overlap(options.overlap, options.combine_by, way)
        return Chosen(way, quantize, home)

    def _open_exchange(self) -> None:
        config, options, routing = self.config, self.options, self.config.routing
        self.exchange = AllToAll(
            self.group,
            max_tokens=options.max_tokens,
            top_k=routing.top_k,
            num_experts=routing.num_experts,
            hidden=config.hidden,
            dtype=config.dtype,
            expert_map=options.expert_map,
            timeout=options.timeout,
            first_timeout=options.first_timeout,
            quantize=self.chosen.quantize,
            combine_by=self.chosen.combine_by,
            halves=True,  # sends are calls of their own
            num_sms=options.num_sms,
            programmatic_launch=options.programmatic_launch,
            profile=options.profile,
        )

    def _open_rows(self) -> tuple[int, ...]:
        layout = layout_for(self.chosen.gemm)
        self._groups = groups = ExpertGroups(
            self.exchange,
            max_rows=self.options.max_rows,
            layout=layout,
            programmatic_launch=self.options.programmatic_launch,
        )
        self._max_rows = groups.max_rows
        experts = self.exchange.num_local_experts
        if layout == "masked":
            return (experts, groups.max_rows)
        return (groups.max_rows if experts else 0,)

    def _rows_bytes(self) -> int:
        layout = layout_for(self.chosen.gemm)
        return ExpertGroups.memory_bytes(self.exchange, max_rows=self._max_rows, layout=layout)
