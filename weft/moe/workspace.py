# SPDX-License-Identifier: Apache-2.0
"""What a layer keeps between calls, in either mode: all-to-all, experts' buffers, a stream."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Generic, TypeAlias, TypeVar
from weakref import WeakSet

import torch

from weft.alltoall.operator import AllToAll
from weft.alltoall.received import Received
from weft.errors import OutOfOrder
from weft.group import Group
from weft.group.messages import Creation
from weft.group.wire import JSON
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.results import ExpertRows
from weft.moe.choice import LayerChoice
from weft.moe.config import LayerOptions, LayerPlan
from weft.moe.experts import ExpertWeights
from weft.moe.grouped_experts import GroupedExperts
from weft.moe.models import MoEConfig
from weft.moe.router import Routed
from weft.moe.torch_experts import TorchExperts
from weft.runtime.stream import synchronize_stream

Exchange: TypeAlias = AllToAll | LowLatencyAllToAll
Experts: TypeAlias = GroupedExperts | TorchExperts  # the same calls; TorchExperts documents them
Shared: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Rows = TypeVar("Rows", Received, ExpertRows)


class SideStream:
    """A stream beside the caller's; on CPU ranks there is one stream only, and this is it.

    Memory that is allocated within and used by the caller after `join` is not handed out again
    before the caller has used it: all later use of the stream begins after the caller's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._busy = device, False
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """What is enqueued within `after_mark` comes after all that the caller's stream holds."""
        if self._stream is not None:
            self._mark.record(torch.cuda.current_stream(self._device))

    @property
    def busy(self) -> bool:
        """Has something been enqueued here since the last `join`? Never on CPU ranks."""
        return self._busy

    def after_mark(self) -> AbstractContextManager[object]:
        """Enqueue here what may run beside all that the caller has enqueued since `mark`."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(self._mark)
        self._busy = True
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """The caller's stream goes on after all that was enqueued here since the last `join`.

        Nothing was: then there is nothing to wait for, which a capture would even refuse.
        """
        if self._stream is not None and self._busy:
            self._busy = False
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def make_experts(
    config: MoEConfig,
    options: LayerOptions,
    plan: LayerPlan,
    rows: tuple[int, ...],
    experts: int,
    ranks: int,
    device: torch.device,
) -> Experts:
    """A rank's experts, with buffers for so many rows."""
    if plan.gemm == "torch":
        return TorchExperts(config, rows, quantize=plan.quantize, device=device)
    return GroupedExperts(
        config,
        rows,
        experts,
        fp8=options.fp8,
        ranks=ranks,
        max_tokens=options.max_tokens,
        programmatic=options.programmatic_launch,
        device=device,
        gemm_push=plan.gemm_push and plan.mode == "low_latency",
    )


class LayerWorkspace(ABC, Generic[Rows]):
    """Serves one layer after the other: nothing in it outlives a call.

    A mode says what it opens and how a call runs; all else is here. Raises CreationFailed and
    GeometryMismatch on every rank alike.
    """

    creation: Creation  # of this workspace, set by the layer that makes it
    exchange: Exchange
    side_stream: SideStream
    experts: Experts
    _weighed: torch.Tensor

    def __init__(
        self,
        group: Group,
        config: MoEConfig,
        options: LayerOptions,
        plan: LayerPlan,
        choice: LayerChoice,
    ) -> None:
        self.group, self.config, self.options = group, config, options
        self.plan, self.choice = plan, choice
        self.layers: WeakSet[object] = WeakSet()  # that are open
        self._busy = threading.Lock()  # taken by a call of a layer, and by a relocation
        self._tokens = options.max_tokens  # of the latest call: what the experts are planned for
        self.exchange = self._open_exchange()
        try:
            group.together(self._open_buffers, doing="preparing an MoE layer's experts")
        except BaseException:
            self.close()
            raise

    def sizes(self) -> dict[str, JSON]:
        """What distinguishes this workspace from others: rules, and the sizes of the all-to-all."""
        rules = self.options.manifest(self.config)
        return {
            **rules,
            "mode": self.plan.mode,
            "overlap": self.plan.overlap,
            **self.exchange.config.manifest(),
        }

    @property
    def bytes(self) -> int:
        """Bytes of the experts' buffers and of rows by expert on this rank, in ordinary memory."""
        return self._rows_bytes() + sum(t.numel() * t.element_size() for t in self.buffers)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The experts' own memory."""
        return (*self.experts.buffers, self._weighed)

    @property
    def mid_round(self) -> bool:
        """Has something been sent whose sums have not come back?"""
        return self.exchange._mid_round

    @abstractmethod
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
        """One round of a layer with these experts: dispatch, experts, combine; arguments checked.

        routed: of physical experts; rows from num_tokens on have ids of -1.
        rows: the most tokens that any rank has, or None for max_tokens.
        """

    @abstractmethod
    def run_experts(self, weights: ExpertWeights, received: Rows) -> torch.Tensor | None:
        """The experts' results, where combine takes a tensor of them."""

    def begin(self, doing: str) -> None:
        """A call begins; `end` must follow.

        Raises OutOfOrder while another one runs or a round of the exchange is not combined, and
        what broke the group.
        """
        if not self._busy.acquire(blocking=False):
            raise OutOfOrder(
                f"{doing} while another thread is in a call of this MoE layer, or of a layer with "
                "the same workspace: make these calls one after the other, in the same order on "
                "every rank"
            )
        try:
            if self.mid_round:
                self.exchange._check_running()
                raise OutOfOrder(f"{doing} within a round of layer.exchange: combine it first")
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """The call that began is over."""
        self._busy.release()

    @contextmanager
    def alone(self, doing: str) -> Iterator[None]:
        """Inside, neither a layer nor the exchange makes a call. Raises OutOfOrder within one."""
        self.begin(doing)
        try:
            self.exchange._begin(doing)
            try:
                yield
            finally:
                self.exchange._end()
        finally:
            self.end()

    def close(self) -> None:
        """Give everything back; waits for this rank's own work only. Idempotent."""
        try:
            self.exchange.close()
        finally:
            for buffers in ("experts", "_weighed"):
                vars(self).pop(buffers, None)

    def _sent(
        self, x: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is sent of x, and the weights of combine.

        `round(x * weights)`, and none, for rules that weigh the input.
        """
        if self.config.routing.weigh != "input":
            return x, weights
        return torch.mul(x, weights, out=self._weighed[: len(x)]), None

    def _mark(self, shared: Shared | None) -> None:
        """From here on, what the side stream makes may run beside the caller's stream."""
        if shared is not None and self.plan.overlap != "none":
            self.side_stream.mark()

    def _run_shared(self, shared: Shared | None, x: torch.Tensor) -> torch.Tensor | None:
        """The shared expert's rows; with an overlap, made in the side stream from its mark on."""
        if shared is None:
            return None
        if self.plan.overlap == "none":
            return shared(x)
        with self.side_stream.after_mark():
            return shared(x)

    @abstractmethod
    def _open_exchange(self) -> Exchange:
        """The all-to-all of the plan. Collective."""

    @abstractmethod
    def _open_rows(self) -> tuple[int, ...]:
        """Sizes of the experts' rows, `[rows]` or `[local_experts, rows]`."""

    @abstractmethod
    def _rows_bytes(self) -> int:
        """Bytes of ordinary memory for rows by expert, as they come."""

    def _open_buffers(self) -> None:
        config, plan, options, device = self.config, self.plan, self.options, self.group.device
        rows = self._open_rows()
        experts, ranks = self.exchange.num_local_experts, self.exchange.ep_size
        self.experts = make_experts(config, options, plan, rows, experts, ranks, device)
        self.side_stream = SideStream(device)
        weighs = config.routing.weigh == "input"
        held = (options.max_tokens if weighs else 0, config.hidden)
        self._weighed = torch.empty(held, dtype=config.dtype, device=device)
        synchronize_stream(device)
