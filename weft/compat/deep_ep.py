# SPDX-License-Identifier: Apache-2.0
"""`Buffer` of deep_ep: low latency on weft.LowLatencyAllToAll, normal mode on weft.AllToAll.

docs/user/compat.md lists for each call what is the same, what is stricter and what is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from weft.arguments import check_bools, check_instance, check_int, check_seconds
from weft.arguments import raise_invalid as wrong
from weft.compat import rank_layout
from weft.compat.normal_mode import NormalHandle, NormalMode, Rows
from weft.compat.ranges import packed_ranges, token_indices
from weft.compat.rank_layout import Layout
from weft.compat.refusals import refuse, renamed
from weft.compat.row_exchange import MAX_ROW_RANKS, exchange_bytes
from weft.errors import InvalidArgument, OutOfOrder, UsageError
from weft.fields import max_value
from weft.group import Group
from weft.keywords import explain_keywords
from weft.lowlatency.config import MAX_EXPERTS, MAX_TOKENS
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.reference import unpack_scales
from weft.lowlatency.results import Handle
from weft.runtime.ambient import plain_tensors
from weft.runtime.check import check_alignment, check_tensor
from weft.runtime.library import untraced
from weft.runtime.operator import call_all
from weft.runtime.stream import capturing
from weft.shape import MAX_RANKS, MAX_ROW_BYTES, MAX_TOP_K, Shape

__all__ = ["Buffer", "Config", "EventOverlap", "topk_idx_t"]

topk_idx_t = torch.int64  # int32 ids are accepted as well

HINTED_TOP_K = 16  # the size hint does not get top_k; models use fewer
LOW_LATENCY = "low-latency calls need a Buffer with low_latency_mode=True"
IDS = (torch.int32, torch.int64)
NODES = "weft serves the ranks of one host, which need no RDMA outside of low-latency mode"
MAX_CHUNK = 1 << 20
SHRINK = "masks belong to low-latency mode"
NO_SHRINK = "reading masks needs enable_shrink=True"
# Names of weft's arguments in deep_ep's calls.
DISPATCHED = {"topk_ids": "topk_idx"}
COMBINED = {"y": "x", "topk_ids": "topk_idx"}
LOGFMT = "rows return as exact bfloat16"
STATS = "cumulative_local_expert_recv_stats"
COSTS = "weft does not measure waits; weft.LowLatencyAllToAll(profile=True) records timelines"
Numbers: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Hook: TypeAlias = Callable[[], object]


class EventOverlap:
    """The end of a call. Calls run in the caller's stream, so waiting for it costs nothing.

    `extra_tensors` are kept alive as long as this object.
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
    """Chunk sizes of deep_ep's normal mode. They are stored only; weft's kernels have no chunks.

    Raises:
        InvalidArgument: If num_sms is below 0 or a number of tokens below 1.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for place, each in enumerate(fields(self)):
            check_int(each.name, getattr(self, each.name), min(place, 1), MAX_CHUNK)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes of shared memory for bfloat16 dispatches and combines.

        The estimate is for `num_sms / 2 * num_max_nvl_chunked_recv_tokens` tokens per rank. More
        tokens need more memory.

        Args:
            hidden_bytes: Bytes of a row, a multiple of 16.
            num_ranks: Number of ranks.
        """
        hidden_bytes = check_int("hidden_bytes", hidden_bytes, 16, MAX_ROW_BYTES)
        if hidden_bytes % 16:
            wrong("hidden_bytes", hidden_bytes, "a multiple of 16")
        ranks = check_int("num_ranks", num_ranks, 1, MAX_ROW_RANKS)
        tokens = max(1, self.num_sms // 2) * self.num_max_nvl_chunked_recv_tokens
        tokens = min(tokens, max_value(Shape, "tokens"))
        return exchange_bytes(ranks, tokens, hidden_bytes)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0: weft serves one NVLink domain, here of up to 32 ranks.

        Raises:
            InvalidArgument: If an argument is invalid.
        """
        check_int("hidden_bytes", hidden_bytes, 1, MAX_ROW_BYTES)
        check_int("num_ranks", num_ranks, 1, MAX_ROW_RANKS)
        return 0


class Ticket(tuple[torch.Tensor, torch.Tensor, int, int, int]):
    """The handle of a low-latency dispatch, which callers unpack like deep_ep's.

    Its items are source tokens, ranges, maximum tokens per rank, hidden size and number of experts.
    """

    key: tuple[Any, ...]  # identifies the exchange
    handle: Handle  # the exchange's own handle


class Buffer:
    """Expert-parallel dispatch and combine with the calls of `deep_ep.Buffer`.

    The first call of each combination of sizes, FP8 and scales allocates memory on all ranks
    together, so it may not be in a graph capture. The normal mode also reallocates, by powers of
    two, when a call has more tokens than before.

    Low-latency mode keeps two results per combination. A handle may be combined several times or
    never; its rows are valid until a later dispatch reuses their slot, the oldest first. Results of
    the normal mode belong to the caller, and its handles are valid as long as the buffer.

    Args:
        group: A torch process group of ranks on one host, or a weft.Group. The arguments
            num_nvl_bytes, num_rdma_bytes, num_qps_per_rank, allow_nvlink_for_low_latency_mode,
            allow_mnnvl, use_fabric, explicitly_destroy and comm are accepted and ignored, because
            memory follows from the calls. Without low_latency_mode, num_rdma_bytes must be 0.
        low_latency_mode: Whether low-latency calls are allowed in addition to normal ones.
        enable_shrink: Allows `low_latency_query_mask_buffer` in low-latency mode. Masks change when
            the group recovers from a death; later calls then serve the living ranks.
        timeout: Seconds to wait for a peer.
        first_timeout: Seconds to wait for a peer in the first round.

    Raises:
        InvalidArgument: If an argument is invalid.
        RendezvousFailed: If the ranks do not meet.
    """

    num_sms = 20  # changed by set_num_sms; kernels use the SMs that they need

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
        check_bools(low_latency_mode=low_latency_mode)
        if not low_latency_mode:
            refuse("num_rdma_bytes", num_rdma_bytes, 0, NODES)
            refuse("enable_shrink", enable_shrink, False, SHRINK)
        check_bools(enable_shrink=enable_shrink)
        self._limits: dict[str, Any] = {
            "timeout": check_seconds("timeout", timeout),
            "first_timeout": check_seconds("first_timeout", first_timeout),
        }
        self._owns_group = not isinstance(group, Group)
        weft_group = group if isinstance(group, Group) else Group.from_torch(group)
        self._group = weft_group.one_host("Buffer")
        self.group = self._group if group is None else group
        self.rank, self.group_size = self._group.rank, self._group.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink
        self._exchanges: dict[tuple[Any, ...], LowLatencyAllToAll] = {}
        self._inputs: dict[tuple[Any, ...], torch.Tensor] = {}
        self._normal = NormalMode(self._group, self._limits)
        self._stream: torch.cuda.Stream | None = None  # stream of the latest normal-mode call
        self._destroyed = False

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return True: FP8 rows work on every device."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set `Buffer.num_sms`, an even number. Kernels still use the SMs that they need."""
        new_num_sms = check_int("new_num_sms", new_num_sms, 0, MAX_CHUNK)
        if new_num_sms % 2:
            wrong("new_num_sms", new_num_sms, "even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event of the current CUDA stream, or a completed one if CUDA is not in use."""
        in_use: Callable[[], bool] = torch.cuda.is_initialized
        return EventOverlap(_record_event() if in_use() else None)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the current stream, in which all calls run.

        Raises:
            InvalidArgument: If the ranks are CPU ranks.
        """
        if self._group.device.type != "cuda":
            raise InvalidArgument("get_comm_stream() of CPU ranks: they have no streams")
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
        """Return bytes of shared memory for top_k up to 16; results need the same amount again."""
        experts = check_int("num_experts", num_experts, 1, MAX_EXPERTS)
        most = num_max_dispatch_tokens_per_rank
        return LowLatencyAllToAll.memory_bytes(
            ranks=check_int("num_ranks", num_ranks, 1, MAX_RANKS),
            max_tokens=check_int("num_max_dispatch_tokens_per_rank", most, 1, MAX_TOKENS),
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
        """Send bfloat16 `[tokens, hidden]` to the experts in int64 `[tokens, top_k]` (-1: none).

        FP8 rows have `scale = amax * fl(1 / 448)` with amax at least 1e-4, and
        `q = round(x * (448 / amax))`; with round_scale, the scale is the power of two at or above
        it and x is divided by that. These are deep_ep's bits, except that a block with an Inf or a
        NaN is all NaN.

        Returns:
            `(numbers, counts, handle, event, hook)`.
                numbers: `[local_experts, num_ranks * num_max_dispatch_tokens_per_rank, hidden]`
                    float8_e4m3fn and the column-major scales of 128 columns each, float32 or, with
                    use_ue8m0, int32 of four UE8M0 bytes; bfloat16 alone without use_fp8.
                counts: int32 `[local_experts]`, also added to cumulative_local_expert_recv_stats.
                With return_recv_hook, results are filled by hook().

        Raises:
            InvalidArgument: If an argument is invalid.
            OutOfOrder: If an earlier dispatch waits for its hook.
            GroupError: If the group is broken.
        """
        refuse("low_latency_mode", self.low_latency_mode, True, LOW_LATENCY)
        refuse("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, None, COSTS)
        check_bools(use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0)
        check_bools(async_finish=async_finish, return_recv_hook=return_recv_hook)
        # The sizes of a new exchange come from these tensors.
        self._check("x", x, (None, None), torch.bfloat16)
        self._check("topk_idx", topk_idx, (None, None), *IDS)
        most = num_max_dispatch_tokens_per_rank
        most = check_int("num_max_dispatch_tokens_per_rank", most, 1, MAX_TOKENS)
        num_experts = check_int("num_experts", num_experts, 1, MAX_EXPERTS)
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
            # Powers of two as float32, in the layout of the other scales; finish() fills them.
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
            x: bfloat16 `[local_experts, num_ranks * num_max_dispatch_tokens_per_rank, hidden]`. Any
                tensor is read in place.
            topk_idx: As in the dispatch.
            topk_weights: float32 `[tokens, top_k]`. The token's owner applies them in top-k order.
            handle: The dispatch's handle.
            use_logfmt: Must be False.
            zero_copy: Read the handle's `get_next_low_latency_combine_buffer` instead of x.
            return_recv_hook: Return a hook that receives the rows.
            out: bfloat16 `[tokens, hidden]` to write into.

        Raises:
            InvalidArgument: If an argument is invalid.
            OutOfOrder: If a later dispatch reused the slot, or zero_copy is set before the combine
                buffer was requested.
            GroupError: If the group is broken.
        """
        refuse("use_logfmt", use_logfmt, False, LOGFMT)
        refuse("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, None, COSTS)
        check_bools(
            async_finish=async_finish, return_recv_hook=return_recv_hook, zero_copy=zero_copy
        )
        a2a = self._existing_exchange(handle)
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
        """Return a buffer `[local_experts, num_ranks * max tokens, hidden]`, bfloat16, for experts.

        Combine reads any tensor in place, so using it saves no copy. It is allocated at the first
        call for each slot.

        Raises:
            InvalidArgument: If an argument is invalid.
            OutOfOrder: If a later dispatch reused the handle's slot, or the buffer is destroyed.
        """
        slot = self._existing_exchange(handle).slots[handle.handle.slot]
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
        """Do nothing: an inbox is blank again after it has been read."""

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write int32 `[num_ranks]`: 1 for a dead rank, 0 for a living one.

        Raises:
            InvalidArgument: If an argument is invalid or enable_shrink is off.
        """
        refuse("enable_shrink", self.enable_shrink, True, NO_SHRINK)
        self._check("mask_status", mask_status, (self.group_size,), torch.int32)
        mask_status.copy_(torch.tensor(self._dead_mask(), dtype=torch.int32))

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Check that a rank is masked or not masked. Nothing is changed.

        A recovery of the group masks a rank on all ranks once its process has ended.

        Raises:
            InvalidArgument: If `mask` differs from the rank's state, or enable_shrink is off.
        """
        refuse("enable_shrink", self.enable_shrink, True, NO_SHRINK)
        rank = check_int("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        check_bools(mask=mask)
        if bool(self._dead_mask()[rank]) != mask:
            state = "lives" if mask else "is gone"
            raise InvalidArgument(
                f"mask is {mask} for rank {rank}, which {state}: a recovery of the group masks a "
                "rank once its process has ended, until a new process takes its number"
            )

    def low_latency_clean_mask_buffer(self) -> None:
        """Check that no rank is masked; see `low_latency_update_mask_buffer`."""
        for rank in range(self.group_size):
            self.low_latency_update_mask_buffer(rank, False)

    def _dead_mask(self) -> list[int]:
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
        """Send each token once to every rank that is_token_in_rank marks.

        Args:
            x: bfloat16 `[tokens, hidden]`, or float8_e4m3fn with its scales, float32 or int32
                `[tokens, *]` of any strides.
            handle: Handle of an earlier dispatch, to reuse its routing without waiting for counts.
                The arguments up to num_worst_tokens are then omitted, and their results are None.
            num_tokens_per_rank: As returned by `get_dispatch_layout`.
            num_tokens_per_rdma_rank: Ignored.
            is_token_in_rank: As returned by `get_dispatch_layout`.
            num_tokens_per_expert: As returned by `get_dispatch_layout`.
            topk_idx: int64 or int32 `[tokens, top_k]`; pass it with topk_weights or not at all.
            topk_weights: float32 `[tokens, top_k]`.
            expert_alignment: Expert counts are rounded up to a multiple of it.
            num_worst_tokens: Number of result rows: equal on all ranks, at least the number of
                ranks times the most tokens of any rank. The host then does not wait, so the call
                may be captured.
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
        most_rows = self.group_size * max_value(Shape, "tokens")
        worst = check_int("num_worst_tokens", num_worst_tokens, 0, most_rows)
        x, scales = self._check_rows(x)
        tokens = len(x)
        if handle is not None:
            _check_handle(handle, NormalHandle, "dispatch")
            num_tokens = len(self._normal.packing_of(handle).in_rank)
            for name, tensor in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
                refuse(name, tensor, None, "a dispatch with a handle sends rows only")
            if tokens != num_tokens:
                raise InvalidArgument(
                    f"x has {tokens} tokens, but the handle's dispatch had {num_tokens}: pass as "
                    "many"
                )
            self._begin(previous_event)
            received = self._normal.dispatch_again(Rows(x, scales), handle)
            return _rows_and_scales(received), None, None, None, None, self._event(async_finish)
        layout = self._check_layout(
            tokens, num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank
        )
        topk = self._check_topk(tokens, topk_idx, topk_weights)
        if worst and topk is None:
            raise InvalidArgument(
                f"num_worst_tokens is {worst} without topk_idx, which tells received rows from "
                "padding"
            )
        self._begin(previous_event)
        received, counts, handle = self._normal.dispatch(
            Rows(x, scales, topk), layout, alignment, worst
        )
        ids, weights = received.topk or (None, None)
        event = self._event(async_finish)
        return _rows_and_scales(received), ids, weights, counts, handle, event

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
            top_k = check_int("topk_weights.shape[1]", topk_weights.shape[1], 1, MAX_TOP_K)
            check_alignment("topk_weights", topk_weights, top_k * topk_weights.itemsize)
        self._begin(previous_event)
        sums, weights = self._normal.combine(x, topk_weights, handle, biases)
        return sums, weights, self._event(async_finish)

    def check(self) -> None:
        """Raise errors recorded by the device; call it after a synchronization. Not in deep_ep."""
        self._check_open()
        call_all(*(exchange.check for exchange in self._exchanges.values()), self._normal.check)

    def destroy(self) -> None:
        """Free all memory after this rank's own work has finished. Idempotent."""
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
        """Raise InvalidArgument for another kind of tensor; `unit` is its alignment in bytes."""
        check_tensor(name, tensor, shape=shape, dtypes=dtypes, device=self._group.device)
        check_alignment(name, tensor, unit or tensor.itemsize)

    def _check_call(
        self, async_finish: bool, allocate_on_comm_stream: bool, config: Config | None = None
    ) -> None:
        """Raise for a destroyed buffer and for invalid arguments common to normal-mode calls."""
        self._check_open()
        check_bools(async_finish=async_finish, allocate_on_comm_stream=allocate_on_comm_stream)
        if config is not None:
            check_instance("config", config, Config)

    def _check_layout(self, tokens: int, *tensors: torch.Tensor | None) -> Layout:
        """Validate and return the tensors of get_dispatch_layout."""
        kinds = (
            ("num_tokens_per_rank", (self.group_size,), torch.int32),
            ("num_tokens_per_expert", (None,), torch.int32),
            ("is_token_in_rank", (tokens, self.group_size), torch.bool),
        )
        checked: list[torch.Tensor] = []
        for (name, shape, dtype), tensor in zip(kinds, tensors, strict=True):
            if tensor is None:
                wrong(name, None, "a tensor from get_dispatch_layout, or pass a handle")
            self._check(name, tensor, shape, dtype)
            checked.append(tensor)
        layout = Layout(*checked)
        experts = len(layout.per_expert)
        if not experts or experts % self.group_size:
            raise InvalidArgument(
                f"num_tokens_per_expert has {experts} entries; it must be a multiple of the "
                f"{self.group_size} ranks"
            )
        return layout

    def _check_rows(self, x: Numbers) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Validate x, and return it and its scales, both contiguous."""
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
        check_int("topk_idx.shape[1]", ids.shape[1], 1, MAX_TOP_K)

    def _check_topk(
        self, tokens: int, ids: torch.Tensor | None, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Validate ids and weights; None if both are absent."""
        if ids is None and weights is None:
            return None
        if ids is None or weights is None:
            present, missing = ("topk_idx", "topk_weights")[:: 1 if weights is None else -1]
            raise InvalidArgument(f"{present} without {missing}; pass both, or none")
        self._check_ids(ids, tokens)
        self._check("topk_weights", weights, tuple(ids.shape), torch.float32)
        return ids, weights

    def _begin(self, event: EventOverlap | None) -> None:
        """Let the current stream wait for an event and for the previous call's stream.

        Calls of one buffer must not overlap. A captured call waits only inside its graph.
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

    def _existing_exchange(self, handle: Ticket) -> LowLatencyAllToAll:
        """Return a handle's exchange. It never makes one, because that is collective."""
        _check_handle(handle, Ticket, "low_latency_dispatch")
        if not self._destroyed and handle.key not in self._exchanges:
            raise OutOfOrder(
                "the handle is not of a dispatch of this buffer: pass what its "
                "low_latency_dispatch returned"
            )
        return self._exchange(handle.key)

    def _input(self, handle: Ticket, x: torch.Tensor) -> torch.Tensor:
        """Return the handle's combine buffer, which zero_copy reads instead of `x`."""
        y = self._inputs.get((*handle.key, handle.handle.slot))
        if y is None:
            raise OutOfOrder(
                "zero_copy=True before get_next_low_latency_combine_buffer(handle): write the rows "
                "into the buffer that it returns, or pass zero_copy=False"
            )
        check_tensor("x", x, shape=tuple(y.shape), dtypes=(y.dtype,), device=y.device)
        return y

    def _event(self, enabled: bool) -> EventOverlap:
        on_cuda = self._group.device.type == "cuda"
        return EventOverlap(_record_event() if enabled and on_cuda else None)


def _record_event() -> torch.cuda.Event:
    make: Callable[[], torch.cuda.Event] = torch.cuda.Event
    event = make()
    event.record()
    return event


def _check_handle(handle: object, kind: type, call: str) -> None:
    if not isinstance(handle, kind):
        wrong("handle", handle, f"the handle that {call} returned")


def _wait(event: EventOverlap | None) -> None:
    if event is not None:
        check_instance("previous_event", event, EventOverlap).current_stream_wait()


def _check_row_bytes(name: str, rows: torch.Tensor, unit: int = 16) -> None:
    size = rows.shape[1] * rows.itemsize
    if not size or size % unit or size > MAX_ROW_BYTES:
        raise InvalidArgument(
            f"{name} has rows of {size} bytes; they must be a multiple of {unit}, up to "
            f"{MAX_ROW_BYTES}"
        )
    check_alignment(name, rows, size)


def _rows_and_scales(rows: Rows) -> Numbers:
    return rows.x if rows.scales is None else (rows.x, rows.scales)


explain_keywords(globals())
