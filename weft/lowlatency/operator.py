# SPDX-License-Identifier: Apache-2.0
"""LowLatencyAllToAll: expert-parallel dispatch and combine for decoding, expert-major.

A result is alive from its dispatch to its combine, and occupies one of the buffers. At most one
dispatch and one combine may be in flight, that is, sent and not yet received.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Never

import torch

from weft.arguments import format_value, raise_invalid
from weft.errors import InvalidArgument, OutOfOrder
from weft.group import Group
from weft.heap.header import header_structs
from weft.hosts.config import HostSpan
from weft.hosts.exchange import open_rail
from weft.keywords import internal, reject_unknown
from weft.lowlatency import compile as traced
from weft.lowlatency.config import (
    LowLatencyConfig,
    LowLatencyShape,
    LowLatencySpec,
    get_trace_shape,
    memory_bytes,
)
from weft.lowlatency.exchange import LocalExchange
from weft.lowlatency.kernels import load_kernels
from weft.lowlatency.many_hosts import ManyHosts
from weft.lowlatency.reference import compute_delivered_rows
from weft.lowlatency.results import ExpertRows, Handle, ResultBuffer
from weft.lowlatency.trace import write_trace
from weft.placement import ExpertRankMixin
from weft.runtime.ambient import records_creation
from weft.runtime.check import check_no_overlap, check_tensor, check_topk
from weft.runtime.debug import poison
from weft.runtime.exchange import ExchangeOperator
from weft.runtime.identity import make_dispatch_record
from weft.runtime.kernels import Kernels
from weft.runtime.layout import Memory
from weft.runtime.operator import exclusive_call
from weft.runtime.options import RunOptions

Hook = Callable[[], object]


def _pack_rows(shape: LowLatencyShape, x: torch.Tensor) -> torch.Tensor:
    """Pack x `[tokens, hidden]` for transfer to other hosts: uint8 `[tokens, shape.row_bytes]`.

    A quantised row has the values and then the float32 scales, as the kernels read them.
    """
    if not shape.group:
        return x.view(torch.uint8)
    values, scales = compute_delivered_rows(x, "fp8", shape.group, shape.scales)
    assert scales is not None
    rows = torch.zeros((len(x), shape.row_bytes), dtype=torch.uint8, device=x.device)
    rows[:, : shape.hidden] = values.view(torch.uint8)
    rows[:, shape.hidden :][:, : 4 * shape.blocks] = scales.view(torch.uint8)
    return rows


class LowLatencyAllToAll(ExpertRankMixin, ExchangeOperator):
    """Expert-parallel all-to-all for decoding, expert-major: send tokens, return weighted sums.

    `weft.lowlatency.reference` specifies the results bit for bit. The constructor allocates all
    memory and is collective. A call allocates only its result, does not synchronise with the host,
    and may be captured in CUDA graphs. Every rank makes the same sequence of calls; a rank without
    tokens passes empty tensors.

    Args:
        group: Ranks of the job.
        max_tokens: Maximum tokens of one rank in one call, 1 to 8192, equal on all ranks.
        top_k: Experts per token, 1 to 32.
        num_experts: Number of experts over all ranks.
        hidden: Columns of a token, a multiple of 16 and of `group_size`.
        dtype: Dtype of x, y and out: bfloat16, float16 or float32.
        expert_map: Rank of each expert. Default: contiguous blocks; the first ranks hold one more
            if needed.
        timeout: Seconds that a wait for a peer may take.
        first_timeout: Seconds that a wait in the first round may take.
        quantize: "fp8": dispatch delivers e4m3 values and scales. None: it delivers rows unchanged.
        combine: "push": combine sends the experts' rows to the tokens' owners. "gemm_push": the
            kernel that computes a row stores it at the owner (`ExpertRows.dst_addr`); needs
            slots=1, and neither combine_dtype, split_phase nor reduce="sender".
        combine_dtype: "fp8": rows return as FP8 with one scale for 128 columns. None: in `dtype`.
        split_phase: Also build `dispatch_send`, `dispatch_recv`, `combine_send` and `combine_recv`.
            A dispatch and a combine may then be in flight at once.
        group_size: Columns that share a scale: 32, 64 or 128.
        scale: "fp32_row", "fp32_col" (column-major, as TMA reads it) or "ue8m0" (powers of two,
            four in an int32, column-major).
        reduce: "sender": each rank adds the weighted rows of its own experts, so that a token gets
            at most one row from each rank, whose sum was rounded once. "receiver": every expert's
            row is sent, and the token's owner adds them in fp32 in top-k order. Default: "sender",
            or "receiver" with combine="gemm_push".
        slots: Results that may be alive at once, 1 or 2.
        num_sms: Number of SMs that the kernels may use. Default: all.
        programmatic_launch: Let a kernel become resident while its predecessor in the stream still
            runs. It accesses no memory before the predecessor has finished.
        profile: Record the times of the last 32 rounds for `dump_trace`.

    Raises:
        InvalidArgument: an argument is invalid on every rank.
        CreationFailed: the creation failed on a rank. Every rank raises it.
        GeometryMismatch: ranks passed different sizes.
    """

    config: LowLatencyConfig
    _drops_repeats = True  # an expert receives a row once

    @records_creation
    def __init__(
        self,
        group: Group,
        *,
        max_tokens: int,
        top_k: int,
        num_experts: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        expert_map: Sequence[int] | torch.Tensor | None = None,
        timeout: float = 2.0,
        first_timeout: float = 120.0,
        quantize: str | None = "fp8",
        combine: str = "push",
        combine_dtype: str | None = None,
        split_phase: bool = False,
        group_size: int = 128,
        scale: str = "fp32_row",
        reduce: str | None = None,
        slots: int = 2,
        num_sms: int | None = None,
        programmatic_launch: bool = True,
        profile: bool = False,
        _recipe: str = "weft",
        _allow_handle_reuse: bool = False,
        _defines: Sequence[str] = (),
        _first_epoch: int = 0,
    ) -> None:
        arguments = locals()
        options = RunOptions.from_arguments(arguments)

        def prepare() -> tuple[LowLatencyConfig, Kernels]:
            self.build = options.build(split_phase=split_phase, defines=_defines)
            self._begins_early = split_phase
            spec = LowLatencySpec.from_arguments(arguments, ranks=group.local.size)
            config = LowLatencyConfig.from_spec(
                spec, recipe=_recipe, hosts=group.host_ranks, host=group.host
            )
            return config, load_kernels(group.device, config.shape, self.build)

        self._create(group, "a low-latency all-to-all", prepare, options, first_epoch=_first_epoch)
        config = self.config
        self.dtype, self.placement = config.dtype, config.placement
        # Whether a result may be combined repeatedly or never. A buffer then keeps its result until
        # a later dispatch needs the buffer.
        self._allow_handle_reuse = _allow_handle_reuse
        self._number = 0  # number of dispatches of this rank
        self._sent_handle: Handle | None = None  # dispatch in flight
        self._returned_handle: Handle | None = None  # combine in flight
        self._local = LocalExchange(
            self._kernels, config, self.site, self.num_local_experts, self._tracks
        )
        self._exchange: LocalExchange | ManyHosts = self._local
        self.traced_handles = traced.TracedHandles(config.slots)
        if config.span is not None:
            self._connect_hosts(config.span)

    memory_bytes = staticmethod(memory_bytes)

    @property
    def memory(self) -> Memory:
        """Memory of this object on the rank with the most experts."""
        return self.config.memory

    @property
    def reduce(self) -> str:
        """Rank that adds a token's rows, "sender" or "receiver"."""
        return self.config.shape.reduce

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        **_unknown: Never,
    ) -> ExpertRows:
        """Send this rank's tokens and return the tokens that all ranks sent to its experts.

        Out-of-range ids, and repeated ids of a row, are dropped and raised by `check()`.

        Args:
            x: `[tokens, hidden]` of `dtype`.
            topk_ids: int32 or int64 `[tokens, top_k]`, global expert ids, -1 for none.
            topk_weights: float32 `[tokens, top_k]`. Required with reduce="sender". With
                reduce="receiver" on one host, not read. On several hosts, None means ones.

        Returns:
            Rows by expert, valid until their handle is combined.

        Raises:
            InvalidArgument: a tensor has the wrong shape, dtype, device or stride.
            TokenOverflow: there are more tokens than `max_tokens`.
            OutOfOrder: `slots` results are alive, or the object is closed.
            GroupError: the group is broken.
        """
        if _unknown:
            reject_unknown(self.dispatch, _unknown)
        if torch.compiler.is_dynamo_compiling():
            return traced.dispatch(self, x, topk_ids, topk_weights)
        return self.run_dispatch("dispatch", x, topk_ids, topk_weights)

    def combine(
        self,
        y: torch.Tensor | None,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        handle: Handle,
        out: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
        **_unknown: Never,
    ) -> torch.Tensor:
        """Sum the experts' results at their tokens' owners.

        `out[t] = round(sum over ranks r of send(part[r]) + add[t])`, where `part[r]` is the sum of
        `weight * y` over the choices k of t whose expert is on rank r, in top-k order. Products and
        sums are rounded to fp32, ranks are added in order, and `round` is to `dtype`. `send` rounds
        once to `dtype`, or to FP8 with combine_dtype="fp8".

        With reduce="receiver", `out[t] = round(sum over k of weight * send(y) + add[t])`, in top-k
        order. With several hosts, either is computed without `add` for the experts of each host.
        These results pass through `send` and are added in the order of hosts, and then `add`.

        Args:
            y: `[local_experts, ep_size * max_tokens, hidden]` of `dtype`, a result for each row of
                the dispatch; rows from `counts` on are not read. None with combine="gemm_push".
            topk_ids: As in the dispatch.
            topk_weights: With reduce="sender" or several hosts, the tensor that was passed to the
                dispatch. Else float32 `[tokens, top_k]`; None means ones.
            handle: `ExpertRows.handle`. Its result may be overwritten after this call.
            out: `[tokens, hidden]` to write into. Default: a new tensor.
            add: `[tokens, hidden]` added to the sum, such as a shared expert's result.

        Returns:
            `[tokens, hidden]`. Tokens without experts get `add`, or zeros.

        Raises:
            InvalidArgument: a tensor has the wrong shape, dtype, device or stride.
            OutOfOrder: the handle was combined before, or the object is closed.
            GroupError: the group is broken.
        """
        if _unknown:
            reject_unknown(self.combine, _unknown)
        if torch.compiler.is_dynamo_compiling() or traced.is_traced(handle):
            return traced.combine(self, y, topk_ids, topk_weights, handle, out, add)
        return self.run_combine("combine", y, topk_ids, topk_weights, handle, out, add)

    def dispatch_send(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        **_unknown: Never,
    ) -> tuple[ExpertRows, Hook]:
        """Send this rank's tokens without waiting: the first half of `dispatch`.

        Args:
            x: As in `dispatch`.
            topk_ids: As in `dispatch`.
            topk_weights: As in `dispatch`.

        Returns:
            The result, which is valid after the receive, and a function that receives it. Call that
                function or `dispatch_recv`.
        """
        if _unknown:
            reject_unknown(self.dispatch_send, _unknown)
        self._check_split_phase("dispatch_send")
        return self.run_dispatch("dispatch_send", x, topk_ids, topk_weights), self._receive

    def dispatch_recv(self) -> ExpertRows:
        """Wait for all peers' tokens and write the result: the second half of `dispatch`.

        Returns:
            As `dispatch`.
        """
        self._check_split_phase("dispatch_recv")
        return self._receive()

    def combine_send(
        self,
        y: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        handle: Handle,
        out: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
        **_unknown: Never,
    ) -> tuple[torch.Tensor, Hook]:
        """Send rows to their owners: the first half of `combine`.

        With several hosts, it waits for the ranks of this host, sums their rows and starts to
        return the sums. `add`, `out`, ids and weights must stay unchanged until the second half has
        run.

        Args:
            y: As in `combine`.
            topk_ids: As in `combine`.
            topk_weights: As in `combine`.
            handle: As in `combine`.
            out: As in `combine`.
            add: As in `combine`.

        Returns:
            `out`, which is valid after the receive, and a function that receives it. Call that
                function or `combine_recv`.
        """
        if _unknown:
            reject_unknown(self.combine_send, _unknown)
        self._check_split_phase("combine_send")
        result = self.run_combine("combine_send", y, topk_ids, topk_weights, handle, out, add)
        return result, self._combine_receive

    def combine_recv(self) -> torch.Tensor:
        """Wait for the rows and add them: the second half of `combine`.

        Returns:
            As `combine`.
        """
        self._check_split_phase("combine_recv")
        return self._combine_receive()

    def dump_trace(self, path: str | os.PathLike[str]) -> None:
        """Write this rank's last 32 rounds as JSON for Perfetto. Needs profile=True.

        It waits for this rank's own work. Every rank writes its own file with times of rank 0's
        clock; `weft.lowlatency.trace.merge` joins the files. Call it when all ranks have finished
        the same rounds.

        Args:
            path: File to write.

        Raises:
            InvalidArgument: the object was built without profile=True, or path is not a path.
            OutOfOrder: the object is closed.
        """
        self.check_open()
        if not isinstance(path, str | os.PathLike):
            raise_invalid("path", path, "a str or os.PathLike")
        write_trace(Path(path), self._tracks, self.heap)

    # Implementation of the calls: check, launch, update which results are alive.

    @internal
    @exclusive_call("dispatch")
    def run_dispatch(
        self,
        entry: str,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        results: Mapping[str, torch.Tensor] | None = None,
    ) -> ExpertRows:
        """Run `dispatch` or `dispatch_send`.

        Args:
            results: Output tensors of the rows and their metadata, by name. Default: those of the
                result buffer.
        """
        tokens = self.config.check_dispatch(x, topk_ids, topk_weights, self.group.device)
        if self._sent_handle is not None:
            raise OutOfOrder(
                f"{entry} while dispatch {self._sent_handle.number} is in flight: receive it first"
            )
        handle = Handle(self._number + 1, self._find_free_buffer(entry), tokens)
        buffer = self.result_buffers[handle.slot]
        results = buffer.tensors if results is None else results
        call = self._layer_call or make_dispatch_record(
            self._descriptor, self._layer, self.config.max_tokens, 0
        )
        self._exchange.dispatch(entry, call, buffer, results, x, topk_ids, topk_weights)
        buffer.sent_weights = topk_weights if self.config.sends_weights else None
        buffer.sent_version = _tensor_version(buffer.sent_weights)
        self._number, buffer.handle, buffer.latest_handle = handle.number, handle, handle
        if entry != "dispatch":
            self._sent_handle = handle
        self._raise_if_broken()
        return buffer.get_rows(handle)

    @exclusive_call("dispatch_recv")
    def _receive(self) -> ExpertRows:
        """Wait for the dispatch in flight and return its result."""
        handle = self._sent_handle
        if handle is None:
            raise OutOfOrder("dispatch_recv without a dispatch_send")
        self._exchange.dispatch_receive()
        self._sent_handle = None
        self._raise_if_broken()
        return self.result_buffers[handle.slot].get_rows(handle)

    @internal
    @exclusive_call("combine")
    def run_combine(
        self,
        entry: str,
        y: torch.Tensor | None,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        handle: Handle,
        out: torch.Tensor | None,
        add: torch.Tensor | None,
        counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run `combine` or `combine_send`.

        Args:
            counts: Counts of the dispatch, if its result is not in the result buffer.
        """
        self._check_handle(handle, entry)
        device, dtypes = self.group.device, (self.dtype,)
        tokens = check_topk(topk_ids, topk_weights, self.config.shape.top_k, device)
        if tokens != handle.tokens:
            raise InvalidArgument(
                f"topk_ids has {tokens} rows, dispatch {handle.number} had {handle.tokens}: pass "
                "the topk_ids of that dispatch"
            )
        buffer = self.result_buffers[handle.slot]
        self._check_weights(topk_weights, buffer)
        self._check_results(y, buffer)
        size = (tokens, self.config.shape.hidden)
        if out is None:
            out = torch.empty(size, dtype=self.dtype, device=device)
        for name, tensor in (("out", out), ("add", add)):
            if tensor is not None:
                check_tensor(name, tensor, shape=size, dtypes=dtypes, device=device, aligned=16)
        self.check_not_symmetric("out", out)
        inputs = {"add": add, "y": y, "topk_ids": topk_ids, "topk_weights": topk_weights}
        check_no_overlap("out", out, inputs, exact="add")
        counts = buffer.tensors["counts"] if counts is None else counts
        routing, order = (topk_ids, topk_weights), self._get_age_rank(handle)
        self._exchange.combine(entry, buffer, y, counts, *routing, out, add, order)
        if not self._allow_handle_reuse:
            buffer.sent_weights = None
        if entry == "combine":
            buffer.handle = None
        else:
            self._returned_handle = buffer.handle = handle
            self._combine_tensors = (out, add, routing)  # kept alive until the receive
        self._raise_if_broken()
        return out

    @exclusive_call("combine_recv")
    def _combine_receive(self) -> torch.Tensor:
        """Wait for the combine in flight and return its result."""
        handle = self._returned_handle
        if handle is None:
            raise OutOfOrder("combine_recv without a combine_send")
        out, add, _ = self._combine_tensors
        self._exchange.combine_receive(out, add)
        self.result_buffers[handle.slot].handle = self._returned_handle = None
        del self._combine_tensors
        self._raise_if_broken()
        return out

    def _poison(self, call: str, *, before: bool) -> None:
        if before or call != "combine" or self._allow_handle_reuse:
            return
        for buffer in self.result_buffers:
            if buffer.handle is None:
                for name in ("x", "scales"):
                    if buffer.tensors[name] is not None:
                        poison(buffer.tensors[name])

    @property
    def is_mid_round(self) -> bool:
        """Whether a result is alive, that is, not combined yet."""
        return bool(self._live_handles)

    @property
    def _live_handles(self) -> list[Handle]:
        """Handles of the results that are alive."""
        return [buffer.handle for buffer in self.result_buffers if buffer.handle is not None]

    @internal
    def find_handle(self, number: int) -> Handle | None:
        """Return the handle of dispatch `number`, or None if its result is not alive."""
        return next((h for h in self._live_handles if h.number == number), None)

    @internal
    def drop_handle(self, handle: Handle) -> None:
        """Discard a result that will not be combined."""
        buffer = self.result_buffers[handle.slot]
        if buffer.handle is handle:
            buffer.handle = None

    def _get_age_rank(self, handle: Handle) -> int:
        """Return a result's position by age among those alive, 1 for the oldest.

        Ranks compare it instead of the number of the dispatch, because the host does not count
        replays of graphs.
        """
        return 1 + sum(h.number < handle.number for h in self._live_handles)

    def _find_free_buffer(self, entry: str) -> int:
        """Return the index of the next free buffer in round-robin order.

        With `_allow_handle_reuse` and no free buffer, return that of the oldest result, unless its
        combine is in flight. The choice depends on the order of calls alone, so all ranks drop the
        same result.
        """
        num_buffers = len(self.result_buffers)
        for i in range(num_buffers):
            index = (self._number + i) % num_buffers
            if self.result_buffers[index].handle is None:
                return index
        oldest = min(self._live_handles, key=lambda handle: handle.number)
        if self._allow_handle_reuse and oldest is not self._returned_handle:
            return oldest.slot
        raise OutOfOrder(
            f"{entry} while {num_buffers} results are alive, the oldest of dispatch "
            f"{oldest.number}: combine one first"
        )

    def _check_weights(self, weights: torch.Tensor | None, buffer: ResultBuffer) -> None:
        """Raise InvalidArgument if a combine has other weights than the dispatch has sent."""
        sent = buffer.sent_weights
        if not self.config.sends_weights:
            return
        if sent is not None and _tensor_version(sent) != buffer.sent_version:
            raise InvalidArgument(
                "topk_weights were modified between dispatch and combine: with reduce='sender' or "
                "several hosts, the dispatch has sent the old values; scale them before dispatch"
            )
        if weights is sent:
            return
        if weights is None or sent is None or weights.data_ptr() != sent.data_ptr():
            raise InvalidArgument(
                f"topk_weights are {format_value(weights)} in combine, {format_value(sent)} in its "
                "dispatch: with reduce='sender' or several hosts, the dispatch sends them, so pass "
                "the same tensor to both"
            )

    def _check_results(self, y: torch.Tensor | None, buffer: ResultBuffer) -> None:
        if self.config.shape.gemm_push:
            if y is not None:
                raise InvalidArgument(
                    "y is a tensor with combine='gemm_push', but the kernel that computes the rows "
                    "stores them at their owners: pass None"
                )
            return
        if y is None:
            raise InvalidArgument("y is None; pass the results of the dispatch's rows")
        device, dtypes = self.group.device, (self.dtype,)
        check_tensor("y", y, shape=buffer.x.shape, dtypes=dtypes, device=device, aligned=16)

    def _check_handle(self, handle: Handle, entry: str) -> None:
        if not isinstance(handle, Handle):
            raise InvalidArgument(
                f"handle is a {type(handle).__name__}; pass the handle of the result of dispatch"
            )
        if self._returned_handle is not None:
            raise OutOfOrder(
                f"{entry} while the combine of dispatch {self._returned_handle.number} is in "
                "flight: receive it first"
            )
        # Compared by identity: a handle of another all-to-all may have the same numbers.
        if self._allow_handle_reuse:
            is_latest = any(buf.latest_handle is handle for buf in self.result_buffers)
            if is_latest and handle is not self._sent_handle:
                return
            reason = (
                "it has not been received"
                if is_latest
                else "a later dispatch has reused its memory"
            )
            raise OutOfOrder(
                f"{entry} of dispatch {handle.number}: {reason}; only the last "
                f"{len(self.result_buffers)} results are kept: combine before that dispatch"
            )
        is_alive = any(h is handle for h in self._live_handles)
        if not is_alive or handle is self._sent_handle:
            reason = "it has not been received" if is_alive else "it is not alive"
            raise OutOfOrder(
                f"{entry} of dispatch {handle.number}: {reason}; each dispatch is combined once, "
                "by the all-to-all that created it"
            )

    def _connect_hosts(self, span: HostSpan) -> None:
        """Extend the exchange to all hosts. Collective over them."""
        pack = functools.partial(_pack_rows, self.config.shape)
        rail = open_rail(self, span)
        self._exchange = ManyHosts(self._local, rail, span.max_tokens, pack, self._raise_if_broken)

    # Initial contents of the share, and this rank's own memory.

    def _count_local_bytes(self) -> int:
        return self.config.host_bytes + self.config.memory.ordinary

    def _discard_calls(self) -> None:
        self._sent_handle = self._returned_handle = None
        self.traced_handles.handles.clear()
        for buffer in self.result_buffers:
            buffer.reset()

    def _write_contents(self, header: ctypes.Structure) -> None:
        offsets, heap = self.config.offsets, self.heap
        heap.tensor(
            (offsets.tokens - offsets.progress,), torch.uint8, offset=offsets.progress
        ).zero_()
        sentinels = (offsets.share_bytes - offsets.tokens,)
        heap.tensor(sentinels, torch.uint8, offset=offsets.tokens).fill_(0xFF)
        heap.tensor((4,), torch.int64, offset=offsets.progress).fill_(header.first_epoch)

    def _make_views(self) -> None:
        config, heap, device = self.config, self.heap, self.group.device
        num_local_experts = len(config.placement.experts_of(self.group.rank))
        failed = header_structs(config.shape.ranks).Header.failed
        abort_flag = heap.tensor((1,), torch.int32, offset=failed.offset)
        self.result_buffers = [
            ResultBuffer(i, config, num_local_experts, self.group, abort_flag)
            for i in range(config.slots)
        ]
        size = get_trace_shape(config.shape.ranks) if config.profile else (0,)
        self._tracks = torch.zeros(size, dtype=torch.uint8, device=device)

    def _drop_views(self) -> None:
        self.result_buffers.clear()
        self._tracks = self._tracks.new_empty(0)


def _tensor_version(tensor: torch.Tensor | None) -> int:
    """Return the number of in-place changes so far; 0 for inference tensors, which count none."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version
