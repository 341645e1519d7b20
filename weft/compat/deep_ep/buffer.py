# SPDX-License-Identifier: Apache-2.0
"""`Buffer` of deep_ep: argument checks; `LowLatencyMode` and `NormalMode` run the calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from weft.arguments import check_bools, check_instance, check_int, check_seconds, raise_invalid
from weft.compat import rank_layout
from weft.compat.checks import check_allowed
from weft.compat.deep_ep.arguments import (
    IDS,
    TensorOrPair,
    check_argument,
    check_biases,
    check_handle,
    check_ids,
    check_layout,
    check_rows,
    check_topk,
    check_weights,
)
from weft.compat.deep_ep.config import MAX_CHUNK, Config
from weft.compat.deep_ep.events import EventOverlap, record_event, wait_for_event
from weft.compat.deep_ep.low_latency import (
    STATS_ARGUMENT,
    Hook,
    LowLatencyHandle,
    LowLatencyMode,
    Sizes,
)
from weft.compat.normal_mode import NormalHandle, NormalMode, Rows
from weft.compat.row_exchange import MAX_ROW_RANKS, VECTOR_BYTES
from weft.errors import InvalidArgument, OutOfOrder
from weft.fields import max_value
from weft.group import Group
from weft.lowlatency.config import MAX_EXPERTS, MAX_TOKENS
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.runtime.library import disable_tracing
from weft.runtime.operator import run_all
from weft.runtime.stream import is_capturing
from weft.shape import MAX_RANKS, Shape

HINT_TOP_K = 16  # the size hint has no top_k argument; current models use fewer
LOW_LATENCY_REASON = "low-latency calls need a Buffer with low_latency_mode=True"
RDMA_REASON = "weft's ranks are on one host, which needs no RDMA outside of low-latency mode"
SHRINK_REASON = "masks exist only in low-latency mode"
NO_SHRINK_REASON = "reading masks needs enable_shrink=True"
LOGFMT_REASON = "combine sends bfloat16 rows"
COSTS_REASON = (
    "weft does not measure waits; weft.LowLatencyAllToAll(profile=True) records timelines"
)


class Buffer:
    """Expert-parallel dispatch and combine with the calls of `deep_ep.Buffer`.

    The first call of each combination of sizes, FP8 and scales allocates memory on all ranks
    together, so it may not be in a graph capture. The normal mode also reallocates, by powers of
    two, when a call has more tokens than before.

    Low-latency mode has memory for two results per combination. A handle may be combined several
    times or never; its rows are valid until a later dispatch reuses their memory, the oldest first.
    Results of the normal mode belong to the caller, and its handles are valid as long as the
    buffer.

    Args:
        group: A torch process group of ranks on one host, or a weft.Group. The arguments
            num_nvl_bytes, num_rdma_bytes, num_qps_per_rank, allow_nvlink_for_low_latency_mode,
            allow_mnnvl, use_fabric, explicitly_destroy and comm are accepted and ignored, because
            memory follows from the calls. Without low_latency_mode, num_rdma_bytes must be 0.
        low_latency_mode: Whether low-latency calls are allowed in addition to normal ones.
        enable_shrink: Allows `low_latency_query_mask_buffer` in low-latency mode. Masks change when
            the group recovers from a death; later calls then use the living ranks.
        timeout: Seconds to wait for a peer.
        first_timeout: Seconds to wait for a peer in the first round.

    Raises:
        InvalidArgument: If an argument is invalid.
        RendezvousFailed: If the ranks do not meet.
    """

    num_sms = 20  # set by set_num_sms; kernels ignore it

    def __init__(
        self,
        group: dist.ProcessGroup | Group | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object = None,
        *,
        timeout: float = 100.0,
        first_timeout: float = 120.0,
    ) -> None:
        check_bools(low_latency_mode=low_latency_mode)
        if not low_latency_mode:
            check_allowed("num_rdma_bytes", num_rdma_bytes, 0, RDMA_REASON)
            check_allowed("enable_shrink", enable_shrink, False, SHRINK_REASON)
        check_bools(enable_shrink=enable_shrink)
        limits: dict[str, Any] = {
            "timeout": check_seconds("timeout", timeout),
            "first_timeout": check_seconds("first_timeout", first_timeout),
        }
        self._owns_group = not isinstance(group, Group)
        weft_group = group if isinstance(group, Group) else Group.from_torch(group)
        self._group = weft_group.require_one_host("Buffer")
        self.group = self._group if group is None else group
        self.rank, self.group_size = self._group.rank, self._group.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink
        self._low_latency = LowLatencyMode(self._group, limits)
        self._normal = NormalMode(self._group, limits)
        self._stream: torch.cuda.Stream | None = None  # stream of the latest normal-mode call
        self._destroyed = False

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return True: every device supports FP8 rows."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set `Buffer.num_sms`, an even number. Kernels ignore it."""
        new_num_sms = check_int("new_num_sms", new_num_sms, 0, MAX_CHUNK)
        if new_num_sms % 2:
            raise_invalid("new_num_sms", new_num_sms, "even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event of the current CUDA stream, or a completed one if CUDA is not in use."""
        in_use: Callable[[], bool] = torch.cuda.is_initialized
        return record_event(enabled=in_use())

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the current stream, in which all calls run.

        Raises:
            InvalidArgument: If the ranks are CPU ranks.
        """
        if self._group.device.type != "cuda":
            raise InvalidArgument("get_comm_stream() needs GPU ranks: CPU ranks have no streams")
        return torch.cuda.current_stream(self._group.device)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a Config with `Buffer.num_sms`.

        Raises:
            InvalidArgument: If there are more than 32 ranks.
        """
        check_int("num_ranks", num_ranks, 1, MAX_ROW_RANKS)
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return a Config with `Buffer.num_sms`.

        Raises:
            InvalidArgument: If there are more than 32 ranks.
        """
        return Buffer.get_dispatch_config(num_ranks)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the bytes of symmetric memory for top_k up to 16, without those of results."""
        num_experts = check_int("num_experts", num_experts, 1, MAX_EXPERTS)
        max_tokens = num_max_dispatch_tokens_per_rank
        return LowLatencyAllToAll.memory_bytes(
            ranks=check_int("num_ranks", num_ranks, 1, MAX_RANKS),
            max_tokens=check_int("num_max_dispatch_tokens_per_rank", max_tokens, 1, MAX_TOKENS),
            hidden=hidden,
            top_k=min(HINT_TOP_K, num_experts),
            num_experts=num_experts,
            scale="fp32_col",
            reduce="receiver",
        ).shared

    @disable_tracing
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[TensorOrPair, torch.Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Send bfloat16 `[tokens, hidden]` to the experts in int64 `[tokens, top_k]` (-1: none).

        FP8 rows have `scale = amax * fl(1 / 448)` with amax at least 1e-4, and
        `q = round(x * (448 / amax))`; with round_scale, the scale is the power of two at or above
        it and x is divided by that. These are deep_ep's bits, except that a block with an Inf or a
        NaN is all NaN.

        Returns:
            `(recv_x, counts, handle, event, hook)`.
                numbers: `[local_experts, num_ranks * num_max_dispatch_tokens_per_rank, hidden]`
                    float8_e4m3fn and the column-major scales of 128 columns each, float32 or, with
                    use_ue8m0, int32 of four UE8M0 bytes; bfloat16 alone without use_fp8.
                counts: int32 `[local_experts]`, also added to cumulative_local_expert_recv_stats.
                With return_recv_hook, hook() writes the results.

        Raises:
            InvalidArgument: If an argument is invalid.
            OutOfOrder: If the hook of an earlier dispatch has not been called.
            GroupError: If the group is broken.
        """
        check_allowed("low_latency_mode", self.low_latency_mode, True, LOW_LATENCY_REASON)
        check_allowed(
            "dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, None, COSTS_REASON
        )
        check_bools(use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0)
        check_bools(async_finish=async_finish, return_recv_hook=return_recv_hook)
        self._check_open()
        # Checked here, because a new exchange gets its sizes from these tensors.
        device = self._group.device
        check_argument("x", x, (None, None), torch.bfloat16, device=device)
        check_argument("topk_idx", topk_idx, (None, None), *IDS, device=device)
        max_tokens = num_max_dispatch_tokens_per_rank
        max_tokens = check_int("num_max_dispatch_tokens_per_rank", max_tokens, 1, MAX_TOKENS)
        num_experts = check_int("num_experts", num_experts, 1, MAX_EXPERTS)
        if use_ue8m0 and not (use_fp8 and round_scale):
            raise InvalidArgument(
                f"use_ue8m0 with use_fp8={use_fp8}, round_scale={round_scale}; a UE8M0 scale is a "
                "power of two of FP8 rows: pass use_fp8=True, round_scale=True"
            )
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            check_argument(STATS_ARGUMENT, stats, (None,), *IDS, device=device)
        scale = ("ue8m0" if round_scale else "fp32_col") if use_fp8 else None
        sizes = Sizes(max_tokens, int(x.shape[-1]), int(topk_idx.shape[-1]), num_experts, scale)
        recv_x, counts, handle, hook = self._low_latency.dispatch(
            x,
            topk_idx,
            sizes,
            stats,
            return_fp32_scales=scale == "ue8m0" and not use_ue8m0,
            return_hook=return_recv_hook,
        )
        return recv_x, counts, handle, self._record_event(async_finish), hook

    @disable_tracing
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Return each token's weighted sum of its experts' rows, as `(out, event, hook)`.

        Args:
            x: bfloat16 `[local_experts, num_ranks * num_max_dispatch_tokens_per_rank, hidden]`. Any
                tensor is read in place, without a copy.
            topk_idx: As in the dispatch.
            topk_weights: float32 `[tokens, top_k]`, applied in top-k order on the token's rank.
            handle: The dispatch's handle.
            use_logfmt: Must be False.
            zero_copy: Read the handle's `get_next_low_latency_combine_buffer` instead of x.
            return_recv_hook: Return a hook that receives the rows.
            out: bfloat16 `[tokens, hidden]` to write into.

        Raises:
            InvalidArgument: If an argument is invalid.
            OutOfOrder: If a later dispatch reused the memory, or zero_copy is set before the
                combine buffer was requested.
            GroupError: If the group is broken.
        """
        check_allowed("use_logfmt", use_logfmt, False, LOGFMT_REASON)
        check_allowed(
            "combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, None, COSTS_REASON
        )
        check_bools(
            async_finish=async_finish, return_recv_hook=return_recv_hook, zero_copy=zero_copy
        )
        self._check_open()
        result, hook = self._low_latency.combine(
            x,
            topk_idx,
            topk_weights,
            handle,
            out,
            zero_copy=zero_copy,
            return_hook=return_recv_hook,
        )
        return result, self._record_event(async_finish), hook

    @disable_tracing
    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Return a bfloat16 buffer for combine, `[local_experts, num_ranks * max_tokens, hidden]`.

        low_latency_combine reads any tensor in place, so this buffer saves no copy. It is allocated
        by the first call for each of the two results.

        Raises:
            InvalidArgument: If an argument is invalid.
            OutOfOrder: If a later dispatch reused the handle's memory, or the buffer is destroyed.
        """
        self._check_open()
        return self._low_latency.get_combine_buffer(handle)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Do nothing: kernels clear an inbox after reading it."""

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write int32 `[num_ranks]`: 1 for a dead rank, 0 for a living one.

        Raises:
            InvalidArgument: If an argument is invalid or enable_shrink is off.
        """
        check_allowed("enable_shrink", self.enable_shrink, True, NO_SHRINK_REASON)
        ranks, device = (self.group_size,), self._group.device
        check_argument("mask_status", mask_status, ranks, torch.int32, device=device)
        mask_status.copy_(torch.tensor(self._dead_mask(), dtype=torch.int32))

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Raise InvalidArgument unless `mask` is the rank's current state. No mask is changed.

        `Group.recover` masks a rank on all ranks once its process has ended.

        Raises:
            InvalidArgument: If `mask` differs from the rank's state, or enable_shrink is off.
        """
        check_allowed("enable_shrink", self.enable_shrink, True, NO_SHRINK_REASON)
        rank = check_int("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        check_bools(mask=mask)
        if bool(self._dead_mask()[rank]) != mask:
            state = "is alive" if mask else "is dead"
            raise InvalidArgument(
                f"mask is {mask} for rank {rank}, which {state}: Group.recover masks a rank "
                "once its process has ended, until a new process joins with its number"
            )

    def low_latency_clean_mask_buffer(self) -> None:
        """Raise if a rank is masked; see `low_latency_update_mask_buffer`."""
        for rank in range(self.group_size):
            self.low_latency_update_mask_buffer(rank, False)

    def _dead_mask(self) -> list[int]:
        living = self._group.living
        return [int(rank not in living) for rank in range(self.group_size)]

    @disable_tracing
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count the destinations of tokens, from int64 or int32 `[tokens, top_k]` (-1: none).

        Args:
            topk_idx: Global expert ids. dispatch raises for ids that name no expert; they are not
                counted here.
            num_experts: Experts of all ranks, a multiple of the number of ranks.
            previous_event: Event that the current stream waits for.
            async_finish: Return an event.
            allocate_on_comm_stream: No effect.

        Returns:
            Tokens per rank, int32 `[num_ranks]`; None; entries per expert, int32 `[num_experts]`;
                whether a token goes to a rank, bool `[tokens, num_ranks]`; and the event.

        Raises:
            InvalidArgument: If an argument is invalid.
        """
        self._check_call(async_finish, allocate_on_comm_stream)
        num_experts = check_int("num_experts", num_experts, 1, max_value(Shape, "experts"))
        if num_experts % self.group_size:
            raise_invalid("num_experts", num_experts, f"a multiple of the {self.group_size} ranks")
        check_ids(topk_idx, None, self._group.device)
        wait_for_event(previous_event)
        per_rank, per_expert, in_rank = rank_layout.compute_layout(
            topk_idx, num_experts, self.group_size
        )
        return per_rank, None, per_expert, in_rank, self._record_event(async_finish)

    @disable_tracing
    def dispatch(
        self,
        x: TensorOrPair,
        handle: NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        TensorOrPair,
        torch.Tensor | None,
        torch.Tensor | None,
        list[int] | None,
        NormalHandle | None,
        EventOverlap,
    ]:
        """Send each token once to each of its ranks in is_token_in_rank.

        Args:
            x: bfloat16 `[tokens, hidden]`, or float8_e4m3fn with its scales, float32 or int32
                `[tokens, *]` of any strides.
            handle: Handle of an earlier dispatch, to reuse its routing without waiting for counts.
                Omit the arguments up to num_worst_tokens; their results are then None.
            num_tokens_per_rank: As returned by `get_dispatch_layout`.
            num_tokens_per_rdma_rank: Ignored.
            is_token_in_rank: As returned by `get_dispatch_layout`.
            num_tokens_per_expert: As returned by `get_dispatch_layout`.
            topk_idx: int64 or int32 `[tokens, top_k]`; pass it with topk_weights or not at all.
            topk_weights: float32 `[tokens, top_k]`.
            expert_alignment: Expert counts are rounded up to a multiple of it.
            num_worst_tokens: Number of result rows: equal on all ranks, at least the number of
                ranks times the largest token count of any rank. The host then does not wait, so the
                call may be captured.
            config: Ignored.
            previous_event: Event that the current stream waits for.
            async_finish: Return an event.
            allocate_on_comm_stream: No effect: everything runs in the current stream.

        Returns:
            `(x, topk_idx, topk_weights, counts, handle, event)` in tensors that the caller owns,
                rows ordered by source rank, then token. x has the format of the argument. topk_idx
                has local expert ids, -1 for other ranks' experts and for rows after the received
                ones; their weights are 0. counts is a list of rows per local expert, empty with
                num_worst_tokens.

        Raises:
            InvalidArgument: If an argument is invalid. Every rank raises it before rows are sent.
            TokenOverflow: If there are too many tokens. Every rank raises it before rows are sent.
            BadExpertId: If an id names no expert. Every rank raises it before rows are sent; with
                num_worst_tokens, `check` raises it instead.
            GeometryMismatch: If ranks pass different sizes.
            OutOfOrder: If the handle is another buffer's, or the buffer is destroyed.
            GroupError: If the group is broken.
        """
        self._check_call(async_finish, allocate_on_comm_stream, config)
        alignment = check_int("expert_alignment", expert_alignment, 1, MAX_CHUNK)
        row_limit = self.group_size * max_value(Shape, "tokens")
        num_worst_tokens = check_int("num_worst_tokens", num_worst_tokens, 0, row_limit)
        device = self._group.device
        x, scales = check_rows(x, device)
        tokens = len(x)
        if handle is not None:
            check_handle(handle, NormalHandle, "dispatch")
            num_tokens = len(self._normal.get_packing(handle).in_rank)
            for name, tensor in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
                check_allowed(name, tensor, None, "a dispatch with a handle sends rows only")
            if tokens != num_tokens:
                raise InvalidArgument(
                    f"x has {tokens} tokens, but the handle's dispatch had {num_tokens}: pass the "
                    "same number"
                )
            self._wait_for_inputs(previous_event)
            received = self._normal.redispatch(Rows(x, scales), handle)
            return _join_scales(received), None, None, None, None, self._record_event(async_finish)
        counts_and_ranks = (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
        layout = check_layout(tokens, self.group_size, device, *counts_and_ranks)
        topk = check_topk(tokens, topk_idx, topk_weights, device)
        if num_worst_tokens and topk is None:
            raise InvalidArgument(
                f"num_worst_tokens is {num_worst_tokens} without topk_idx, which distinguishes "
                "received rows from padding"
            )
        self._wait_for_inputs(previous_event)
        received, counts, handle = self._normal.dispatch(
            Rows(x, scales, topk), layout, alignment, num_worst_tokens
        )
        ids, weights = received.topk or (None, None)
        event = self._record_event(async_finish)
        return _join_scales(received), ids, weights, counts, handle, event

    @disable_tracing
    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: TensorOrPair | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sum each token's rows over the ranks: `out[t] = sum over ranks + bias[t]`.

        The sum is unweighted, in fp32 and rank order, and rounded once. A second bias is added to
        the rounded sum.

        Args:
            x: bfloat16 `[rows, hidden]`, one row per row that the dispatch returned.
            handle: Handle of any dispatch of this buffer; it may be reused.
            topk_weights: float32 `[rows, top_k]`, summed in the same way.
            bias: bfloat16 `[tokens, hidden]`, or a tuple of two.
            config: Ignored.
            previous_event: As in dispatch.
            async_finish: As in dispatch.
            allocate_on_comm_stream: As in dispatch.

        Returns:
            bfloat16 `[tokens, hidden]`, float32 `[tokens, top_k]` or None, and the event. A token
                without a destination gets its bias, or zeros.

        Raises:
            InvalidArgument: If an argument is invalid.
            OutOfOrder: If the handle is another buffer's, or the buffer is destroyed.
            GroupError: If the group is broken.
        """
        self._check_call(async_finish, allocate_on_comm_stream, config)
        check_handle(handle, NormalHandle, "dispatch")
        packing = self._normal.get_packing(handle)
        rows, tokens = len(packing.tokens), len(packing.in_rank)
        device = self._group.device
        check_argument("x", x, (rows, None), torch.bfloat16, device=device, alignment=VECTOR_BYTES)
        biases = check_biases(bias, tokens, x.shape[1], device)
        if topk_weights is not None:
            check_weights(topk_weights, rows, device)
        self._wait_for_inputs(previous_event)
        sums, weights = self._normal.combine(x, topk_weights, handle, biases)
        return sums, weights, self._record_event(async_finish)

    def check(self) -> None:
        """Raise errors recorded by the device; call it after a synchronization. Not in deep_ep."""
        self._check_open()
        run_all(self._low_latency.check, self._normal.check)

    def destroy(self) -> None:
        """Free all memory once this rank's kernels have finished. Idempotent."""
        if self._destroyed:
            return
        self._destroyed = True
        close_group = [self._group.close] if self._owns_group else []
        run_all(self._low_latency.close, self._normal.close, *close_group)

    def _check_call(
        self, async_finish: bool, allocate_on_comm_stream: bool, config: Config | None = None
    ) -> None:
        """Raise for a destroyed buffer and for invalid arguments shared by normal-mode calls."""
        self._check_open()
        check_bools(async_finish=async_finish, allocate_on_comm_stream=allocate_on_comm_stream)
        if config is not None:
            check_instance("config", config, Config)

    def _wait_for_inputs(self, event: EventOverlap | None) -> None:
        """Make the current stream wait for an event and for the previous call's stream.

        Calls of one buffer must not overlap. A captured call waits only inside its graph.
        """
        wait_for_event(event)
        device = self._group.device
        if device.type != "cuda" or is_capturing(device):
            return
        stream = torch.cuda.current_stream(device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _check_open(self) -> None:
        if self._destroyed:
            raise OutOfOrder("this buffer was destroyed; create a new one")

    def _record_event(self, enabled: bool) -> EventOverlap:
        return record_event(enabled=enabled and self._group.device.type == "cuda")


def _join_scales(rows: Rows) -> TensorOrPair:
    return rows.x if rows.scales is None else (rows.x, rows.scales)
