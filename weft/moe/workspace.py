"""What a layer keeps between calls: the exchange, the groups, and the experts' buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from weft.errors import InvalidArgument, OutOfOrder
from weft.memory import Group
from weft.moe.experts import ExpertWeights
from weft.moe.models import MoEConfig
from weft.moe.products import choose, layout_of, make
from weft.ops.alltoall import AllToAll
from weft.ops.grouping import ExpertGroups
from weft.ops.received import Received
from weft.ops.rounds import State

OVERLAPS = ("none", "shared")


@dataclass(frozen=True, slots=True)
class Options:
    """How a workspace is built; the names and meanings of `MoE`."""

    max_tokens: int
    overlap: str
    gemm: str
    max_rows: int | None
    expert_map: Sequence[int] | torch.Tensor | None
    quantize: str | None
    combine_by: str
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
        self.way = group.together(self._choose, doing="preparing an MoE layer")
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
            quantize=options.quantize,
            combine_by=options.combine_by,
            halves=options.overlap == "shared",
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
        layout, align = layout_of(self.way)
        grouping = ExpertGroups.memory_bytes(
            self.exchange, max_rows=self._max_rows, align=align, layout=layout
        )
        own = (self._wide, self._scales, self._h, self._act, self._y, self._weighed)
        return grouping + sum(t.numel() * t.element_size() for t in own)

    def weigh(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`round(x * weights)` for rules that weigh the input; x and weights are checked."""
        return torch.mul(x, weights, out=self._weighed[: len(x)])

    def run_experts(self, weights: ExpertWeights, received: Received) -> None:
        """Write the exchange's output: every row's weighted sum over this rank's experts."""
        groups, products = self._groups, self._products
        if groups is None:
            raise OutOfOrder("this MoE layer was closed; make a new one")
        if not self.exchange.num_local_experts:
            return
        grouped = groups.gather(received)
        used = products.begin(grouped)
        x = self._widened(grouped.rows)[:used]
        h = products.multiply(x, weights.gate_up, weights.gate_up_bias, self._h[:used])
        act = self.config.gating.apply(h, out=self._act[:used])
        y = products.multiply(act, weights.down, weights.down_bias, self._y[:used])
        groups.scatter(y if products.allocates else self._y)

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

    def _choose(self) -> str:
        if self.options.overlap not in OVERLAPS:
            words = ", ".join(map(repr, OVERLAPS))
            raise InvalidArgument(f"overlap is {self.options.overlap!r}; choose one of {words}")
        if self.options.combine_by == "choices":
            raise InvalidArgument(
                "combine_by is 'choices', and a layer sums its experts' rows before they go home: "
                "choose 'pull', 'push' or 'fp8'"
            )
        config = self.config
        return choose(self.options.gemm, self.group.device, config.dtype, config.intermediate)

    def _manifest(self) -> dict[str, str]:
        """What ranks compare beyond the sizes of their exchange: rules that must be one."""
        fields = asdict(self.config) | {"overlap": self.options.overlap}
        return {name: str(value) for name, value in fields.items()}

    def _open_buffers(self) -> None:
        a2a, config, device = self.exchange, self.config, self.group.device
        layout, align = layout_of(self.way)
        self._groups = groups = ExpertGroups(
            a2a,
            max_rows=self.options.max_rows,
            align=align,
            layout=layout,
            programmatic_launch=self.options.programmatic_launch,
        )
        experts, self._max_rows = a2a.num_local_experts, groups.max_rows
        shape = (experts, groups.max_rows) if layout == "masked" else (groups.max_rows,)
        shape = shape if experts else (0,)

        def rows(columns: int, wanted: bool = True) -> torch.Tensor:
            # Products that make their own results leave these empty.
            size = (*shape, columns) if wanted else (0, columns)
            return torch.empty(size, dtype=config.dtype, device=device)

        wide, hidden = 2 * config.intermediate, config.hidden
        widest = max(wide, hidden) if config.biased else 0
        self._products = make(self.way, math.prod(shape), experts, widest, rows(0, False))
        self._wide = rows(hidden, self.options.quantize is not None)
        self._h = rows(wide, not self._products.allocates)
        self._act = rows(config.intermediate)
        self._y = rows(hidden, not self._products.allocates)
        powers = (*shape, hidden // 32) if self.options.quantize == "mxfp8" else (0,)
        self._scales = torch.empty(powers, device=device)
        weighs = config.routing.weigh == "input"
        held = (self.options.max_tokens if weighs else 0, hidden)
        self._weighed = torch.empty(held, dtype=config.dtype, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # calls may come in another stream

    def _widened(self, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The rows in the layer's dtype: `round(q * scale)` where FP8 came over the wire."""
        if self.options.quantize is None:
            return rows[0]
        q, scales = rows
        if self._scales.numel():
            scales = self._scales.copy_(scales)
        wide = self._wide.copy_(q)  # exact: every e4m3 number is one of the wider type
        wide.view(*scales.shape, -1).mul_(scales.unsqueeze(-1))
        return wide
