# SPDX-License-Identifier: Apache-2.0
"""Workspace of an MoE layer, common to both modes: all-to-all, experts' buffers, side stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Generic, TypeAlias, TypeVar
from weakref import WeakSet

import torch

from weft.alltoall.operator import AllToAll
from weft.alltoall.received import Received
from weft.errors import OutOfOrder
from weft.group import Group
from weft.group.messages import Creation
from weft.group.wire import JSON
from weft.heap.local import Allocate, allocate_local
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.results import ExpertRows
from weft.moe.experts.grouped_experts import GroupedExperts
from weft.moe.experts.torch_experts import TorchExperts
from weft.moe.experts.weights import ExpertWeights
from weft.moe.layer.choice import LayerChoice
from weft.moe.layer.config import LayerOptions, LayerPlan
from weft.moe.models import MoEConfig
from weft.moe.routing.router import Routed
from weft.runtime.stream import synchronize_stream

Exchange: TypeAlias = AllToAll | LowLatencyAllToAll
Experts: TypeAlias = GroupedExperts | TorchExperts  # same methods, documented by TorchExperts
SharedExpert: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Rows = TypeVar("Rows", Received, ExpertRows)


class SideStream:
    """A stream that runs concurrently with the caller's. On CPU ranks it does nothing.

    After `join`, the caller's stream may use memory that was allocated on this one. Later work here
    starts only after a new mark in the caller's stream, so the memory is not reused too early.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._busy = device, False
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """Record the point in the caller's stream after which this stream's work may start."""
        if self._stream is not None:
            self._mark.record(torch.cuda.current_stream(self._device))

    @property
    def is_busy(self) -> bool:
        """Whether work has been enqueued since the last `join`; always False on CPU ranks."""
        return self._busy

    def enqueue_after_mark(self) -> AbstractContextManager[object]:
        """Return a context that enqueues work on this stream, to start after the mark."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(self._mark)
        self._busy = True
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Make the caller's stream wait for the work enqueued here since the last `join`."""
        # Without such work the wait is needless, and invalid in a capture.
        if self._stream is not None and self._busy:
            self._busy = False
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def create_experts(
    config: MoEConfig,
    options: LayerOptions,
    plan: LayerPlan,
    rows: tuple[int, ...],
    experts: int,
    ranks: int,
    allocate: Allocate,
) -> Experts:
    """Create a rank's experts with buffers for `rows`."""
    if plan.gemm == "torch":
        return TorchExperts(config, rows, quantize=plan.quantize, allocate=allocate)
    return GroupedExperts(
        config,
        rows,
        experts,
        fp8=options.fp8,
        num_ranks=ranks,
        max_tokens=options.max_tokens,
        use_pdl=options.programmatic_launch,
        allocate=allocate,
        gemm_push=plan.gemm_push,
    )


class LayerWorkspace(ABC, Generic[Rows]):
    """Memory and streams that a layer shares with its siblings; keeps no state between calls.

    A subclass per mode opens the exchange and runs the rounds. The constructor raises
    CreationFailed and GeometryMismatch on every rank.
    """

    creation: Creation  # set by the layer that creates the workspace
    exchange: Exchange
    side_stream: SideStream
    experts: Experts
    _weighted_x: torch.Tensor

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
        self.layers: WeakSet[object] = WeakSet()  # the open layers
        self._tokens = options.max_tokens  # of the latest call; selects the GEMM plans
        self.exchange = self._create_exchange()
        try:
            group.run_collective(self._allocate_buffers, action="preparing an MoE layer's experts")
        except BaseException:
            self.close()
            raise

    def manifest(self) -> dict[str, JSON]:
        """Return the layer's rules and the all-to-all's sizes, by name."""
        rules = self.options.manifest(self.config)
        return {
            **rules,
            "mode": self.plan.mode,
            "overlap": self.plan.overlap,
            **self.exchange.config.manifest(),
        }

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The experts' buffers."""
        return (*self.experts.buffers, self._weighted_x)

    @property
    def is_mid_round(self) -> bool:
        """True between dispatch and combine."""
        return self.exchange.is_mid_round

    @abstractmethod
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
        """Run one round of a layer: dispatch, experts, combine. The arguments must be checked.

        Args:
            routed: Ids of physical experts, -1 from row num_tokens on, and weights.
            rows: Maximum tokens of any rank. Default: max_tokens.
        """

    @abstractmethod
    def run_experts(self, weights: ExpertWeights, received: Rows) -> torch.Tensor | None:
        """Run the experts; return their results if combine needs them as a tensor, else None."""

    def begin(self, call: str) -> None:
        """Begin a call; `end` must follow.

        Args:
            call: Name of the call, for errors.

        Raises:
            OutOfOrder: another call is running, or a round of the exchange is not combined.
            GroupError: the group is broken.
        """
        if not self.exchange.layer_lock.acquire(blocking=False):
            raise OutOfOrder(
                f"{call} while another thread is in a call of this MoE layer, or of a layer with "
                "the same workspace: make these calls one after the other, in the same order on "
                "every rank"
            )
        try:
            self.exchange.check_running()  # first: the buffers of a group asleep must not be used
            if self.is_mid_round:
                raise OutOfOrder(f"{call} during a round of layer.exchange: combine it first")
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End the call."""
        self.exchange.layer_lock.release()

    @contextmanager
    def exclude_calls(self, call: str) -> Iterator[None]:
        """Exclude calls of all layers and of the exchange. Raises OutOfOrder if one is running."""
        self.begin(call)
        try:
            self.exchange.begin_call(call)
            try:
                yield
            finally:
                self.exchange.end_call()
        finally:
            self.end()

    def close(self) -> None:
        """Free everything; waits only for this rank's own work. Idempotent."""
        try:
            self.exchange.close()
        finally:
            for buffers in ("experts", "_weighted_x"):
                vars(self).pop(buffers, None)

    def _prepare_rows(
        self, x: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the rows to send and the weights for combine.

        If the routing weighs inputs, these are `round(x * weights)` and None.
        """
        if self.config.routing.weigh != "input":
            return x, weights
        return torch.mul(x, weights, out=self._weighted_x[: len(x)]), None

    def _mark_side_stream(self, shared: SharedExpert | None) -> None:
        """Let the shared expert start from this point of the caller's stream."""
        if shared is not None and self.plan.overlap != "none":
            self.side_stream.mark()

    def _run_shared(self, shared: SharedExpert | None, x: torch.Tensor) -> torch.Tensor | None:
        """Return the shared expert's result; with an overlap, it runs on the side stream."""
        if shared is None:
            return None
        if self.plan.overlap == "none":
            return shared(x)
        with self.side_stream.enqueue_after_mark():
            return shared(x)

    @abstractmethod
    def _create_exchange(self) -> Exchange:
        """Create the all-to-all of the plan. Collective."""

    @abstractmethod
    def _allocate_rows(self) -> tuple[int, ...]:
        """Allocate rows by expert; return their sizes, `[rows]` or `[local_experts, rows]`."""

    def _allocate_buffers(self) -> None:
        config, plan, options, device = self.config, self.plan, self.options, self.group.device
        rows = self._allocate_rows()
        experts, ranks = self.exchange.num_local_experts, self.exchange.ep_size
        allocate = partial(allocate_local, self.group)
        self.experts = create_experts(config, options, plan, rows, experts, ranks, allocate)
        self.side_stream = SideStream(device)
        num_weighted_rows = options.max_tokens if config.routing.weigh == "input" else 0
        (self._weighted_x,) = allocate([((num_weighted_rows, config.hidden), config.dtype)])
        synchronize_stream(device)
