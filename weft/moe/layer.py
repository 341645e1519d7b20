"""MoE: an expert-parallel layer from router logits to output, on a one-sided exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from weft.alltoall.received import Received
from weft.arguments import function, instance, shown
from weft.errors import GroupError, InvalidArgument
from weft.lowlatency.results import ExpertRows
from weft.memory import Group
from weft.memory.driver import in_relaxed_mode
from weft.memory.group import reason
from weft.moe import library as layer_library
from weft.moe.choice import LayerChoice, agreed_choice
from weft.moe.experts import ExpertWeights
from weft.moe.low_latency import LowLatencyWorkspace
from weft.moe.models import MoEConfig
from weft.moe.plan import Options, plans_of
from weft.moe.router import Routed, route
from weft.moe.table import LayerTable
from weft.moe.throughput import ThroughputWorkspace
from weft.moe.workspace import Exchange, LayerWorkspace, Shared
from weft.runtime import library
from weft.runtime.check import (
    check_alignment,
    check_group,
    check_tensor,
    check_tokens,
    refuse_tensor,
)


class MoE:
    """`out = sum over k of weights[k] * expert[ids[k]](x) + shared(x)`, experts spread over ranks.

    Meaning: `weft.reference.moe_layer`. Collective: every rank makes the same sequence of calls, a
    rank without tokens calls with zero of them. Workspaces are allocated here, once; a call waits
    for no host and may be captured in CUDA graphs.

    config: the layer's sizes and rules, equal on all ranks; `weft.moe.MODELS` has some by name.
    weights: this rank's experts, in the order of `local_experts`; or what makes them of that tuple.
    max_tokens: most tokens of this rank in one call, equal on all ranks.
    shared: `[tokens, hidden]` -> `[tokens, hidden]`, where the config has a shared expert.
    correction: float32 `[num_experts]`, where the routing has one.
    mode: "throughput": AllToAll, rank-major, for any batch; "low_latency": LowLatencyAllToAll,
        expert-major, for small batches, with more memory; "auto": low latency where a measured
        table has it faster for max_tokens, else throughput.
    overlap: "none": one thing after the other; "shared_expert": the shared expert runs beside
        dispatch and the routed experts; "gemm_push": that, and the down projection stores its rows
        at the tokens' owners itself, so combine only reduces; with gemm="grouped". "auto": the
        fastest for max_tokens by a measured table (docs/moe.md). Equal bits.
    table: what "auto" chooses by: a LayerTable, the path of one that `weft tune layer` wrote, or
        None for the nearest that came with weft. Rank 0's is sent to everyone.
    fp8: weights are FP8 with scales (`ExpertWeights.to_fp8`), tokens travel as FP8.
    gemm: "grouped" (weft.gemm) or "torch" (any dtype and device); "auto": grouped for FP8, and on
        GPUs wherever it serves.
    max_rows: rows for this rank's experts, as in ExpertGroups; with gemm="torch" on GPUs rows for
        each of them. Default: the worst case.
    expert_map, quantize, combine_dtype, timeout, first_timeout, num_sms, programmatic_launch,
        profile: as in AllToAll; combine_dtype is left out with overlap="gemm_push". Rows that
        travel as FP8 are widened to the layer's dtype before the GEMMs, unless the weights are FP8
        too. With mode="low_latency" quantize is "fp8" or None.

    Raises InvalidArgument, CreationFailed (on every rank, when one cannot do its part),
    GeometryMismatch (when ranks pass different sizes or rules).
    """

    @in_relaxed_mode
    def __init__(
        self,
        group: Group,
        config: MoEConfig,
        weights: ExpertWeights | Callable[[tuple[int, ...]], ExpertWeights],
        *,
        max_tokens: int,
        shared: Shared | None = None,
        correction: torch.Tensor | None = None,
        mode: str = "auto",
        overlap: str = "auto",
        table: LayerTable | Path | str | None = None,
        gemm: str = "auto",
        max_rows: int | None = None,
        expert_map: Sequence[int] | torch.Tensor | None = None,
        fp8: bool = False,
        quantize: str | None = None,
        combine_dtype: str | None = None,
        timeout: float = 2.0,
        first_timeout: float = 120.0,
        num_sms: int | None = None,
        programmatic_launch: bool = True,
        profile: bool = False,
    ) -> None:
        check_group(group)
        options = Options(
            max_tokens=max_tokens,
            mode=mode,
            overlap=overlap,
            table=table,
            gemm=gemm,
            max_rows=max_rows,
            expert_map=expert_map,
            fp8=fp8,
            quantize=quantize,
            combine_dtype=combine_dtype,
            timeout=timeout,
            first_timeout=first_timeout,
            num_sms=num_sms,
            programmatic_launch=programmatic_launch,
            profile=profile,
        )
        plans = group.together(
            lambda: plans_of(group, config, options), doing="preparing an MoE layer"
        )
        group.agree(options.manifest(config), what="MoE layer")
        choice = agreed_choice(group, config, options, plans)
        plan = plans[choice.mode, choice.overlap]
        kind = LowLatencyWorkspace if plan.mode == "low_latency" else ThroughputWorkspace
        self._workspace: LayerWorkspace[Any] = kind(group, config, options, plan, choice)
        self._owner = True
        try:
            self._load(weights, shared, correction)
        except BaseException:
            self._workspace.close()
            raise

    def sibling(
        self,
        weights: ExpertWeights | Callable[[tuple[int, ...]], ExpertWeights],
        *,
        shared: Shared | None = None,
        correction: torch.Tensor | None = None,
    ) -> MoE:
        """Another layer of the same config in the same workspace; collective.

        Layers that run one after the other in one stream need one workspace only. It goes with the
        layer that made it: closing a sibling gives nothing back. Raises CreationFailed.
        """
        other = MoE.__new__(MoE)
        other._workspace, other._owner = self._workspace, False
        other._load(weights, shared, correction)
        return other

    @property
    def exchange(self) -> Exchange:
        """The all-to-all underneath: its history and placement; rounds of your own."""
        return self._workspace.exchange

    @property
    def config(self) -> MoEConfig:
        """The layer's sizes and rules."""
        return self._workspace.config

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts, in the order of its weights."""
        return self.exchange.local_experts

    @property
    def gemm(self) -> str:
        """The GEMM of the experts: what "auto" came to."""
        return self._workspace.plan.gemm

    @property
    def mode(self) -> str:
        """ "throughput" or "low_latency": what "auto" came to."""
        return self._workspace.plan.mode

    @property
    def overlap(self) -> str:
        """What runs beside what: what "auto" came to."""
        return self._workspace.plan.overlap

    def explain(self) -> LayerChoice:
        """Which mode and overlap the layer has and why, what others would take, by which table."""
        return self._workspace.choice

    @property
    def workspace_bytes(self) -> int:
        """Bytes of ordinary memory; the exchange's `memory_bytes` tells the symmetric."""
        return self._workspace.bytes

    def __call__(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        *,
        num_tokens: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[tokens, hidden]` of this rank -> `[tokens, hidden]`.

        x: `[tokens, hidden]` of the config's dtype.
        logits: `[tokens, num_experts]`, float32 for choices that do not depend on rounding.
        num_tokens: int32 `[1]` on the device: rows from there on are padding and sent to no expert;
            they get what the shared expert made of them, or zeros.
        out: `[tokens, hidden]` to write into; may be x.

        What is wrong with a tensor is refused before anything is sent. If the shared expert or a
        product raises, the round cannot end: the peers raise PeerLeft with its text, and later
        calls on this rank Aborted. Raises InvalidArgument, TokenOverflow, OutOfOrder, and what
        broke the group.
        """
        if torch.compiler.is_dynamo_compiling():
            return layer_library.traced_call(self, x, logits, num_tokens, out)
        self._workspace.check_call()
        self._check_call(x, logits, out)
        ids, weights = self.route(logits, num_tokens=num_tokens)
        try:
            return self._workspace.run(
                self._weights,
                x,
                (ids, weights),
                self._shared,
                num_tokens=num_tokens,
                out=out,
            )
        except GroupError:
            raise  # peers have their own deadline, and the first error says most
        except BaseException as error:
            if self._workspace.mid_round and not self._workspace.capturing:
                self.exchange._watched.leave(reason(error))
            raise

    def route(self, logits: torch.Tensor, *, num_tokens: torch.Tensor | None = None) -> Routed:
        """The layer's ids and weights for logits `[tokens, num_experts]`; see `weft.moe.route`."""
        if torch.compiler.is_dynamo_compiling():
            return Routed(*layer_library.traced_route(self, logits, num_tokens))
        correction = self._correction
        return route(self.config.routing, logits, correction=correction, num_tokens=num_tokens)

    def experts(self, received: Received | ExpertRows) -> torch.Tensor | None:
        """What this rank's experts make of what a dispatch of `exchange` brought.

        Between dispatch and combine, in their stream. In throughput mode it is written into
        `exchange.output()`, and None returned; in low-latency mode it is
        `[local_experts, rows, hidden]` for `exchange.combine`, until the next call. With fewer
        max_rows than came, the entries that do not fit count as zero, and `check` raises
        TokenOverflow. With overlap "gemm_push" there is no output() to write into: in throughput
        mode InvalidArgument; in low-latency mode the rows are pushed, and combine takes None.
        """
        if torch.compiler.is_dynamo_compiling():
            return layer_library.traced_experts(self, received)
        return self._workspace.run_experts(self._weights, received)

    def check(self) -> None:
        """Raise what the device has recorded; see `AllToAll.check`."""
        self.exchange.check()

    def abort(self) -> None:
        """Ask the kernels of all ranks to leave their waits; see `AllToAll.abort`."""
        self.exchange.abort()

    def close(self) -> None:
        """Give the workspace back, if this layer made it. Idempotent."""
        library.forget(self._handle)
        if self._owner:
            self._workspace.close()

    def __enter__(self) -> MoE:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.exchange._watched.tell_left(reason(error))
        self.close()

    def _load(
        self,
        weights: ExpertWeights | Callable[[tuple[int, ...]], ExpertWeights],
        shared: Shared | None,
        correction: torch.Tensor | None,
    ) -> None:
        """Take and check what makes this layer differ from its siblings; every rank votes."""
        device, config = self.exchange.group.device, self.config

        def check() -> ExpertWeights:
            mine = weights(self.local_experts) if callable(weights) else weights
            instance("weights", mine, ExpertWeights, "or a function that makes them")
            mine.check(config, len(self.local_experts), device, fp8=self._workspace.options.fp8)
            if shared is not None:
                function("shared", shared, "[tokens, hidden] -> [tokens, hidden]")
            if (shared is None) == (config.shared > 0):
                have = "None" if shared is None else "given"
                raise InvalidArgument(
                    f"shared is {have}, the config has shared={config.shared}; pass one where it "
                    "is above 0, or dataclasses.replace(config, shared=0)"
                )
            if self._workspace.plan.overlap == "shared_expert" and shared is None:
                raise InvalidArgument(
                    "overlap is 'shared_expert' without a shared expert; there is nothing to "
                    "overlap: use overlap='none'"
                )
            size = (0, config.routing.num_experts)
            empty = torch.empty(size, dtype=torch.float32, device=device)
            route(config.routing, empty, correction=correction)
            return mine

        self._weights = self.exchange.group.together(check, doing="loading an MoE layer")
        self._shared, self._correction = shared, correction
        self._order = library.order_of(device)
        self._handle = library.register(self, self._workspace.sizes())

    def _check_call(self, x: torch.Tensor, logits: torch.Tensor, out: torch.Tensor | None) -> None:
        """Raises InvalidArgument and TokenOverflow for what the exchange would see too late."""
        config, device = self.config, self.exchange.group.device
        dtypes, row_bytes = (config.dtype,), config.hidden * config.dtype.itemsize
        check_tensor("x", x, shape=(None, config.hidden), dtypes=dtypes, device=device)
        tokens = x.shape[0]  # while tracing, perhaps a symbol: not len()
        check_tokens(tokens, self.exchange.max_tokens)
        if not isinstance(logits, torch.Tensor):
            refuse_tensor("logits", logits)
        if (
            logits.is_nested
            or logits.dim() != 2
            or logits.shape[0] != tokens
            or logits.device != device
        ):
            raise InvalidArgument(
                f"logits are {shown(logits)}; x has {tokens} rows on {device}: pass the logits of "
                "the same tokens, [tokens, num_experts]"
            )
        if out is not None:
            check_tensor("out", out, shape=x.shape, dtypes=dtypes, device=device)
            check_alignment("out", out, row_bytes)
