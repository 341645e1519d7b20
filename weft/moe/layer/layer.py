# SPDX-License-Identifier: Apache-2.0
"""MoE: an expert-parallel layer from router logits to output, on a one-sided exchange."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, Self

import torch

from weft.alltoall.received import Received
from weft.arguments import check_callable, check_instance, check_int, format_value
from weft.cuda.driver import relaxed_capture
from weft.errors import (
    GroupError,
    InvalidArgument,
    OutOfOrder,
    TokenOverflow,
    WeftError,
)
from weft.gemm.config import MXFP4
from weft.group import Group
from weft.group.group import format_reason
from weft.group.waits import Waits
from weft.grouping.config import MAX_ROWS
from weft.heap.header import Record
from weft.keywords import internal
from weft.lowlatency.results import ExpertRows
from weft.moe.experts.weights import ExpertWeights
from weft.moe.layer import compile as moe_compile
from weft.moe.layer.choice import LayerChoice, agree_on_choice
from weft.moe.layer.config import LayerOptions, build_plans
from weft.moe.layer.low_latency import LowLatencyWorkspace
from weft.moe.layer.memory import memory_bytes
from weft.moe.layer.placement import LayerPlacement
from weft.moe.layer.throughput import ThroughputWorkspace
from weft.moe.layer.workspace import Exchange, LayerWorkspace, SharedExpert
from weft.moe.models import MoEConfig
from weft.moe.replicas.placement import Replicas
from weft.moe.routing.router import (
    Routed,
    check_route,
    check_topk,
    normalize_topk,
    route,
    run_normalize_topk,
    run_route,
)
from weft.runtime import library
from weft.runtime.ambient import allow_during_capture, disable_autocast, disable_inference_mode
from weft.runtime.check import check_group, check_no_overlap, check_tensor
from weft.runtime.identity import MAX_ROUNDS
from weft.runtime.stream import is_capturing, synchronize_device

SHARED_TOKENS = 300  # largest batch in which a shared expert is checked for batch invariance
ONE_FORMAT = (
    "batch_invariant needs one format on all ranks, otherwise an expert's bits depend on its rank: "
    "convert those of every rank to FP8 (ExpertWeights.from_mxfp4 with packed=False), or leave "
    "batch_invariant out"
)


class MoE:
    """Compute an expert-parallel MoE layer, from router logits to output.

    The output is `sum over k of weights[k] * expert[ids[k]](x) + shared(x)`;
    `weft.reference.moe_layer` specifies it. The constructor allocates the workspace and is
    collective. Every rank makes the same sequence of calls; a rank without tokens passes empty
    tensors. A call does not synchronize with the host and may be captured in CUDA graphs.

    Args:
        group: Ranks of the job.
        config: Sizes and rules of the layer, equal on all ranks, such as one of
            `weft.moe.MODELS`.
        weights: This rank's experts in the order of `local_experts`, or a function that returns
            them for that tuple.
        max_tokens: Maximum tokens of one rank in one round, equal on all ranks.
        shared: Shared expert, a function from `[tokens, hidden]` to `[tokens, hidden]`, if the
            config has one.
        correction: float32 `[num_experts]`, if the routing has a correction.
        mode: "throughput" (AllToAll, any batch), "low_latency" (LowLatencyAllToAll, small batches,
            more memory) or "auto"; see `explain`.
        overlap: "none"; "shared_expert": the shared expert runs concurrently with dispatch and the
            routed experts; "gemm_push": in addition, the down projection stores its rows at the
            tokens' owners; "auto". All give the same bits.
        gemm: "grouped" (weft.gemm), "torch" (any dtype and device) or "auto".
        max_rows: Rows for this rank's experts, as in ExpertGroups. Default: the worst case.
        expert_map: Rank of each expert. Default: contiguous blocks.
        replicas: Placement with more physical than logical experts (EPLB), from `balance`. Calls
            then accept logical ids. `relocate` changes the placement.
        missing: Behaviour after a recovery if no living rank holds some experts. "error": calls
            raise ExpertsLost until `relocate` restores them. "drop": their ids are dropped.
        fp8: Send tokens as FP8 and use weights in FP8 with scales (`ExpertWeights.to_fp8`) or
            MXFP4 (`ExpertWeights.to_mxfp4`, on Hopper and CPUs).
        quantize: As in AllToAll. Rows are dequantized before the GEMMs unless fp8 is set.
        combine_dtype: As in AllToAll. Excludes overlap="gemm_push".
        batch_invariant: Make a token's result independent of the rest of the batch, bit for bit: of
            its size, order and padding, and of mode, overlap, replicas and the number of ranks.
            One host only. A shared expert must be batch-invariant itself, and all ranks must hold
            experts of one format: MXFP4 or FP8.
        timeout: Seconds that a wait for a peer may take.
        first_timeout: Seconds that a wait in the first round may take.
        num_sms: SMs that the communication kernels may fill. Default: all.
        programmatic_launch: As in AllToAll.
        profile: As in AllToAll.

    Raises:
        InvalidArgument: an argument is invalid on every rank.
        CreationFailed: a rank cannot do its part. Every rank raises it.
        GeometryMismatch: ranks pass different sizes or rules, or experts of different formats to a
            layer with batch_invariant.
    """

    _weights: ExpertWeights
    library_handle: int
    _checked_shared: bool
    _closed = False
    _placement: LayerPlacement

    @allow_during_capture
    def __init__(
        self,
        group: Group,
        config: MoEConfig,
        weights: ExpertWeights | Callable[[tuple[int, ...]], ExpertWeights],
        *,
        max_tokens: int,
        shared: SharedExpert | None = None,
        correction: torch.Tensor | None = None,
        mode: str = "auto",
        overlap: str = "auto",
        gemm: str = "auto",
        max_rows: int | None = None,
        expert_map: Sequence[int] | torch.Tensor | None = None,
        replicas: Replicas | None = None,
        missing: str = "error",
        fp8: bool = False,
        quantize: str | None = None,
        combine_dtype: str | None = None,
        batch_invariant: bool = False,
        timeout: float = 2.0,
        first_timeout: float = 120.0,
        num_sms: int | None = None,
        programmatic_launch: bool = True,
        profile: bool = False,
    ) -> None:
        options = LayerOptions.from_arguments(locals())
        check_group(group)
        with group.creation(is_workspace=True) as creation:
            plans = group.run_collective(
                lambda: build_plans(config, options, group.device, hosts=group.hosts),
                action="preparing an MoE layer",
            )
            group.agree(options.manifest(config), label="MoE layer")
            choice = agree_on_choice(group, list(plans), overlap=overlap, max_tokens=max_tokens)
            plan = plans[choice.mode, choice.overlap]
            cls = LowLatencyWorkspace if plan.mode == "low_latency" else ThroughputWorkspace
            self.workspace: LayerWorkspace[Any] = cls(group, config, options, plan, choice)
        self.workspace.creation = creation
        try:
            self._load(weights, shared, correction, replicas)
        except BaseException:
            self.workspace.close()
            raise

    def sibling(
        self,
        weights: ExpertWeights | Callable[[tuple[int, ...]], ExpertWeights],
        *,
        shared: SharedExpert | None = None,
        correction: torch.Tensor | None = None,
        replicas: Replicas | None = None,
    ) -> MoE:
        """Return another layer of the same config in the same workspace. Collective.

        Layers that run one after the other in one stream can share a workspace. It is freed when
        the last of them is closed.

        Args:
            weights: This rank's experts of the new layer.
            shared: Its shared expert.
            correction: Its correction.
            replicas: Its placement, with as many physical experts. Default: this layer's.

        Returns:
            The new layer.

        Raises:
            CreationFailed: a rank cannot do its part. Every rank raises it.
        """
        sibling = MoE.__new__(MoE)
        sibling.workspace = self.workspace
        if replicas is None:
            replicas = self._placement.replicas
        with relaxed_capture(self.exchange.group.device), disable_inference_mode():
            sibling._load(weights, shared, correction, replicas)
        return sibling

    memory_bytes = staticmethod(memory_bytes)

    def relocate(self, replicas: Replicas, *, weights: ExpertWeights | None = None) -> int:
        """Move experts to another placement. Collective; call it between rounds.

        All ranks wait for their devices and for each other. The layer's weight tensors and the
        table that maps ids are overwritten in place, so captured graphs stay valid. If the move
        fails after weights began to change, every later call raises Aborted or PeerLeft on all
        ranks: call `Group.recover` and then `relocate` with `weights`.

        Args:
            replicas: New placement, equal on all ranks, with as many physical experts.
            weights: This rank's experts in the order of `replicas.logical_experts(rank)`, which
                are copied into the layer's tensors. Default: weights move between ranks through
                64 MiB of symmetric memory per rank.

        Returns:
            Number of physical experts that became replicas of another logical one.

        Raises:
            InvalidArgument: the placement does not fit this layer. The layer stays as it was.
            GeometryMismatch: ranks pass different placements. The layer stays as it was.
            CreationFailed: a rank cannot do its part. Every rank raises it.
            OutOfOrder: a round of this layer is open.
        """
        return self._placement.relocate(replicas, self._weights, weights, self.check_open)

    @property
    def replicas(self) -> Replicas | None:
        """Current placement of a layer with replicas, or None."""
        return self._placement.replicas

    @property
    def exchange(self) -> Exchange:
        """The layer's all-to-all, for its history, its placement and custom rounds."""
        return self.workspace.exchange

    @property
    def config(self) -> MoEConfig:
        """Sizes and rules of the layer."""
        return self.workspace.config

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts, in the order of its weights."""
        return self._placement.local_experts

    @property
    def gemm(self) -> str:
        """GEMM that the layer uses: "grouped" or "torch"."""
        return self.workspace.plan.gemm

    @property
    def mode(self) -> str:
        """Mode that the layer uses: "throughput" or "low_latency"."""
        return self.workspace.plan.mode

    @property
    def overlap(self) -> str:
        """Overlap that the layer uses: "none", "shared_expert" or "gemm_push"."""
        return self.workspace.plan.overlap

    def explain(self) -> LayerChoice:
        """Return the mode and overlap of the layer, and the rule by which "auto" selects them."""
        return self.workspace.choice

    @disable_autocast
    def __call__(
        self,
        x: torch.Tensor,
        logits: torch.Tensor | None = None,
        *,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        rows: int | None = None,
        num_tokens: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer on this rank's tokens.

        Pass logits, or topk_ids with topk_weights. Invalid tensors are rejected before anything is
        sent. If the shared expert or a GEMM raises in the middle of a round, the peers raise
        PeerLeft with the error's text, and later calls on this rank raise Aborted.

        Args:
            x: `[tokens, hidden]` of the config's dtype.
            logits: `[tokens, num_experts]`. Use float32 for choices that do not depend on rounding.
            topk_ids: int32 or int64 `[tokens, top_k]`, -1 for none. See `normalize_topk` for other
                forms.
            topk_weights: float32, bfloat16 or float16 `[tokens, top_k]`.
            rows: Maximum tokens of any rank in this call, equal on all ranks. If it exceeds
                max_tokens, the call takes several rounds. Default: max_tokens.
            num_tokens: int32 `[1]` on the device: rows from there on are padding. They are not
                sent; their result is that of the shared expert, or zeros.
            out: `[tokens, hidden]` to write into; may be x. Default: a new tensor.

        Returns:
            `[tokens, hidden]`.

        Raises:
            InvalidArgument: a tensor has the wrong shape, dtype, device or stride.
            TokenOverflow: more tokens than max_tokens without `rows`.
            OutOfOrder: another thread is in a call, or the layer is closed.
            ExpertsLost: no living rank holds some experts.
            GroupError: the group is broken.
        """
        routing = (logits, topk_ids, topk_weights)
        if torch.compiler.is_dynamo_compiling():
            return moe_compile.trace_call(self, x, routing, rows, num_tokens, out)
        workspace, placement = self.workspace, self._placement
        if self._closed or placement.lost_experts or placement.relocation_failed:
            self._check_usable()
        rounds = self.check_call(x, routing, rows, num_tokens, out)
        workspace.begin("call")
        gradients = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            self._check_shared()
            routed = self._select_experts(routing, num_tokens)
            call_rows = self.exchange.max_tokens if rows is None else rows
            self.exchange.begin_round(self._number, call_rows, 0)
            if rounds == 1:
                return workspace.run(self._weights, self._shared, x, routed, num_tokens, rows, out)
            assert rows is not None
            out = torch.empty_like(x) if out is None else out
            step = self.exchange.max_tokens
            for index, start in enumerate(range(0, rows, step)):
                self.exchange.begin_round(self._number, rows, index)
                # The ids of padding are -1 now, so no count is needed.
                part = slice(start, start + step)
                workspace.run(
                    self._weights,
                    self._shared,
                    x[part],
                    Routed(routed.ids[part], routed.weights[part]),
                    num_tokens=None,
                    rows=min(step, rows - start),
                    out=out[part],
                )
            return out
        except GroupError:
            raise  # peers have their own timeouts, and the first error is the most specific
        except BaseException as error:
            if workspace.is_mid_round and not is_capturing(workspace.group.device):
                self.exchange.leave(format_reason(error))
            raise
        finally:
            torch.set_grad_enabled(gradients)
            self.exchange.end_rounds()
            workspace.end()

    def _check_shared(self) -> None:
        """Check the shared expert's result once, before anything is sent.

        Raises:
            InvalidArgument: combine cannot add such a result, or it depends on the batch in spite
                of batch_invariant.
        """
        if self._shared is None or self._checked_shared or is_capturing(self.exchange.group.device):
            return
        device, size = self.exchange.group.device, (1, self.config.hidden)
        result = self._shared(torch.zeros(size, dtype=self.config.dtype, device=device))
        name, dtypes = "the shared expert's result", (self.config.dtype,)
        check_tensor(name, result, shape=size, dtypes=dtypes, device=device, aligned=16)
        if self.workspace.options.batch_invariant:
            self._check_shared_is_batch_invariant(self._shared)
        self._checked_shared = True

    def _check_shared_is_batch_invariant(self, shared: SharedExpert) -> None:
        """Compare the bits of random tokens in batches of several sizes."""
        device, tokens = self.exchange.group.device, min(self.exchange.max_tokens, SHARED_TOKENS)
        generator = torch.Generator(device).manual_seed(0)
        size = (tokens, self.config.hidden)
        x = torch.randn(size, dtype=torch.float32, device=device, generator=generator)
        x = x.to(self.config.dtype)
        whole = shared(x)
        for part in {1, tokens // 2, tokens - 1} - {0}:
            if not torch.equal(shared(x[:part]), whole[:part]):
                raise InvalidArgument(
                    f"batch_invariant is True, but the shared expert returns other bits for "
                    f"{tokens} tokens than for the first {part} of them: pass a batch-invariant "
                    "one, such as FP8Expert, or enable batch-invariant matrix products in torch"
                )

    def route(self, logits: torch.Tensor, *, num_tokens: torch.Tensor | None = None) -> Routed:
        """Return the experts and weights that the layer chooses for logits.

        Args:
            logits: `[tokens, num_experts]`.
            num_tokens: int32 `[1]` on the device: rows from there on are padding.

        Returns:
            Ids and weights `[tokens, top_k]` for `exchange`. With replicas, the ids are those of
                physical experts.
        """
        if torch.compiler.is_dynamo_compiling():
            return Routed(*moe_compile.trace_route(self, logits, num_tokens))
        check_route(self.config.routing, logits, self.correction, num_tokens)
        return self._select_experts((logits, None, None), num_tokens)

    def _select_experts(
        self,
        routing: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        num_tokens: torch.Tensor | None,
    ) -> Routed:
        """Return physical experts and weights for dispatch, from checked tensors."""
        logits, ids, weights = routing
        if logits is not None:
            routed = run_route(self.config.routing, logits, self.correction, num_tokens)
            if self._placement.table is None:
                return routed
            (ids, weights), num_tokens = routed, None
        assert ids is not None
        assert weights is not None
        return run_normalize_topk(
            ids, weights, num_tokens, self._placement.table, self.exchange.rank
        )

    @disable_autocast
    def experts(self, received: Received | ExpertRows) -> torch.Tensor | None:
        """Run this rank's experts on the rows that a dispatch of `exchange` returned.

        Call it between dispatch and combine, in the same stream. If max_rows is too small, rows
        that do not fit count as zero and `check` raises TokenOverflow.

        Args:
            received: Result of `exchange.dispatch`.

        Returns:
            In low-latency mode `[local_experts, rows, hidden]` for `exchange.combine`, valid until
                the next call; None with "gemm_push". In throughput mode None; the result is in
                `exchange.output()`.

        Raises:
            InvalidArgument: overlap is "gemm_push" in throughput mode, which has no output().
        """
        if torch.compiler.is_dynamo_compiling():
            return moe_compile.trace_experts(self, received)
        self._check_usable()
        self.exchange.check_running()
        self._check_gradients()
        return self.workspace.run_experts(self._weights, received)

    def check(self) -> None:
        """Raise the error that the device has recorded since the last check; see `AllToAll.check`.

        Raises:
            UsageError: the device rejected part of the input.
            ExpertsLost: no living rank holds some experts.
            GroupError: the group is broken.
        """
        self._check_usable()
        self.exchange.check()

    @property
    def broken(self) -> bool:
        """Whether the group is broken, so that `check` raises `GroupError`.

        The property reads host memory and does not synchronize.
        """
        return self.exchange.broken

    def abort(self) -> None:
        """Make the kernels of all ranks stop waiting; see `AllToAll.abort`."""
        self.exchange.abort()

    def history(self, rank: int | None = None) -> list[Record]:
        """Return the last 128 finished operations of a rank, oldest first; see `AllToAll.history`.

        Args:
            rank: Rank to read. Default: this rank.
        """
        return self.exchange.history(rank)

    def waits(self) -> Waits:
        """Return how long this rank has waited for each peer; see `AllToAll.waits`."""
        return self.exchange.waits()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        self.exchange.announce_leave(format_reason(error))
        with suppress(WeftError):  # the caller's own error takes precedence
            self.close()

    def close(self) -> None:
        """Close the layer; the last open sibling frees the workspace. Idempotent.

        Raises:
            WeftError: an error that `check` would have raised. The layer is closed nevertheless.
        """
        if self._closed:
            return
        self._closed = True
        self._creation.mark_closed()
        library.unregister(self.library_handle)
        self.workspace.layers.discard(self)
        if not self.workspace.layers:
            self.workspace.close()
            return
        synchronize_device(self.exchange.group.device)
        pending = self.exchange.get_pending_error()
        if pending is not None:
            raise pending

    def _load(
        self,
        weights: ExpertWeights | Callable[[tuple[int, ...]], ExpertWeights],
        shared: SharedExpert | None,
        correction: torch.Tensor | None,
        replicas: Replicas | None,
    ) -> None:
        """Load what differs between siblings. Collective; succeeds on all ranks or on none."""
        with self.exchange.group.creation(workspace=self.workspace.creation) as creation:
            creation.add(self)
            self._creation = creation
            self._load_and_register(weights, shared, correction, replicas)

    def _load_and_register(
        self,
        weights: ExpertWeights | Callable[[tuple[int, ...]], ExpertWeights],
        shared: SharedExpert | None,
        correction: torch.Tensor | None,
        replicas: Replicas | None,
    ) -> None:
        """Load and register the layer while the group records its control messages."""
        group, device, config = self.exchange.group, self.exchange.group.device, self.config
        self._placement = LayerPlacement(self.workspace, replicas)
        self.exchange.on_restart(self._restore_routing)

        def check_and_prepare() -> ExpertWeights:
            self.exchange.check_open()
            if replicas is not None:
                self._placement.check_sizes(replicas)
            local = weights(self.local_experts) if callable(weights) else weights
            check_instance("weights", local, ExpertWeights, "or a function that returns them")
            local.check(config, len(self.local_experts), device, fp8=self.workspace.options.fp8)
            self.workspace.experts.load_kernels(local)
            if shared is not None:
                check_callable("shared", shared, "[tokens, hidden] -> [tokens, hidden]")
            if (shared is None) == (config.shared > 0):
                actual = "None" if shared is None else "set"
                raise InvalidArgument(
                    f"shared is {actual}, but the config has shared={config.shared}; pass a shared "
                    "expert if and only if it is above 0, or dataclasses.replace(config, shared=0)"
                )
            if self.workspace.plan.overlap == "shared_expert" and shared is None:
                raise InvalidArgument(
                    "overlap is 'shared_expert' without a shared expert: use overlap='none'"
                )
            size = (0, config.routing.num_experts)
            empty = torch.empty(size, dtype=torch.float32, device=device)
            route(config.routing, empty, correction=correction)
            normalize_topk(empty.int(), empty.bfloat16())
            return local

        self._weights = group.run_collective(check_and_prepare, action="loading an MoE layer")
        placement = weakref.ref(self._placement)  # the group holds the callback
        group.record(
            lambda messages: messages.check_equal(
                _build_placement_manifest(placement()), "the placement of experts"
            )
        )
        if self.workspace.options.batch_invariant:
            # Otherwise an expert's bits would depend on the rank that holds it.
            dtype = self._weights.gate_up.dtype
            name = "MXFP4" if dtype == MXFP4 else str(dtype)
            group.record(
                lambda messages: messages.check_equal(name, "the experts' format", fix=ONE_FORMAT)
            )
        self._placement.create_table()
        self._shared, self.correction = shared, correction
        self._checked_shared = False
        names = (f.name for f in fields(ExpertWeights))
        trainable = (n for n in names if getattr(getattr(self._weights, n), "requires_grad", False))
        self._trainable_field = next(trainable, "")  # the first field that requires a gradient
        self._number = self.exchange.allocate_layer_number()  # identifies the layer to other ranks
        self.order_tensor = library.get_order_tensor(device)
        self.library_handle = library.register(self, self.workspace.manifest())
        self.workspace.layers.add(self)
        self._closed = False

    @internal
    def check_open(self) -> None:
        if self._closed:
            raise OutOfOrder("this MoE layer is closed; create a new one")
        self.exchange.check_open()

    def _check_usable(self) -> None:
        """Raise OutOfOrder if the layer is closed, and ExpertsLost if experts are missing."""
        self.check_open()
        self._placement.check_usable()

    def _restore_routing(self) -> None:
        """Route ids to living ranks after a recovery. Raises ExpertsLost."""
        if not self._closed:
            self._placement.restore()
            self._check_usable()

    @internal
    def check_call(
        self,
        x: torch.Tensor,
        routing: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        rows: int | None,
        num_tokens: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> int:
        """Check the tensors of a call and return its number of rounds.

        Args:
            routing: logits, topk_ids and topk_weights.

        Raises:
            InvalidArgument: a tensor is invalid.
            TokenOverflow: more tokens than max_tokens without `rows`.
        """
        logits, topk_ids, topk_weights = routing
        config, device = self.config, self.exchange.group.device
        max_tokens = self.exchange.max_tokens
        dtypes = (config.dtype,)
        check_tensor("x", x, shape=(None, config.hidden), dtypes=dtypes, device=device)
        tokens = x.shape[0]  # not len(): it may be symbolic while tracing
        if rows is None:
            if tokens > max_tokens:
                raise TokenOverflow(
                    f"x has {tokens} tokens, which exceeds max_tokens={max_tokens} of one round: "
                    "pass rows=, the maximum tokens of any rank in this call, on every rank, for "
                    "several rounds; or build the layer with a larger max_tokens"
                )
        elif check_int("rows", rows, 0, min(MAX_ROWS, max_tokens * MAX_ROUNDS)) < tokens:
            raise InvalidArgument(
                f"rows is {rows}, but this rank has {tokens} tokens: pass the maximum tokens of "
                "any rank, equal on all ranks"
            )
        if (topk_ids is None) == (logits is None) or (topk_ids is None) != (topk_weights is None):
            raise InvalidArgument(
                f"logits are {format_value(logits)}, topk_ids {format_value(topk_ids)}, "
                f"topk_weights {format_value(topk_weights)}; pass logits, or topk_ids with "
                "topk_weights"
            )
        if topk_ids is not None and topk_weights is not None:
            check_topk(topk_ids, topk_weights, num_tokens)
            size, top_k = tuple(topk_ids.shape), config.routing.top_k
            if size != (tokens, top_k) or topk_ids.device != device:
                raise InvalidArgument(
                    f"topk_ids are {format_value(topk_ids)}; they must be [{tokens}, {top_k}] on "
                    f"{device}, because x has {tokens} rows and top_k is {top_k}"
                )
        else:
            assert logits is not None
            check_route(config.routing, logits, self.correction, num_tokens)
            if logits.shape[0] != tokens or logits.device != device:
                raise InvalidArgument(
                    f"logits are {format_value(logits)}; x has {tokens} rows on {device}: pass the "
                    "logits of the same tokens, [tokens, num_experts]"
                )
        if out is not None:
            row_bytes = config.hidden * config.dtype.itemsize
            check_tensor("out", out, shape=x.shape, dtypes=dtypes, device=device, aligned=row_bytes)
            inputs = {"x": x, "logits": logits, "topk_ids": topk_ids, "topk_weights": topk_weights}
            check_no_overlap("out", out, inputs | {"num_tokens": num_tokens}, exact="x")
        self._check_gradients()
        return 1 if rows is None else max(1, -(-rows // max_tokens))

    def _check_gradients(self) -> None:
        """Raise InvalidArgument if autograd would need gradients of the weights."""
        if self._trainable_field and torch.is_grad_enabled():
            raise InvalidArgument(
                f"weights.{self._trainable_field} requires a gradient, but weft computes none: "
                "call under torch.no_grad(), or build the layer with detached weights"
            )


def _build_placement_manifest(placement: LayerPlacement | None) -> dict[str, list[int] | None]:
    """Return a layer's current placement for comparison between ranks."""
    replicas = None if placement is None else placement.replicas
    return {"logical": None if replicas is None else list(replicas.logical)}
