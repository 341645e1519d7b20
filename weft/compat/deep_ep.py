"""`Buffer` with the low-latency calls of deep_ep, on weft.LowLatencyAllToAll.

What is the same, stricter and refused stands in docs/compat.md, call by call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist

from weft.arguments import flags, integer, seconds
from weft.arguments import refuse as wrong
from weft.compat.ranges import packed_ranges, token_indices
from weft.compat.refusals import refuse, renamed
from weft.errors import InvalidArgument, OutOfOrder, UsageError
from weft.lowlatency import reference as reference_lowlatency
from weft.lowlatency.api import LowLatencyAllToAll
from weft.lowlatency.results import ExpertRows, Handle
from weft.lowlatency.shape import MAX_EXPERTS, MAX_TOKENS
from weft.memory import Group
from weft.runtime.check import check_alignment, check_tensor
from weft.shape import MAX_RANKS

__all__ = ["Buffer", "Config", "EventOverlap", "topk_idx_t"]

topk_idx_t = torch.int64  # int32 ids are taken, too

HINTED_TOP_K = 16  # the size hint is not given top_k; this is more than models have
NORMAL = "weft.compat.deep_ep has the low-latency calls only; weft.AllToAll is the normal mode"
MAX_CHUNK = 1 << 20
SHRINK = "a rank that died ends the group: close it and make a new one"
# What weft's arguments are called here.
DISPATCHED = {"topk_ids": "topk_idx"}
COMBINED = {"y": "x", "topk_ids": "topk_idx"}
LOGFMT = "rows return as bfloat16, exactly"
STATS, COUNTS = "cumulative_local_expert_recv_stats", (torch.int32, torch.int64)
COSTS = "build with profile=True and use dump_trace: waits by source, for each CTA"
Numbers: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Hook: TypeAlias = Callable[[], None]


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
    """Chunk sizes of deep_ep's normal mode, kept as given: low-latency calls do not use them.

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

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> NoReturn:
        """Raises InvalidArgument: it sizes the normal mode."""
        _refuse_normal("get_nvl_buffer_size_hint")

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> NoReturn:
        """Raises InvalidArgument: it sizes the normal mode."""
        _refuse_normal("get_rdma_buffer_size_hint")


@dataclass(frozen=True, slots=True)
class _Round:
    """One dispatch: whose, and of which exchange."""

    key: tuple[Any, ...]
    handle: Handle


class Ticket(tuple[torch.Tensor, torch.Tensor, int, int, int]):
    """The handle of a dispatch: source tokens, ranges, most tokens, hidden, experts."""

    round: _Round

    @classmethod
    def of(cls, parts: tuple[torch.Tensor, torch.Tensor, int, int, int], round_: _Round) -> Ticket:
        """A handle with these parts; callers unpack them as deep_ep's."""
        made = cls(parts)
        made.round = round_
        return made


class Buffer:
    """Expert-parallel low-latency dispatch and combine with the calls of `deep_ep.Buffer`.

    group: a torch process group of ranks on one host, or a weft.Group.
    num_nvl_bytes, num_rdma_bytes, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl,
        use_fabric, explicitly_destroy, comm: accepted and not used; memory follows from the first
        dispatch.
    low_latency_mode: must be True.   enable_shrink: must be False.

    Arguments of weft's own:
    timeout, first_timeout: seconds that a wait for a peer may take, and the first one.
    profile: let kernels keep times for `dump_trace`.

    The first dispatch of each combination of sizes, FP8 and scales makes an exchange, on all ranks
    together; it may not be in a graph capture. Two results are kept for each: a handle may be
    combined several times, or never, and its rows are there until a later dispatch takes their
    slot, the oldest one that is left. Raises InvalidArgument, RendezvousFailed.
    """

    num_sms = 20  # of the normal mode, which is not here; set_num_sms changes it

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
        profile: bool = False,
    ) -> None:
        refuse("low_latency_mode", low_latency_mode, True, NORMAL)
        refuse("enable_shrink", enable_shrink, False, SHRINK)
        timeout = seconds("timeout", timeout)
        first_timeout = seconds("first_timeout", first_timeout)
        flags(profile=profile)
        self._owns_group = not isinstance(group, Group)
        self._group = group if isinstance(group, Group) else Group.from_torch(group)
        self.group = self._group if group is None else group
        self.rank, self.group_size = self._group.rank, self._group.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = True, explicitly_destroy
        self.enable_shrink = False
        self._options: dict[str, Any] = {
            "timeout": timeout,
            "first_timeout": first_timeout,
            "profile": profile,
        }
        self._exchanges: dict[tuple[Any, ...], LowLatencyAllToAll] = {}
        self._inputs: dict[tuple[Any, ...], torch.Tensor] = {}
        self._destroyed = False

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set `Buffer.num_sms`, an even number; low-latency calls fill what SMs they need."""
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
        """The current stream, which is where all calls run. Raises InvalidArgument on CPU ranks."""
        if self._group.device.type != "cuda":
            raise InvalidArgument("get_comm_stream() of CPU ranks: they have no streams")
        return torch.cuda.current_stream(self._group.device)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> NoReturn:
        """Raises InvalidArgument: it is of the normal mode."""
        _refuse_normal("get_dispatch_config")

    @staticmethod
    def get_combine_config(num_ranks: int) -> NoReturn:
        """Raises InvalidArgument: it is of the normal mode."""
        _refuse_normal("get_combine_config")

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of shared memory for a top_k of up to 16; results take as much again as they do."""
        experts = integer("num_experts", num_experts, 1, MAX_EXPERTS)
        tokens = _most("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank)
        return LowLatencyAllToAll.memory_bytes(
            ranks=integer("num_ranks", num_ranks, 1, MAX_RANKS),
            max_tokens=tokens,
            hidden=hidden,
            top_k=min(HINTED_TOP_K, experts),
            num_experts=experts,
            scale="fp32_col",
        ).shared

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

        Returns `(numbers, counts, handle, event, hook)`: numbers are
        `[local_experts, num_ranks * most tokens, hidden]` float8_e4m3fn and their scales for 128
        columns, column-major: float32, or with use_ue8m0 int32 of four UE8M0 bytes; without use_fp8
        bfloat16 alone. counts: int32 `[local_experts]`, also added to
        cumulative_local_expert_recv_stats. With return_recv_hook nothing is there before hook().

        Raises InvalidArgument, OutOfOrder (an earlier one waits for its hook), and what broke the
        group.
        """
        refuse("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, None, COSTS)
        flags(use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0)
        flags(async_finish=async_finish, return_recv_hook=return_recv_hook)
        self._check_tokens(x, topk_idx, cumulative_local_expert_recv_stats)
        most = _most("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank)
        num_experts = integer("num_experts", num_experts, 1, MAX_EXPERTS)
        if use_ue8m0 and not (use_fp8 and round_scale):
            raise InvalidArgument(
                f"use_ue8m0 with use_fp8={use_fp8}, round_scale={round_scale}; a UE8M0 scale is a "
                "power of two of FP8 numbers: pass use_fp8=True, round_scale=True"
            )
        scale = ("ue8m0" if round_scale else "fp32_col") if use_fp8 else None
        sizes = (most, int(x.shape[-1]), int(topk_idx.shape[-1]))
        key = (*sizes, num_experts, scale)
        a2a = self._exchange(key)
        if cumulative_local_expert_recv_stats is not None:
            size, stats = (a2a.num_local_experts,), cumulative_local_expert_recv_stats
            check_tensor(STATS, stats, shape=size, dtypes=COUNTS, device=self._group.device)
            check_alignment(STATS, stats, stats.itemsize)
        receive: Hook | None = None
        try:
            if return_recv_hook:
                rows, receive = a2a.dispatch_send(x, topk_idx)
            else:
                rows = a2a.dispatch(x, topk_idx)
        except UsageError as error:
            raise renamed(error, DISPATCHED) from error
        widen = round_scale and not use_ue8m0
        numbers = _numbers(rows, a2a, widen=widen)
        ranges = torch.zeros_like(rows.ranges[..., 0], dtype=torch.int64)
        tokens = torch.zeros_like(rows.source)

        def settle() -> None:
            if receive is not None:
                receive()
            tokens.copy_(token_indices(rows, most))
            ranges.copy_(packed_ranges(rows))
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(rows.counts)
            if widen:
                _fill_scales(numbers, rows, a2a)

        if not return_recv_hook:
            settle()
        parts = (tokens, ranges, most, sizes[1], num_experts)
        ticket = Ticket.of(parts, _Round(key, rows.handle))
        event = self._event(async_finish)
        return numbers, rows.counts, ticket, event, settle if return_recv_hook else None

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

        x: bfloat16 `[local_experts, num_ranks * most tokens, hidden]`, any tensor: none is copied.
        topk_idx, topk_weights: of the dispatch; float32 weights. The token's owner multiplies by
            them in top-k order.
        zero_copy: the rows are in the handle's `get_next_low_latency_combine_buffer`, which is read
            in place of x.

        Raises InvalidArgument, OutOfOrder (a later dispatch has taken the slot, or zero_copy before
        its buffer was asked for), and what broke the group.
        """
        refuse("use_logfmt", use_logfmt, False, LOGFMT)
        refuse("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, None, COSTS)
        flags(async_finish=async_finish, return_recv_hook=return_recv_hook, zero_copy=zero_copy)
        round_ = _round_of(handle)
        a2a = self._existing(round_.key)
        y = self._input(round_, x) if zero_copy else x
        hook: Hook | None = None
        try:
            if return_recv_hook:
                result, hook = a2a.combine_send(y, topk_idx, topk_weights, round_.handle, out)
            else:
                result = a2a.combine(y, topk_idx, topk_weights, round_.handle, out)
        except UsageError as error:
            raise renamed(error, COMBINED) from error
        return result, self._event(async_finish), hook

    def get_next_low_latency_combine_buffer(self, handle: Ticket) -> torch.Tensor:
        """bfloat16 `[local_experts, num_ranks * most tokens, hidden]` for experts to write.

        Combine reads any tensor in place; this is one, made at the first call for each slot. Raises
        InvalidArgument, OutOfOrder.
        """
        round_ = _round_of(handle)
        slot = self._existing(round_.key)._rounds.slots[round_.handle.slot]
        if slot.latest is not round_.handle:
            raise OutOfOrder(
                "get_next_low_latency_combine_buffer of a handle whose slot a later dispatch has "
                "taken: ask before that dispatch"
            )
        key = (*round_.key, round_.handle.slot)
        if key not in self._inputs:
            rows = slot.x
            self._inputs[key] = torch.zeros(rows.shape, dtype=torch.bfloat16, device=rows.device)
        return self._inputs[key]

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing to do: an inbox is blank again when it has been read."""

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write which ranks are masked to int32 `[num_ranks]`: none ever is, so zeros."""
        shape, kinds = (self.group_size,), (torch.int32,)
        device = self._group.device
        check_tensor("mask_status", mask_status, shape=shape, dtypes=kinds, device=device)
        check_alignment("mask_status", mask_status, mask_status.itemsize)
        mask_status.zero_()

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Nothing to do: no rank is masked. Raises InvalidArgument for mask=True."""
        integer("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        refuse("mask", mask, False, SHRINK)

    def low_latency_clean_mask_buffer(self) -> None:
        """Nothing to do: no rank is masked."""

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, *_: Any) -> NoReturn:
        """Raises InvalidArgument: it is of the normal mode."""
        _refuse_normal("get_dispatch_layout")

    def dispatch(self, x: Numbers, *_: Any, **__: Any) -> NoReturn:
        """Raises InvalidArgument: it is of the normal mode."""
        _refuse_normal("dispatch")

    def combine(self, x: torch.Tensor, *_: Any, **__: Any) -> NoReturn:
        """Raises InvalidArgument: it is of the normal mode."""
        _refuse_normal("combine")

    def check(self) -> None:
        """Raise what the device has recorded; weft's own. Once a step, after a synchronisation."""
        for exchange in self._exchanges.values():
            exchange.check()

    def dump_trace(self, path: str) -> None:
        """Write the times of the latest exchange's last rounds; weft's own, needs profile=True."""
        if not self._exchanges:
            raise OutOfOrder("dump_trace before any dispatch")
        list(self._exchanges.values())[-1].dump_trace(path)

    def destroy(self) -> None:
        """Give all memory back. Waits for this rank's own work. Idempotent."""
        if self._destroyed:
            return
        self._destroyed = True
        for exchange in self._exchanges.values():
            exchange.close()
        self._exchanges.clear()
        self._inputs.clear()
        if self._owns_group:
            self._group.close()

    def _check_tokens(self, x: torch.Tensor, ids: torch.Tensor, stats: torch.Tensor | None) -> None:
        """Refuse what an exchange would be made for before it is looked at."""
        device = self._group.device
        shape, kinds = (None, None), (torch.bfloat16,)
        check_tensor("x", x, shape=shape, dtypes=kinds, device=device)
        integers = (torch.int32, torch.int64)
        check_tensor("topk_idx", ids, shape=shape, dtypes=integers, device=device)
        if stats is not None:
            check_tensor(STATS, stats, shape=(None,), dtypes=COUNTS, device=device)

    def _exchange(self, key: tuple[Any, ...]) -> LowLatencyAllToAll:
        if self._destroyed:
            raise OutOfOrder("this buffer was destroyed; make a new one")
        if key not in self._exchanges:
            most, hidden, top_k, experts, scale = key
            made = LowLatencyAllToAll(
                self._group,
                most,
                hidden,
                top_k,
                experts,
                None if scale is None else "fp8",
                scale=scale or "fp32_row",
                split_phase=True,
                **self._options,
            )
            made._rounds.recycles = True
            self._exchanges[key] = made
        return self._exchanges[key]

    def _existing(self, key: tuple[Any, ...]) -> LowLatencyAllToAll:
        """The exchange of a handle: never a new one, which all ranks would have to make."""
        if not self._destroyed and key not in self._exchanges:
            raise OutOfOrder(
                "the handle is not of a dispatch of this buffer: pass what its "
                "low_latency_dispatch returned"
            )
        return self._exchange(key)

    def _input(self, round_: _Round, x: torch.Tensor) -> torch.Tensor:
        """The combine buffer of a handle, for which `x` stands with zero_copy."""
        y = self._inputs.get((*round_.key, round_.handle.slot))
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


def _refuse_normal(name: str) -> NoReturn:
    raise InvalidArgument(f"{name} is refused: {NORMAL}")


def _most(name: str, value: int) -> int:
    return integer(name, value, 1, MAX_TOKENS)


def _round_of(handle: Ticket) -> _Round:
    """Raises InvalidArgument for what is no handle."""
    if not isinstance(handle, Ticket):
        wrong("handle", handle, "the handle that low_latency_dispatch returned")
    return handle.round


def _numbers(rows: ExpertRows, a2a: LowLatencyAllToAll, *, widen: bool) -> Numbers:
    if rows.scales is None:
        return rows.x
    if not widen:
        return rows.x, rows.scales
    # Powers of two as float32, in the layout of the others: filled when the rows are there.
    shape = a2a._geometry.shape
    size = (rows.x.shape[0], shape.blocks, -(-shape.rows // 4) * 4)
    wide = torch.zeros(size, dtype=torch.float32, device=rows.x.device)
    return rows.x, wide.mT[:, : shape.rows]


def _fill_scales(numbers: Numbers, rows: ExpertRows, a2a: LowLatencyAllToAll) -> None:
    assert isinstance(numbers, tuple)
    assert rows.scales is not None
    blocks = a2a._geometry.shape.blocks
    numbers[1].copy_(reference_lowlatency.unpack_scales(rows.scales, blocks))
