# SPDX-License-Identifier: Apache-2.0
"""`Buffer` of deep_ep: low latency on weft.LowLatencyAllToAll, normal mode on weft.AllToAll.

docs/user/compat.md says what is the same, what is stricter and what is refused, call by call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from weft.arguments import flags, instance, integer, seconds
from weft.arguments import refuse as wrong
from weft.compat import rank_layout
from weft.compat.normal_mode import NormalHandle, NormalMode, Rows
from weft.compat.ranges import packed_ranges, token_indices
from weft.compat.rank_layout import Layout
from weft.compat.refusals import refuse, renamed
from weft.compat.row_exchange import MAX_ROW_RANKS, exchange_bytes
from weft.errors import InvalidArgument, OutOfOrder, UsageError
from weft.fields import largest
from weft.keywords import explain_keywords
from weft.lowlatency.config import MAX_EXPERTS, MAX_TOKENS
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.reference import unpack_scales
from weft.lowlatency.results import Handle
from weft.memory import Group
from weft.memory.driver import plain_tensors
from weft.runtime.check import check_alignment, check_tensor
from weft.runtime.library import untraced
from weft.runtime.operator import call_all
from weft.runtime.stream import capturing
from weft.shape import MAX_RANKS, MAX_ROW_BYTES, MAX_TOP_K, Shape

__all__ = ["Buffer", "Config", "EventOverlap", "topk_idx_t"]

topk_idx_t = torch.int64  # int32 ids are taken, too

HINTED_TOP_K = 16  # the size hint is not given top_k; this is more than models have
LOW_LATENCY = "low-latency calls need a Buffer made with it"
IDS = (torch.int32, torch.int64)
NODES = "weft serves the ranks of one host, which need no RDMA outside of low-latency mode"
MAX_CHUNK = 1 << 20
SHRINK = "masks are of low latency"
NO_SHRINK = "masks are read with enable_shrink=True"
# What weft's arguments are called here.
DISPATCHED = {"topk_ids": "topk_idx"}
COMBINED = {"y": "x", "topk_ids": "topk_idx"}
LOGFMT = "rows return as bfloat16, exactly"
STATS = "cumulative_local_expert_recv_stats"
COSTS = "weft counts no waits; weft.LowLatencyAllToAll(profile=True) has timelines"
Numbers: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Hook: TypeAlias = Callable[[], object]


class EventOverlap:
    """The end of a call. Calls run in the caller's stream, so waiting for it costs nothing.

    extra_tensors: kept alive as long as this is.
    """

    def __init__(
        self,
        event: torch.cuda.Event | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Let the current stream wait for the call."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()


@dataclass(frozen=True, slots=True)
class Config:
    """Chunk sizes of deep_ep's normal mode, kept as given; weft's kernels have no chunks.

    num_sms: from 0.   The others: tokens, from 1.   Raises InvalidArgument.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for place, each in enumerate(fields(self)):
            integer(each.name, getattr(self, each.name), min(place, 1), MAX_CHUNK)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of shared memory of bfloat16 dispatches and combines of so many tokens a rank as
        these chunks hold: `num_sms / 2 * num_max_nvl_chunked_recv_tokens`. More tokens take
        more.

        Args:
            hidden_bytes: Of a row, whole 16-byte vectors.
        """
        hidden_bytes = integer("hidden_bytes", hidden_bytes, 16, MAX_ROW_BYTES)
        if hidden_bytes % 16:
            wrong("hidden_bytes", hidden_bytes, "a multiple of 16")
        ranks = integer("num_ranks", num_ranks, 1, MAX_ROW_RANKS)
        tokens = max(1, self.num_sms // 2) * self.num_max_nvl_chunked_recv_tokens
        tokens = min(tokens, largest(Shape, "tokens"))
        return exchange_bytes(ranks, tokens, hidden_bytes)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: weft serves one NVLink domain, here of up to 32 ranks.

        Raises:
            InvalidArgument: an argument is invalid.
        """
        integer("hidden_bytes", hidden_bytes, 1, MAX_ROW_BYTES)
        integer("num_ranks", num_ranks, 1, MAX_ROW_RANKS)
        return 0


class Ticket(tuple[torch.Tensor, torch.Tensor, int, int, int]):
    """The handle of a dispatch, which callers unpack as deep_ep's.

    Source tokens, ranges, most tokens, hidden, experts.
    """

    key: tuple[Any, ...]  # of the exchange
    handle: Handle  # of the exchange's own


class Buffer:
    """Expert-parallel dispatch and combine with the calls of `deep_ep.Buffer`.

    The first call of each combination of sizes, FP8 and scales makes memory on all ranks together,
    in the normal mode also one of more tokens than before, by powers of two; it may not be in a
    graph capture. Low latency keeps two results for each: a handle may be combined several times,
    or never, and its rows are there until a later dispatch takes their slot, the oldest one that is
    left. Results of the normal mode are the caller's own, and its handles last as long as the
    buffer.

    Args:
        group: A torch process group of ranks on one host, or a weft.Group. num_nvl_bytes,
            num_rdma_bytes, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl,
            use_fabric, explicitly_destroy, comm: accepted and not used; memory follows from the
            calls. Without low_latency_mode, num_rdma_bytes must be 0.
        low_latency_mode: Whether low-latency calls are made beside the normal ones.
        enable_shrink: In low latency, masks can be asked for (`low_latency_query_mask_buffer`).
            They change when the group recovers from a death, and calls then serve the living.
        timeout: Seconds that a wait for a peer may take, and the first one.
        first_timeout: Seconds that a wait for a peer may take, and the first one.

    Raises:
        InvalidArgument: an argument is invalid.
        RendezvousFailed: the ranks do not meet.
    """

    num_sms = 20  # set_num_sms changes it; kernels fill what SMs they need

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
        flags(low_latency_mode=low_latency_mode)
        if not low_latency_mode:
            refuse("num_rdma_bytes", num_rdma_bytes, 0, NODES)
            refuse("enable_shrink", enable_shrink, False, SHRINK)
        flags(enable_shrink=enable_shrink)
        self._limits: dict[str, Any] = {
            "timeout": seconds("timeout", timeout),
            "first_timeout": seconds("first_timeout", first_timeout),
        }
        self._owns_group = not isinstance(group, Group)
        found = group if isinstance(group, Group) else Group.from_torch(group)
        self._group = found.one_host("Buffer")
        self.group = self._group if group is None else group
        self.rank, self.group_size = self._group.rank, self._group.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink
        self._exchanges: dict[tuple[Any, ...], LowLatencyAllToAll] = {}
        self._inputs: dict[tuple[Any, ...], torch.Tensor] = {}
        self._normal = NormalMode(self._group, self._limits)
        self._stream: torch.cuda.Stream | None = None  # of the normal mode's latest call
        self._destroyed = False

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: FP8 rows are served on every device."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set `Buffer.num_sms`, an even number; kernels use the SMs that they need."""
        new_num_sms = integer("new_num_sms", new_num_sms, 0, MAX_CHUNK)
        if new_num_sms % 2:
            wrong("new_num_sms", new_num_sms, "even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event of the current CUDA stream; where CUDA is not in use, one that is over."""
        in_use: Callable[[], bool] = torch.cuda.is_initialized
        return EventOverlap(_recorded() if in_use() else None)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the current stream, which is where all calls run.

        Raises:
            InvalidArgument: the ranks are CPU ranks.
        """
        if self._group.device.type != "cuda":
            raise InvalidArgument("get_comm_stream() of CPU ranks: they have no streams")
        return torch.cuda.current_stream(self._group.device)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a Config with `Buffer.num_sms`.

        Raises:
            InvalidArgument: there are more than 32 ranks.
        """
        integer("num_ranks", num_ranks, 1, MAX_ROW_RANKS)
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return a Config with `Buffer.num_sms`.

        Raises:
            InvalidArgument: there are more than 32 ranks.
        """
        return Buffer.get_dispatch_config(num_ranks)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of shared memory for a top_k of up to 16; results take as much again as they do."""
        experts = integer("num_experts", num_experts, 1, MAX_EXPERTS)
        most = num_max_dispatch_tokens_per_rank
        return LowLatencyAllToAll.memory_bytes(
            ranks=integer("num_ranks", num_ranks, 1, MAX_RANKS),
            max_tokens=integer("num_max_dispatch_tokens_per_rank", most, 1, MAX_TOKENS),
            hidden=hidden,
            top_k=min(HINTED_TOP_K, experts),
            num_experts=experts,
            scale="fp32_col",
        ).shared

    @untraced
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
    ) -> tuple[Numbers, torch.Tensor, Ticket, EventOverlap, Hook | None]:
        """Send bfloat16 `[tokens, hidden]` to the experts of int64 `[tokens, top_k]` (-1: none).

        `scale = amax * fl(1 / 448)`, amax at least 1e-4, or the power of two at or above it; `q =
        round(x * (448 / amax))`, or x by that power: deep_ep's bits, but that a block which holds
        an Inf or a NaN is NaN.

        Returns:
            `(numbers, counts, handle, event, hook)`: numbers are `[local_experts, num_ranks * most
                tokens, hidden]` float8_e4m3fn and their scales for 128 columns, column-major:
                float32, or with use_ue8m0 int32 of four UE8M0 bytes; without use_fp8 bfloat16
                alone. counts: int32 `[local_experts]`, also added to
                cumulative_local_expert_recv_stats. With return_recv_hook nothing is there before
                hook().

        Raises:
            InvalidArgument: an argument is invalid.
            OutOfOrder: an earlier one waits for its hook.
            GroupError: the group is broken.
        """
        refuse("low_latency_mode", self.low_latency_mode, True, LOW_LATENCY)
        refuse("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, None, COSTS)
        flags(use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0)
        flags(async_finish=async_finish, return_recv_hook=return_recv_hook)
        # What a new exchange would take its sizes from.
        self._check("x", x, (None, None), torch.bfloat16)
        self._check("topk_idx", topk_idx, (None, None), *IDS)
        most = num_max_dispatch_tokens_per_rank
        most = integer("num_max_dispatch_tokens_per_rank", most, 1, MAX_TOKENS)
        num_experts = integer("num_experts", num_experts, 1, MAX_EXPERTS)
        if use_ue8m0 and not (use_fp8 and round_scale):
            raise InvalidArgument(
                f"use_ue8m0 with use_fp8={use_fp8}, round_scale={round_scale}; a UE8M0 scale is a "
                "power of two of FP8 numbers: pass use_fp8=True, round_scale=True"
            )
        scale = ("ue8m0" if round_scale else "fp32_col") if use_fp8 else None
        sizes = (most, int(x.shape[-1]), int(topk_idx.shape[-1]))
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            self._check(STATS, stats, (None,), *IDS)
        key = (*sizes, num_experts, scale)
        a2a = self._exchange(key)
        if stats is not None:
            self._check(STATS, stats, (a2a.num_local_experts,), *IDS)
        receive: Hook | None = None
        try:
            if return_recv_hook:
                rows, receive = a2a.dispatch_send(x, topk_idx)
            else:
                rows = a2a.dispatch(x, topk_idx)
        except UsageError as error:
            raise renamed(error, DISPATCHED) from error
        scales, wide = rows.scales, None
        if use_fp8 and round_scale and not use_ue8m0:
            # Powers of two as float32, in the layout of the others: filled when rows are there.
            shape = a2a.config.shape
            size = (a2a.num_local_experts, shape.blocks, -(-shape.rows // 4) * 4)
            wide = torch.zeros(size, dtype=torch.float32, device=x.device).mT[:, : shape.rows]
            scales = wide
        numbers = rows.x if scales is None else (rows.x, scales)
        ranges = torch.zeros_like(rows.ranges[..., 0], dtype=torch.int64)
        tokens = torch.zeros_like(rows.source)

        def finish() -> None:
            if receive is not None:
                receive()
            tokens.copy_(token_indices(rows, most))
            ranges.copy_(packed_ranges(rows))
            if stats is not None:
                stats.add_(rows.counts)
            if wide is not None and rows.scales is not None:
                wide.copy_(unpack_scales(rows.scales, a2a.config.shape.blocks))

        if not return_recv_hook:
            finish()
        ticket = Ticket((tokens, ranges, most, sizes[1], num_experts))
        ticket.key, ticket.handle = key, rows.handle
        event = self._event(async_finish)
        return numbers, rows.counts, ticket, event, finish if return_recv_hook else None

    @untraced
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Ticket,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Return each token's weighted sum of its experts' rows, as `(out, event, hook)`.

        Args:
            x: bfloat16 `[local_experts, num_ranks * most tokens, hidden]`, any tensor: none is
                copied.
            topk_idx: Of the dispatch; float32 weights. The token's owner multiplies by them in
                top-k order.
            topk_weights: Of the dispatch; float32 weights. The token's owner multiplies by them in
                top-k order.
            zero_copy: The rows are in the handle's `get_next_low_latency_combine_buffer`, which is
                read in place of x.

        Raises:
            InvalidArgument: an argument is invalid.
            OutOfOrder: a later dispatch has taken the slot, or zero_copy before its buffer was
                asked for.
            GroupError: the group is broken.
        """
        refuse("use_logfmt", use_logfmt, False, LOGFMT)
        refuse("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, None, COSTS)
        flags(async_finish=async_finish, return_recv_hook=return_recv_hook, zero_copy=zero_copy)
        a2a = self._existing(handle)
        y = self._input(handle, x) if zero_copy else x
        hook: Hook | None = None
        try:
            if return_recv_hook:
                result, hook = a2a.combine_send(y, topk_idx, topk_weights, handle.handle, out)
            else:
                result = a2a.combine(y, topk_idx, topk_weights, handle.handle, out)
        except UsageError as error:
            raise renamed(error, COMBINED) from error
        return result, self._event(async_finish), hook

    @untraced
    def get_next_low_latency_combine_buffer(self, handle: Ticket) -> torch.Tensor:
        """bfloat16 `[local_experts, num_ranks * most tokens, hidden]` for experts to write.

        Combine reads any tensor in place; this is one, made at the first call for each slot.

        Raises:
            InvalidArgument: an argument is invalid.
            OutOfOrder: the call comes at the wrong time, or the object is closed.
        """
        slot = self._existing(handle)._slots[handle.handle.slot]
        if slot.latest is not handle.handle:
            raise OutOfOrder(
                "get_next_low_latency_combine_buffer of a handle whose slot a later dispatch has "
                "taken: ask before that dispatch"
            )
        key = (*handle.key, handle.handle.slot)
        if key not in self._inputs:
            size, device = slot.x.shape, slot.x.device
            with plain_tensors():
                self._inputs[key] = torch.zeros(size, dtype=torch.bfloat16, device=device)
        return self._inputs[key]

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing to do: an inbox is blank again when it has been read."""

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write int32 `[num_ranks]`: 1 for a rank that is gone, 0 for a living one.

        Raises:
            InvalidArgument: an argument is invalid, or enable_shrink is off.
        """
        refuse("enable_shrink", self.enable_shrink, True, NO_SHRINK)
        self._check("mask_status", mask_status, (self.group_size,), torch.int32)
        mask_status.copy_(torch.tensor(self._gone(), dtype=torch.int32))

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Check that a rank is masked, or that it is not; nothing is changed.

        A rank is masked by a recovery of the group, on all ranks, once its process has ended.

        Raises:
            InvalidArgument: `mask` says otherwise, or enable_shrink is off.
        """
        refuse("enable_shrink", self.enable_shrink, True, NO_SHRINK)
        rank = integer("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        flags(mask=mask)
        if bool(self._gone()[rank]) != mask:
            state = "lives" if mask else "is gone"
            raise InvalidArgument(
                f"mask is {mask} for rank {rank}, which {state}: a rank is masked by a recovery of "
                "the group, once its process has ended, until another one takes its number"
            )

    def low_latency_clean_mask_buffer(self) -> None:
        """Check that no rank is masked, as `low_latency_update_mask_buffer` does of each."""
        for rank in range(self.group_size):
            self.low_latency_update_mask_buffer(rank, False)

    def _gone(self) -> list[int]:
        """1 for each rank that is gone, 0 for a living one."""
        living = self._group.living
        return [int(rank not in living) for rank in range(self.group_size)]

    @untraced
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count where the tokens of int64 or int32 `[tokens, top_k]` go (-1: nowhere).

        Args:
            num_experts: Of all ranks together, a multiple of their number.
            previous_event: The current stream waits for it.
            allocate_on_comm_stream: No effect.

        Returns:
            int32 `[num_ranks]`, tokens for each rank; None; int32 `[num_experts]`, entries for each
                expert; bool `[tokens, num_ranks]`, whether a token goes to a rank; and the event.
                Ids that name no expert count for nobody; dispatch raises them.

        Raises:
            InvalidArgument: an argument is invalid.
        """
        self._check_call(async_finish, allocate_on_comm_stream)
        num_experts = integer("num_experts", num_experts, 1, largest(Shape, "experts"))
        if num_experts % self.group_size:
            wrong("num_experts", num_experts, f"a multiple of the {self.group_size} ranks")
        self._check_ids(topk_idx, None)
        _wait(previous_event)
        per_rank, per_expert, in_rank = rank_layout.dispatch_layout(
            topk_idx, num_experts, self.group_size
        )
        return per_rank, None, per_expert, in_rank, self._event(async_finish)

    @untraced
    def dispatch(
        self,
        x: Numbers,
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
        Numbers,
        torch.Tensor | None,
        torch.Tensor | None,
        list[int] | None,
        NormalHandle | None,
        EventOverlap,
    ]:
        """Send each token once to every rank that is_token_in_rank names.

        Args:
            x: bfloat16 `[tokens, hidden]`, or float8_e4m3fn and its scales, float32 or int32
                `[tokens, *]` of any strides.
            handle: Of an earlier dispatch, whose routing is used again, without waiting for counts;
                everything up to num_worst_tokens is left out then, and None is returned in their
                place.
            num_tokens_per_rank: As `get_dispatch_layout` returns them.
            is_token_in_rank: As `get_dispatch_layout` returns them.
            num_tokens_per_expert: As `get_dispatch_layout` returns them.
            num_tokens_per_rdma_rank: Not used.
            topk_idx: int64 or int32 and float32 `[tokens, top_k]`, both or none.
            topk_weights: int64 or int32 and float32 `[tokens, top_k]`, both or none.
            expert_alignment: The counts of experts are rounded up to a multiple of it.
            num_worst_tokens: Rows of the results, equal on all ranks and at least their number
                times the most tokens of any rank; then no host waits, and the call may be captured.
            config: Not used.
            previous_event: The current stream waits for it.
            allocate_on_comm_stream: No effect, since all runs in the current stream.

        Returns:
            `(x, topk_idx, topk_weights, counts, handle, event)`, in tensors of the caller's own,
                rows ordered by source rank, then token: x as it was given; local expert ids, -1 for
                others' and for rows after the received ones; weights, 0 there; a list of rows for
                each local expert, empty with num_worst_tokens.

        Raises:
            InvalidArgument: an argument is invalid. Every rank raises it, before rows are sent.
            TokenOverflow: there are too many tokens. Every rank raises it, before rows are sent.
            BadExpertId: an id names no expert. Every rank raises it, before rows are sent; with
                num_worst_tokens `check` raises it instead.
            GeometryMismatch: ranks pass different sizes.
            OutOfOrder: the call comes at the wrong time, or the object is closed.
            GroupError: the group is broken.
        """
        self._check_call(async_finish, allocate_on_comm_stream, config)
        alignment = integer("expert_alignment", expert_alignment, 1, MAX_CHUNK)
        most_rows = self.group_size * largest(Shape, "tokens")
        worst = integer("num_worst_tokens", num_worst_tokens, 0, most_rows)
        x, scales = self._check_rows(x)
        tokens = len(x)
        if handle is not None:
            _check_handle(handle, NormalHandle, "dispatch")
            had = len(self._normal.packing_of(handle).in_rank)
            for name, given in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
                refuse(name, given, None, "a handle's dispatch brings rows alone")
            if tokens != had:
                raise InvalidArgument(
                    f"x has {tokens} tokens, the dispatch of the handle had {had}: pass as many"
                )
            self._begin(previous_event)
            again = self._normal.dispatch_again(Rows(x, scales), handle)
            return _numbers_of(again), None, None, None, None, self._event(async_finish)
        layout = self._check_layout(
            tokens, num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank
        )
        topk = self._check_topk(tokens, topk_idx, topk_weights)
        if worst and topk is None:
            raise InvalidArgument(
                f"num_worst_tokens is {worst} without topk_idx, which says what rows were received"
            )
        self._begin(previous_event)
        found, counts, made = self._normal.dispatch(Rows(x, scales, topk), layout, alignment, worst)
        ids, weights = found.topk or (None, None)
        return _numbers_of(found), ids, weights, counts, made, self._event(async_finish)

    @untraced
    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Add the rows of each token at its owner: `out[t] = sum over ranks + bias[t]`.

        The sum is unweighted, in fp32 and rank order, rounded once; a second bias is added to that.

        Args:
            x: bfloat16 `[rows, hidden]`, a row for each of the dispatch's results.
            handle: Of any dispatch of this buffer, any number of times.
            topk_weights: float32 `[rows, top_k]`, added likewise.
            bias: bfloat16 `[tokens, hidden]`, one or a tuple of two.
            config: As in dispatch.
            previous_event: As in dispatch.
            allocate_on_comm_stream: As in dispatch.

        Returns:
            Bfloat16 `[tokens, hidden]`, float32 `[tokens, top_k]` or None, and the event; a token
                that went nowhere has its bias, or zeros.

        Raises:
            InvalidArgument: an argument is invalid.
            OutOfOrder: the call comes at the wrong time, or the object is closed.
            GroupError: the group is broken.
        """
        self._check_call(async_finish, allocate_on_comm_stream, config)
        _check_handle(handle, NormalHandle, "dispatch")
        packing = self._normal.packing_of(handle)
        rows, tokens = len(packing.tokens), len(packing.in_rank)
        self._check("x", x, (rows, None), torch.bfloat16, unit=16)
        biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        if len(biases) > 2:
            raise InvalidArgument(f"bias has {len(biases)} tensors; pass one, or a tuple of two")
        for place, each in enumerate(biases):
            name = "bias" if len(biases) == 1 else f"bias[{place}]"
            self._check(name, each, (tokens, x.shape[1]), torch.bfloat16, unit=16)
        if topk_weights is not None:
            self._check("topk_weights", topk_weights, (rows, None), torch.float32)
            top_k = integer("topk_weights.shape[1]", topk_weights.shape[1], 1, MAX_TOP_K)
            check_alignment("topk_weights", topk_weights, top_k * topk_weights.itemsize)
        self._begin(previous_event)
        sums, weights = self._normal.combine(x, topk_weights, handle, biases)
        return sums, weights, self._event(async_finish)

    def check(self) -> None:
        """Raise what the device has recorded; weft's own. Once a step, after a synchronisation."""
        self._check_open()
        call_all(*(exchange.check for exchange in self._exchanges.values()), self._normal.check)

    def destroy(self) -> None:
        """Give all memory back. Waits for this rank's own work. Idempotent."""
        if self._destroyed:
            return
        self._destroyed = True
        closes = [exchange.close for exchange in self._exchanges.values()]
        self._exchanges.clear()
        self._inputs.clear()
        close_group = [self._group.close] if self._owns_group else []
        call_all(*closes, self._normal.close, *close_group)

    def _check(
        self,
        name: str,
        tensor: torch.Tensor,
        shape: tuple[int | None, ...],
        *dtypes: torch.dtype,
        unit: int | None = None,
    ) -> None:
        """Raise InvalidArgument for a tensor that is not of this kind.   unit: of its address."""
        check_tensor(name, tensor, shape=shape, dtypes=dtypes, device=self._group.device)
        check_alignment(name, tensor, unit or tensor.itemsize)

    def _check_call(
        self, async_finish: bool, allocate_on_comm_stream: bool, config: Config | None = None
    ) -> None:
        """Raise for a destroyed buffer, and for what all calls of the normal mode take."""
        self._check_open()
        flags(async_finish=async_finish, allocate_on_comm_stream=allocate_on_comm_stream)
        if config is not None:
            instance("config", config, Config)

    def _check_layout(self, tokens: int, *given: torch.Tensor | None) -> Layout:
        """What get_dispatch_layout returned. Raises InvalidArgument."""
        kinds = (
            ("num_tokens_per_rank", (self.group_size,), torch.int32),
            ("num_tokens_per_expert", (None,), torch.int32),
            ("is_token_in_rank", (tokens, self.group_size), torch.bool),
        )
        found: list[torch.Tensor] = []
        for (name, shape, dtype), tensor in zip(kinds, given, strict=True):
            if tensor is None:
                wrong(name, None, "a tensor of get_dispatch_layout's, or pass a handle")
            self._check(name, tensor, shape, dtype)
            found.append(tensor)
        layout = Layout(*found)
        experts = len(layout.per_expert)
        if not experts or experts % self.group_size:
            raise InvalidArgument(
                f"num_tokens_per_expert has {experts} entries; it must have a multiple of the "
                f"{self.group_size} ranks"
            )
        return layout

    def _check_rows(self, x: Numbers) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x and its scales, contiguous, as the normal mode takes them. Raises InvalidArgument."""
        if not isinstance(x, tuple):
            self._check("x", x, (None, None), torch.bfloat16)
            _check_row_bytes("x", x)
            return x, None
        if len(x) != 2:
            raise InvalidArgument(f"x has {len(x)} tensors; pass one, or FP8 numbers and scales")
        numbers, scales = x
        self._check("x[0]", numbers, (None, None), torch.float8_e4m3fn)
        _check_row_bytes("x[0]", numbers)
        if isinstance(scales, torch.Tensor) and scales.layout is torch.strided:
            scales = scales.contiguous()
        self._check("x[1]", scales, (len(numbers), None), torch.float32, torch.int32)
        _check_row_bytes("x[1]", scales, scales.itemsize)
        return numbers, scales

    def _check_ids(self, ids: torch.Tensor, tokens: int | None) -> None:
        self._check("topk_idx", ids, (tokens, None), *IDS)
        integer("topk_idx.shape[1]", ids.shape[1], 1, MAX_TOP_K)

    def _check_topk(
        self, tokens: int, ids: torch.Tensor | None, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Ids and weights, or None without both. Raises InvalidArgument."""
        if ids is None and weights is None:
            return None
        if ids is None or weights is None:
            given, missing = ("topk_idx", "topk_weights")[:: 1 if weights is None else -1]
            raise InvalidArgument(f"{given} without {missing}; pass both, or none")
        self._check_ids(ids, tokens)
        self._check("topk_weights", weights, tuple(ids.shape), torch.float32)
        return ids, weights

    def _begin(self, event: EventOverlap | None) -> None:
        """Let the current stream wait for an event, and for a call made in another stream.

        Rounds of one buffer must not overlap. A capture waits for nothing outside of its graph.
        """
        _wait(event)
        device = self._group.device
        if device.type != "cuda" or capturing(device):
            return
        stream = torch.cuda.current_stream(device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _check_open(self) -> None:
        if self._destroyed:
            raise OutOfOrder("this buffer was destroyed; make a new one")

    def _exchange(self, key: tuple[Any, ...]) -> LowLatencyAllToAll:
        self._check_open()
        if key not in self._exchanges:
            most, hidden, top_k, experts, scale = key
            self._exchanges[key] = LowLatencyAllToAll(
                self._group,
                max_tokens=most,
                top_k=top_k,
                num_experts=experts,
                hidden=hidden,
                quantize=None if scale is None else "fp8",
                split_phase=True,
                scale=scale or "fp32_row",
                _recipe="deep_ep",
                _allow_handle_reuse=True,
                **self._limits,
            )
        return self._exchanges[key]

    def _existing(self, handle: Ticket) -> LowLatencyAllToAll:
        """The exchange of a handle: never a new one, which all ranks would have to make."""
        _check_handle(handle, Ticket, "low_latency_dispatch")
        if not self._destroyed and handle.key not in self._exchanges:
            raise OutOfOrder(
                "the handle is not of a dispatch of this buffer: pass what its "
                "low_latency_dispatch returned"
            )
        return self._exchange(handle.key)

    def _input(self, handle: Ticket, x: torch.Tensor) -> torch.Tensor:
        """The combine buffer of a handle, which zero_copy reads in place of `x`."""
        y = self._inputs.get((*handle.key, handle.handle.slot))
        if y is None:
            raise OutOfOrder(
                "zero_copy=True before get_next_low_latency_combine_buffer(handle): write the rows "
                "into the buffer that it returns, or pass zero_copy=False"
            )
        check_tensor("x", x, shape=tuple(y.shape), dtypes=(y.dtype,), device=y.device)
        return y

    def _event(self, wanted: bool) -> EventOverlap:
        return EventOverlap(_recorded() if wanted and self._group.device.type == "cuda" else None)


def _recorded() -> torch.cuda.Event:
    make: Callable[[], torch.cuda.Event] = torch.cuda.Event
    event = make()
    event.record()
    return event


def _check_handle(handle: object, kind: type, call: str) -> None:
    if not isinstance(handle, kind):
        wrong("handle", handle, f"the handle that {call} returned")


def _wait(event: EventOverlap | None) -> None:
    if event is not None:
        instance("previous_event", event, EventOverlap).current_stream_wait()


def _check_row_bytes(name: str, rows: torch.Tensor, unit: int = 16) -> None:
    size = rows.shape[1] * rows.itemsize
    if not size or size % unit or size > MAX_ROW_BYTES:
        raise InvalidArgument(
            f"{name} has rows of {size} bytes; they must be a multiple of {unit}, up to "
            f"{MAX_ROW_BYTES}"
        )
    check_alignment(name, rows, size)


def _numbers_of(rows: Rows) -> Numbers:
    return rows.x if rows.scales is None else (rows.x, rows.scales)


explain_keywords(globals())
