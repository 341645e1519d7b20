"""What a layer keeps between calls, whichever exchange it has: buffers, streams, and who sends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Generic, TypeAlias, TypeVar

import torch

from weft.alltoall.api import AllToAll
from weft.alltoall.received import Received
from weft.arguments import instance
from weft.errors import InvalidArgument
from weft.lowlatency.api import LowLatencyAllToAll
from weft.lowlatency.results import ExpertRows
from weft.memory import Group
from weft.memory.driver import in_relaxed_mode
from weft.memory.wire import JSON
from weft.moe.choice import agreed_choice
from weft.moe.experts import ExpertWeights
from weft.moe.mlp import Mlp, make_mlp
from weft.moe.models import MoEConfig
from weft.moe.options import AUTO, Chosen, Options, check_options, manifest
from weft.moe.overlap import OVERLAPS, Beside
from weft.runtime.stream import finish

Exchange: TypeAlias = AllToAll | LowLatencyAllToAll
Rows = TypeVar("Rows", Received, ExpertRows)


class LayerWorkspace(ABC, Generic[Rows]):
    """Serves one layer after the other: nothing in it outlives a call.

    A kind of exchange says what it chooses, opens, sends and brings home; all else is here. Raises
    InvalidArgument, CreationFailed and GeometryMismatch on every rank alike.
    """

    exchange: Exchange
    aside: Beside
    _mlp: Mlp
    _weighed: torch.Tensor

    @in_relaxed_mode
    def __init__(self, group: Group, config: MoEConfig, options: Options) -> None:
        self.group, self.config = group, config
        offers = group.together(lambda: self._offers(options), doing="preparing an MoE layer")
        group.agree(manifest(config, options), what="MoE layer")
        self.choice = agreed_choice(group, config, options, offers)
        self.options = replace(options, overlap=self.choice.overlap)
        self.chosen = offers[self.choice.overlap]
        self._open_exchange()
        try:
            group.together(self._open_buffers, doing="preparing an MoE layer's experts")
        except BaseException:
            self.close()
            raise

    def sizes(self) -> dict[str, JSON]:
        """What tells this workspace from others: rules, and the sizes of the exchange."""
        return {**manifest(self.config, self.options), **self.exchange._geometry.manifest()}

    @property
    def bytes(self) -> int:
        """Bytes of the experts' buffers and of rows by expert on this rank, in ordinary memory."""
        return self._rows_bytes() + sum(t.numel() * t.element_size() for t in self.buffers)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The experts' own memory."""
        return (*self._mlp.buffers, self._weighed)

    @property
    def hides_shared(self) -> bool:
        """Does the shared expert run beside the others' way to combine?"""
        return self.options.overlap != "none"

    @property
    def keeps_no_results(self) -> bool:
        """Do all results of the experts go home as they are made?"""
        return False

    @property
    def capturing(self) -> bool:
        """Is the current stream being captured into a graph?"""
        return self.group.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @property
    @abstractmethod
    def mid_round(self) -> bool:
        """Has something been sent that has not come home?"""

    def weigh(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`round(x * weights)` for rules that weigh the input; x and weights are checked."""
        return torch.mul(x, weights, out=self._weighed[: len(x)])

    def expect(self, tokens: int) -> None:
        """A hint: each rank has about as many tokens as this one."""
        self._mlp.expect(self._rows_of_an_expert(tokens))

    def _rows_of_an_expert(self, tokens: int) -> int:
        """The mean, where each rank has so many tokens."""
        routing = self.config.routing
        rows = tokens * self.exchange.ep_size * routing.top_k
        return -(-rows // routing.num_experts)

    def forget_rows(self) -> None:
        """Let go of the rows that the experts took last."""
        self._mlp.forget()

    def check_call(self) -> None:
        """Refuse a capture that would have to wait for the device, before anything is sent.

        Raises OutOfOrder after `close`.
        """
        self.exchange._check_open()
        if self.chosen.gemm == "loop" and self.capturing:
            raise InvalidArgument(
                "gemm 'loop' reads row counts on the host, which a captured graph cannot do; "
                "build the layer with gemm='tiled' or 'padded'"
            )

    @abstractmethod
    def dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
    ) -> Rows:
        """Send x `[tokens, hidden]` to its experts; what came to this rank's.   weights: or ones.

        Rows from num_tokens on have ids of -1.
        """

    @abstractmethod
    def run_experts(self, weights: ExpertWeights, received: Rows) -> torch.Tensor | None:
        """The experts' results, where combine takes a tensor of them."""

    @abstractmethod
    def finish(
        self,
        weights: ExpertWeights,
        received: Rows,
        choice: tuple[torch.Tensor, torch.Tensor | None],
        *,
        out: torch.Tensor | None,
        add: torch.Tensor | None,
    ) -> torch.Tensor:
        """From received rows to the round's result, in the way of the overlap.

        choice: ids and weights of the dispatch.   add: made in the stream `aside` or the caller's.
        """

    def close(self) -> None:
        """Give everything back; waits for this rank's own work only. Idempotent."""
        self.exchange.close()
        if hasattr(self, "_mlp"):  # else opening it failed
            self._mlp.close()
            self._weighed = self._weighed.new_empty(0)

    @abstractmethod
    def _choose(self, options: Options) -> Chosen:
        """What this rank will do with options that name an overlap. Raises InvalidArgument."""

    @abstractmethod
    def _open_exchange(self) -> None:
        """Set `exchange`. Collective."""

    @abstractmethod
    def _open_rows(self) -> tuple[int, ...]:
        """Sizes of the experts' rows, `[rows]` or `[local_experts, rows]`."""

    @abstractmethod
    def _rows_bytes(self) -> int:
        """Bytes of ordinary memory for rows by expert, as they come."""

    def _offers(self, options: Options) -> dict[str, Chosen]:
        """What this rank will do with each overlap that it can serve, by its name.

        Raises InvalidArgument where it cannot serve the one that was asked for, or none at all.
        """
        check_options(options, instance("config", self.config, MoEConfig))
        found: dict[str, Chosen] = {}
        refused: InvalidArgument | None = None
        for word in OVERLAPS:
            if word == "shared" and not self.config.shared:
                continue  # there would be nothing to overlap
            try:
                found[word] = self._choose(replace(options, overlap=word))
            except InvalidArgument as error:
                # Without its traceback: that holds this frame, which holds the error and the layer.
                refused = refused or error.with_traceback(None)
        if options.overlap != AUTO:
            return found | {options.overlap: self._choose(options)}
        if not found:
            assert refused is not None
            raise InvalidArgument(str(refused))
        return found

    def _open_buffers(self) -> None:
        config, device = self.config, self.group.device
        experts, rows = self.exchange.num_local_experts, self._open_rows()
        self._mlp = make_mlp(
            self.chosen.gemm,
            config,
            rows,
            experts,
            fp8=self.options.fp8,
            quantize=self.chosen.quantize,
            most=self._rows_of_an_expert(self.options.max_tokens),
            programmatic=self.options.programmatic_launch,
            device=device,
            pushes=self.keeps_no_results,
        )
        self.aside = Beside(device)
        weighs = config.routing.weigh == "input"
        held = (self.options.max_tokens if weighs else 0, config.hidden)
        self._weighed = torch.empty(held, dtype=config.dtype, device=device)
        finish(device)
