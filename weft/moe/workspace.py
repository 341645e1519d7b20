"""What a layer keeps between calls, in either mode: all-to-all, experts' buffers, a stream."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Generic, NamedTuple, TypeAlias, TypeVar
from weakref import WeakSet

import torch

from weft.alltoall.operator import AllToAll
from weft.alltoall.received import Received
from weft.errors import OutOfOrder
from weft.lowlatency.api import LowLatencyAllToAll
from weft.lowlatency.results import ExpertRows
from weft.memory import Group
from weft.memory.wire import JSON
from weft.moe.choice import LayerChoice
from weft.moe.experts import ExpertWeights
from weft.moe.grouped_experts import GroupedExperts
from weft.moe.models import MoEConfig
from weft.moe.plan import LayerPlan, Options
from weft.moe.router import Routed
from weft.moe.side_stream import SideStream
from weft.moe.torch_experts import Experts, TorchExperts
from weft.runtime.stream import capturing, finish

Exchange: TypeAlias = AllToAll | LowLatencyAllToAll
Shared: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Rows = TypeVar("Rows", Received, ExpertRows)


class Round(NamedTuple):
    """What one round of a layer takes, and where its sums go; as in `MoE.__call__`.

    routed: of physical experts; rows from num_tokens on have ids of -1.
    """

    x: torch.Tensor
    routed: Routed
    num_tokens: torch.Tensor | None
    out: torch.Tensor | None


class LayerWorkspace(ABC, Generic[Rows]):
    """Serves one layer after the other: nothing in it outlives a call.

    A mode says what it opens and how a call runs; all else is here. Raises CreationFailed and
    GeometryMismatch on every rank alike.
    """

    exchange: Exchange
    side_stream: SideStream
    _experts: Experts
    _weighed: torch.Tensor

    def __init__(
        self,
        group: Group,
        config: MoEConfig,
        options: Options,
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
        return (*self._experts.buffers, self._weighed)

    @property
    def capturing(self) -> bool:
        """Is the current stream being captured into a graph?"""
        return capturing(self.group.device)

    @property
    @abstractmethod
    def mid_round(self) -> bool:
        """Has something been sent whose sums have not come back?"""

    @abstractmethod
    def run(self, weights: ExpertWeights, shared: Shared | None, call: Round) -> torch.Tensor:
        """One round of a layer with these experts: dispatch, experts, combine."""

    @abstractmethod
    def run_experts(self, weights: ExpertWeights, received: Rows) -> torch.Tensor | None:
        """The experts' results, where combine takes a tensor of them."""

    def check_call(self) -> None:
        """Raises OutOfOrder after `close`, before anything is sent."""
        self.exchange._check_open()

    def begin(self, doing: str) -> None:
        """A call begins; `end` must follow. Raises OutOfOrder while another one runs."""
        if not self._busy.acquire(blocking=False):
            raise OutOfOrder(
                f"{doing} while another thread is in a call of this MoE layer, or of a layer with "
                "the same workspace: make these calls one after the other, in the same order on "
                "every rank"
            )

    def end(self) -> None:
        """The call that began is over."""
        self._busy.release()

    @contextmanager
    def alone(self, doing: str) -> Iterator[None]:
        """Inside, neither a layer nor the exchange makes a call. Raises OutOfOrder within one."""
        self.begin(doing)
        try:
            if self.mid_round:
                raise OutOfOrder(f"{doing} within a round of layer.exchange: combine it first")
            self.exchange._begin(doing)
            try:
                yield
            finally:
                self.exchange._end()
        finally:
            self.end()

    def forget_rows(self) -> None:
        """Let go of the rows that the experts took last."""
        self._experts.forget()

    def close(self) -> None:
        """Give everything back; waits for this rank's own work only. Idempotent."""
        self.exchange.close()
        if hasattr(self, "_experts"):  # else opening it failed
            self._experts.close()
            self._weighed = self._weighed.new_empty(0)

    def _sent(
        self, x: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is sent of x, and the weights of combine.

        `round(x * weights)`, and none, for rules that weigh the input.
        """
        if self.config.routing.weigh != "input":
            return x, weights
        return torch.mul(x, weights, out=self._weighed[: len(x)]), None

    def _run_shared(self, shared: Shared | None, x: torch.Tensor) -> torch.Tensor | None:
        """The shared expert's rows; with an overlap, made in the side stream from its mark on."""
        if shared is None:
            return None
        overlaps = self.plan.overlap != "none"
        with self.side_stream.after_mark() if overlaps else nullcontext():
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
        if plan.gemm == "grouped":
            self._experts = GroupedExperts(
                config,
                rows,
                self.exchange.num_local_experts,
                fp8=options.fp8,
                ranks=self.exchange.ep_size,
                max_tokens=options.max_tokens,
                programmatic=options.programmatic_launch,
                device=device,
                gemm_push=plan.gemm_push and plan.mode == "low_latency",
            )
        else:
            self._experts = TorchExperts(config, rows, quantize=plan.quantize, device=device)
        self.side_stream = SideStream(device)
        weighs = config.routing.weigh == "input"
        held = (options.max_tokens if weighs else 0, config.hidden)
        self._weighed = torch.empty(held, dtype=config.dtype, device=device)
        finish(device)
