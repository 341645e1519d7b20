"""What a layer keeps between calls: the exchange, the groups, and the experts' buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from weft.errors import InvalidArgument, OutOfOrder
from weft.memory import Group
from weft.moe.experts import ExpertWeights
from weft.moe.mlp import choose_way, layout_for, make_mlp
from weft.moe.models import MoEConfig
from weft.moe.overlap import (
    SEND_SMS,
    Beside,
    check_overlap,
    send_by_columns,
)
from weft.ops.alltoall import AllToAll
from weft.ops.grouping import ExpertGroups
from weft.ops.received import Received
from weft.ops.rounds import State

MAX_PARTS = 64


@dataclass(frozen=True, slots=True)
class Options:
    """How a workspace is built; the names and meanings of `MoE`."""

    max_tokens: int
    overlap: str
    gemm: str
    max_rows: int | None
    expert_map: Sequence[int] | torch.Tensor | None
    fp8: bool
    parts: int
    quantize: str | None
    combine_by: str | None
    timeout: float
    first_timeout: float
    num_sms: int | None
    programmatic_launch: bool
    profile: bool


class LayerWorkspace:
    """Serves one layer after the other: nothing in it outlives a call.

    Raises InvalidArgument, CreationFailed and GeometryMismatch on every rank alike.
    """

    def __init__(self, group: Group, config: MoEConfig, options: Options) -> None:
        self.group, self.config, self.options = group, config, options
        self.way, self.quantize, self._combine_by = group.together(
            self._choose, doing="preparing an MoE layer"
        )
        group.agree(self._manifest(), what="MoE layer")
        routing = config.routing
        self.exchange = AllToAll(
            group,
            max_tokens=options.max_tokens,
            top_k=routing.top_k,
            num_experts=routing.num_experts,
            hidden=config.hidden,
            dtype=config.dtype,
            expert_map=options.expert_map,
            timeout=options.timeout,
            first_timeout=options.first_timeout,
            quantize=self.quantize,
            combine_by=self._combine_by,
            halves=self._combine_by in ("push", "fp8"),
            num_sms=options.num_sms,
            programmatic_launch=options.programmatic_launch,
            profile=options.profile,
        )
        self._groups: ExpertGroups | None = None
        try:
            group.together(self._open_buffers, doing="preparing an MoE layer's experts")
        except BaseException:
            self.close()
            raise

    @property
    def bytes(self) -> int:
        """Bytes of the experts' buffers and the grouping on this rank, in ordinary memory."""
        layout, align = layout_for(self.way)
        grouping = ExpertGroups.memory_bytes(
            self.exchange, max_rows=self._max_rows, align=align, layout=layout
        )
        return grouping + sum(t.numel() * t.element_size() for t in self.buffers)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The experts' own memory."""
        return (*self._mlp.buffers, self._weighed)

    @property
    def hides_shared(self) -> bool:
        """Does the shared expert run beside the others' way to combine?"""
        return self.options.overlap != "none"

    def weigh(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`round(x * weights)` for rules that weigh the input; x and weights are checked."""
        return torch.mul(x, weights, out=self._weighed[: len(x)])

    def expect(self, tokens: int) -> None:
        """A hint: each rank has about as many tokens as this one."""
        routing = self.config.routing
        rows = tokens * self.exchange.ep_size * routing.top_k
        self._mlp.expect(-(-rows // routing.num_experts))

    def run_experts(self, weights: ExpertWeights, received: Received) -> None:
        """Write the exchange's output: every row's weighted sum over this rank's experts."""
        groups = self._ready()
        if self.exchange.num_local_experts:
            self._mlp.up(weights, groups.gather(received))
            groups.scatter(self._mlp.down(weights))

    def finish(
        self,
        weights: ExpertWeights,
        received: Received,
        *,
        out: torch.Tensor | None,
        add: torch.Tensor | None,
    ) -> torch.Tensor:
        """From received rows to the round's result, in the way of the overlap.

        add: made in the stream `aside`, or by the caller.
        """
        exchange, overlap = self.exchange, self.options.overlap
        if overlap in ("none", "shared") and self._combine_by == "pull":
            self.run_experts(weights, received)
            self.aside.join()
            return exchange.combine(out=out, add=add)
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

    def _come_home(self, weights: ExpertWeights, groups: ExpertGroups) -> None:
        """The second product, and its sending where the owners do not fetch."""
        overlap = self.options.overlap
        if overlap == "push":
            self._mlp.push(weights)
        elif overlap == "columns":
            num_sms = SEND_SMS if self.group.device.type == "cuda" else None
            sizes = {"hidden": self.config.hidden, "parts": self.options.parts}
            send_by_columns(self._mlp, weights, groups, self._sends, num_sms=num_sms, **sizes)
        else:
            groups.send(self._mlp.down(weights))

    def _ready(self) -> ExpertGroups:
        if self._groups is None:
            raise OutOfOrder("this MoE layer was closed; make a new one")
        return self._groups

    def check_call(self) -> None:
        """Refuse a capture that would have to wait for the device, before anything is sent."""
        if self.way == "loop" and self.capturing:
            raise InvalidArgument(
                "gemm 'loop' reads row counts on the host, which a captured graph cannot do; "
                "build the layer with gemm='grouped' or 'padded'"
            )

    @property
    def capturing(self) -> bool:
        """Is the current stream being captured into a graph?"""
        return self.group.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @property
    def mid_round(self) -> bool:
        """Has something been sent that has not come home?"""
        return self.exchange._rounds.state is not State.IDLE

    def close(self) -> None:
        """Give everything back; waits for this rank's own work only. Idempotent."""
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        self.exchange.close()

    def _choose(self) -> tuple[str, str | None, str]:
        """(gemm, quantize, combine_by) of this rank. Raises InvalidArgument."""
        config, options = self.config, self.options
        if not isinstance(options.parts, int) or not 1 <= options.parts <= MAX_PARTS:
            raise InvalidArgument(f"parts is {options.parts!r}; it must be in 1..{MAX_PARTS}")
        quantize = options.quantize or ("fp8" if options.fp8 else None)
        device = self.group.device
        way = choose_way(options.gemm, device, config, fp8=options.fp8, quantize=quantize)
        return way, quantize, check_overlap(options.overlap, options.combine_by, way)

    def _manifest(self) -> dict[str, str]:
        """What ranks compare beyond the sizes of their exchange: rules that must be one."""
        fields = asdict(self.config) | {"overlap": self.options.overlap, "fp8": self.options.fp8}
        return {name: str(value) for name, value in fields.items()}

    def _open_buffers(self) -> None:
        a2a, config, device = self.exchange, self.config, self.group.device
        layout, align = layout_for(self.way)
        self._groups = groups = ExpertGroups(
            a2a,
            max_rows=self.options.max_rows,
            align=align,
            layout=layout,
            programmatic_launch=self.options.programmatic_launch,
        )
        experts, self._max_rows = a2a.num_local_experts, groups.max_rows
        shape = (experts, groups.max_rows) if layout == "masked" else (groups.max_rows,)
        self._mlp = make_mlp(
            self.way,
            config,
            shape if experts else (0,),
            experts,
            fp8=self.options.fp8,
            quantize=self.quantize,
            programmatic=self.options.programmatic_launch,
            device=device,
        )
        self.aside = Beside(device)
        # Few CTAs that wait for memory go before many that compute.
        self._sends = Beside(device, priority=-1)
        weighs = config.routing.weigh == "input"
        held = (self.options.max_tokens if weighs else 0, config.hidden)
        self._weighed = torch.empty(held, dtype=config.dtype, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # calls may come in another stream
