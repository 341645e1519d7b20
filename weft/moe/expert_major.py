"""A layer on LowLatencyAllToAll: rows come by expert, a block for each, and go home one by one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.arguments import instance
from weft.errors import InvalidArgument, OutOfOrder
from weft.lowlatency.api import LowLatencyAllToAll
from weft.lowlatency.results import ExpertRows
from weft.moe.experts import ExpertWeights
from weft.moe.mlp import choose_way
from weft.moe.options import Chosen, Options
from weft.moe.overlap import check_overlap
from weft.moe.tiled_mlp import can_push_rows
from weft.moe.workspace import LayerWorkspace

# Tokens of a rank from which on the first product lets the shared expert begin before it. A product
# that waits on the SMs while dispatch runs is there first, and keeps them: the shared expert's two
# products come behind the others' two. With 8 and 16 tokens that takes 15 us less, with 32 it takes
# 12 us more, from 64 on 2 to 6 (DeepSeek-V3, 4 x H200, 2026-11-22).
YIELDS_FROM = 32


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows as products take them (`weft.moe.mlp.RowsByExpert`); nothing was copied.

    offsets: int32 `[local_experts + 1]`: of blocks that follow each other.
    """

    rows: tuple[torch.Tensor, ...]
    offsets: torch.Tensor
    counts: torch.Tensor
    home: torch.Tensor | None
    broken: torch.Tensor | None

    @property
    def x(self) -> torch.Tensor:
        """The numbers, without their scales."""
        return self.rows[0]


class ExpertMajor(LayerWorkspace[ExpertRows]):
    """exchange="expert": results lie where products left them, or go home as they are made."""

    exchange: LowLatencyAllToAll
    _tokens = 0  # of this rank in this round

    @property
    def keeps_no_results(self) -> bool:
        return self.options.overlap == "push"

    @property
    def mid_round(self) -> bool:
        return any(slot.alive is not None for slot in self.exchange._rounds.slots)

    def check_call(self) -> None:
        super().check_call()
        if self.mid_round:
            raise OutOfOrder("a call while a result of layer.exchange is alive: combine it first")

    def dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
    ) -> ExpertRows:
        self._tokens = len(x)
        return self.exchange.dispatch(x, ids, weights)

    def run_experts(self, weights: ExpertWeights, received: ExpertRows) -> torch.Tensor | None:
        """`[local_experts, rows, hidden]`: what combine takes; overwritten by the next call.

        None where the rows are at home.
        """
        self.exchange._check_open()
        instance("received", received, ExpertRows, "pass what dispatch of layer.exchange returned")
        experts, pushes = len(self._offsets) - 1, received.home is not None
        size = (*received.x.shape[:2], self.config.hidden)
        if experts:
            yields = self.aside.busy and self._tokens >= YIELDS_FROM
            self._mlp.up(weights, self._blocks(received), early=not yields)
        if pushes:
            if experts:
                self._mlp.push(weights)
            return None
        if not experts:
            return torch.empty(size, dtype=self.config.dtype, device=self.group.device)
        return self._mlp.down(weights).view(size)

    def finish(
        self,
        weights: ExpertWeights,
        received: ExpertRows,
        choice: tuple[torch.Tensor, torch.Tensor | None],
        *,
        out: torch.Tensor | None,
        add: torch.Tensor | None,
    ) -> torch.Tensor:
        y = self.run_experts(weights, received)
        self.aside.join()
        return self.exchange.combine(y, *choice, received.handle, out=out, add=add)

    def _blocks(self, received: ExpertRows) -> Blocks:
        scales = () if received.scales is None else (received.scales,)
        rows: tuple[torch.Tensor, ...] = (received.x, *scales)
        if self.chosen.gemm == "loop":  # which takes them as one
            rows = tuple(part.flatten(0, 1) for part in rows)
        home = None if received.home is None else received.home.view(-1)
        return Blocks(rows, self._offsets, received.counts, home, received.broken)

    def _choose(self, options: Options) -> Chosen:
        config, device = self.config, self.group.device
        _check_options(options)
        quantize = options.quantize or ("fp8" if options.fp8 else None)
        way = choose_way(options.gemm, device, config, fp8=options.fp8, quantize=quantize)
        home = check_overlap(options.overlap, options.combine_by, way)
        experts = config.routing.num_experts  # of one rank, at most
        if home == "choices" and not can_push_rows(config, experts, fp8=options.fp8, device=device):
            raise InvalidArgument(
                "overlap 'push', exchange 'expert', whose rows tell of themselves: only Hopper's "
                "own product stores such rows, and does not serve this layer here: use 'shared' or "
                "'none', or exchange='rank'"
            )
        return Chosen(way, quantize, home)

    def _open_exchange(self) -> None:
        config, options, routing = self.config, self.options, self.config.routing
        self.exchange = LowLatencyAllToAll(
            self.group,
            options.max_tokens,
            config.hidden,
            routing.top_k,
            routing.num_experts,
            self.chosen.quantize,
            slots=1,
            combine_by=self.chosen.combine_by,
            dtype=config.dtype,
            expert_map=options.expert_map,
            timeout=options.timeout,
            first_timeout=options.first_timeout,
            num_sms=options.num_sms,
            programmatic_launch=options.programmatic_launch,
            profile=options.profile,
        )

    def _open_rows(self) -> tuple[int, ...]:
        exchange = self.exchange
        experts, rows = exchange.num_local_experts, exchange.ep_size * exchange.max_tokens
        starts = torch.arange(experts + 1, dtype=torch.int32, device=self.group.device)
        self._offsets = starts * rows
        return (experts * rows,) if self.chosen.gemm == "loop" else (experts, rows)

    def _rows_bytes(self) -> int:
        return self.exchange.memory.results


def _check_options(options: Options) -> None:
    """Raises InvalidArgument for what rows by expert do not have."""
    if options.quantize not in (None, "fp8"):
        raise InvalidArgument(
            f"quantize is {options.quantize!r}, exchange 'expert': use 'fp8' or None"
        )
    if options.max_rows is not None:
        raise InvalidArgument(
            f"max_rows is {options.max_rows}, exchange 'expert', where every expert has room for "
            "all tokens of all ranks: leave it out"
        )
