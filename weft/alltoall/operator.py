# SPDX-License-Identifier: Apache-2.0
"""AllToAll: expert-parallel dispatch and combine, rank-major, over symmetric memory.

A round is a dispatch and a combine. Each is one call, or a send half and a receive half with other
work between them. The strict order of calls makes single buffers safe (docs/design/protocol.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import Enum
from typing import Never, NoReturn

import torch

from weft.alltoall import compile as traced
from weft.alltoall.config import AllToAllConfig, AllToAllSpec, Payload, memory_bytes
from weft.alltoall.exchange import LocalExchange
from weft.alltoall.kernels import load_kernels
from weft.alltoall.many_hosts import ManyHosts
from weft.alltoall.received import Received, slice_rows, split_hosts
from weft.errors import InvalidArgument, OutOfOrder
from weft.group import Group
from weft.heap import Heap
from weft.heap.header import header_bytes
from weft.hosts.config import HostSpan
from weft.hosts.exchange import open_rail
from weft.keywords import internal, reject_unknown
from weft.placement import ExpertRankMixin
from weft.runtime import library
from weft.runtime.ambient import records_creation
from weft.runtime.check import check_no_overlap, check_tensor, raise_not_tensor, to_tensor_tuple
from weft.runtime.debug import poison
from weft.runtime.exchange import ExchangeOperator
from weft.runtime.identity import make_dispatch_record
from weft.runtime.kernels import Kernels
from weft.runtime.operator import exclusive_call
from weft.runtime.options import RunOptions
from weft.runtime.timeline import Span, read_timeline

MAX_VIEWS = 256  # cached views, by number of rows: one for each batch size of an engine


class State(Enum):
    """State of a round. Each value lists the calls allowed next."""

    IDLE = "dispatch or dispatch_send"
    SENT = "dispatch_recv"
    RECEIVED = "combine or combine_send"
    RETURNED = "combine_recv"


class AllToAll(ExpertRankMixin, ExchangeOperator):
    """Expert-parallel all-to-all, rank-major: send tokens to ranks, return weighted sums.

    Dispatch sends each token once to every rank that owns one of its experts.
    `weft.reference.dispatch` and `weft.reference.combine` specify the results bit for bit. The
    constructor allocates all memory and is collective. A call allocates only its result, does not
    synchronise with the host, and may be captured in CUDA graphs of any batch size; replays and
    eager calls may alternate. Every rank makes the same sequence of calls; a rank without tokens
    passes empty tensors.

    Args:
        group: Ranks of the job.
        max_tokens: Maximum tokens of one rank in one call, equal on all ranks; see
            `weft.tokens_per_rank`.
        top_k: Experts per token, 1 to 32.
        num_experts: Number of experts over all ranks.
        hidden: Columns of a combine row. A row must be a multiple of 16 bytes.
        dtype: Dtype of combine rows: bfloat16, float16 or float32.
        payloads: Up to 8 tensors that dispatch carries. Default: x `[tokens, hidden]` of `dtype`.
        expert_map: Rank of each expert. Default: contiguous blocks; the first ranks hold one more
            if needed.
        timeout: Seconds that a wait for a peer may take.
        first_timeout: Seconds that a wait in the first round may take.
        quantize: "fp8" (one fp32 scale for 128 columns) or "mxfp8" (one power of two for 32):
            dispatch quantises x `[tokens, hidden]` and delivers FP8 values and scales. None:
            payloads are sent unchanged.
        combine: "pull": the owner of a token reads its rows from the experts' ranks (default).
            "push": the experts' ranks store them at the owner. "gemm_push": the kernel that
            computes a row stores it at the owner (`Grouped.dst_addr`). All are exact.
        combine_dtype: "fp8": rows are pushed as FP8 with one scale for 128 columns. None: rows are
            sent in `dtype`.
        reduce: "sender": each rank's sum is rounded to `dtype`, and these sums are added in rank
            order. "receiver", which needs combine="gemm_push": all rows of a token are added in
            fp32 in top-k order, so that the bits do not depend on the placement of experts.
        split_phase: Also build `dispatch_send`, `dispatch_recv`, `combine_send` and `combine_recv`.
        stats: Number of int32 values that each rank sends to all in every dispatch.
        num_sms: Number of SMs that the kernels may use. Default: all.
        programmatic_launch: Let a short kernel become resident while its predecessor in the stream
            still runs. It accesses no memory before the predecessor has finished.
        profile: Record the times of the last 32 rounds for `timeline`.

    Raises:
        InvalidArgument: an argument is invalid on every rank.
        CreationFailed: the creation failed on a rank. Every rank raises it.
        GeometryMismatch: ranks passed different sizes.
    """

    config: AllToAllConfig
    output_buffer: torch.Tensor
    _full_views: tuple[Received, torch.Tensor]  # with max_tokens slots for each source

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
        payloads: Sequence[Payload] | None = None,
        expert_map: Sequence[int] | torch.Tensor | None = None,
        timeout: float = 2.0,
        first_timeout: float = 120.0,
        quantize: str | None = None,
        combine: str | None = None,
        combine_dtype: str | None = None,
        reduce: str = "sender",
        split_phase: bool = False,
        stats: int = 0,
        num_sms: int | None = None,
        programmatic_launch: bool = True,
        profile: bool = False,
        _defines: Sequence[str] = (),
        _first_epoch: int = 0,
    ) -> None:
        arguments = locals()
        options = RunOptions.from_arguments(arguments)

        def prepare() -> tuple[AllToAllConfig, Kernels]:
            self.build = options.build(split_phase=split_phase, defines=_defines)
            self._begins_early = split_phase
            spec = AllToAllSpec.from_arguments(arguments, ranks=group.local.size)
            config = AllToAllConfig.from_spec(spec, hosts=group.host_ranks, host=group.host)
            return config, load_kernels(group.device, group.local.rank, config, self.build)

        self._create(group, "an all-to-all", prepare, options, first_epoch=_first_epoch)
        config = self.config
        self.dtype, self.placement = config.dtype, config.placement
        self.round_number = 0  # number of rounds, incremented by dispatch
        self._discard_calls()
        self._local = LocalExchange(self._kernels, config, self.site, group.device)
        self._exchange: LocalExchange | ManyHosts = self._local
        if config.span is not None:
            self._connect_hosts(config.span)
        library.mark_static(self.output_buffer)

    memory_bytes = staticmethod(memory_bytes)

    def dispatch(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        num_tokens: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
        rows: int | None = None,
        **_unknown: Never,
    ) -> Received:
        """Send this rank's tokens and return the tokens that all ranks sent to this rank.

        Out-of-range and repeated ids are recorded on the device and raised by `check()`; an
        out-of-range id is dropped. With several hosts, a row is sent to each other host once, and
        each source takes `rows` slots. Under torch.compile the result is a copy, because compilers
        may move reads past combine.

        Args:
            x: Payload tensor `[tokens, ...]`, or one tensor for each declared payload.
            topk_ids: int32 or int64 `[tokens, top_k]`, global expert ids, -1 for none.
            topk_weights: float32 `[tokens, top_k]`. None means ones.
            num_tokens: int32 `[1]` on the device: number of valid rows. Later rows are not sent.
            stats: int32 `[stats]`, required if the object was built with `stats`.
            rows: Slots per source in the result and in `output(rows)`: the largest token count of
                any rank in this call, equal on all ranks. Default: `max_tokens`.

        Returns:
            Views of symmetric memory, valid until this rank calls combine.

        Raises:
            InvalidArgument: a tensor has the wrong shape, dtype, device or stride.
            TokenOverflow: there are more tokens than `max_tokens`.
            OutOfOrder: a round is open, or the object is closed.
            GeometryMismatch: ranks passed different `rows`.
            GroupError: the group is broken.
        """
        if _unknown:
            reject_unknown(self.dispatch, _unknown)
        tensors = (x,) if isinstance(x, torch.Tensor) else to_tensor_tuple("x", x)
        if torch.compiler.is_dynamo_compiling():
            self.traced_tokens = topk_ids.shape[0]
            self._traced_rows = self.config.check_rows(rows, self.traced_tokens)
            inputs = (tensors, topk_ids, topk_weights, num_tokens, stats)
            return traced.dispatch(self, *inputs, self._traced_rows)
        self._dispatch("dispatch", tensors, topk_ids, topk_weights, num_tokens, stats, rows)
        return self.receive_views(self._rows)[0]

    def output(self, rows: int | None = None) -> torch.Tensor:
        """Return the buffer that experts write: `[ep_size, rows, hidden]` in symmetric memory.

        Row `[s, t]` must hold the sum over this rank's experts of token t of source s, weighted by
        the received weights. Rows whose ids are all -1 are never read. Write it between dispatch
        and combine only: peers read it from combine until the next dispatch has returned.

        Args:
            rows: The `rows` of this round's dispatch. Default: `max_tokens`.

        Returns:
            A contiguous view.

        Raises:
            InvalidArgument: the object was built with combine="gemm_push", which has no output.
            OutOfOrder: the object is closed, or its group is asleep.
            GroupError: the group is broken.
        """
        if not torch.compiler.is_dynamo_compiling():  # a compiled graph checks in its dispatch
            self.check_running()
        if self.config.shape.combine == "gemm_push":
            raise InvalidArgument(
                "output() of an all-to-all with combine='gemm_push': every row is stored at its "
                "token's owner by the kernel that computes it, see ExpertGroups"
            )
        rows = self.config.check_rows(rows, 0)
        if torch.compiler.is_dynamo_compiling():
            return slice_rows(self.output_buffer, rows)
        return self.receive_views(rows)[1]

    def combine(
        self,
        y: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
        **_unknown: Never,
    ) -> torch.Tensor:
        """Sum every token's rows at its owner: `out[t] = sum over ranks + add[t]`.

        Sums are in fp32 and in rank order. With several hosts, each host's sum is rounded to the
        transfer dtype, and these sums are added in the order of hosts.

        Args:
            y: `[ep_size, rows, hidden]`. None, or the `output(rows)` tensor itself, if the experts
                wrote their results to it. Another tensor costs one copy.
            out: `[tokens, hidden]` to write into. Default: a new tensor.
            add: `[tokens, hidden]` added to the sum, such as a shared expert's result.

        Returns:
            `[tokens, hidden]` for the tokens of the last dispatch. Tokens without experts get
                `add`, or zeros.

        Raises:
            InvalidArgument: a tensor has the wrong shape, dtype, device or stride.
            OutOfOrder: there is no dispatch to combine, or the object is closed.
            GroupError: the group is broken.
        """
        if _unknown:
            reject_unknown(self.combine, _unknown)
        if torch.compiler.is_dynamo_compiling():
            return traced.combine(self, y, out, add)
        return self._combine("combine", y, out, add)

    def dispatch_send(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        num_tokens: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
        rows: int | None = None,
        **_unknown: Never,
    ) -> None:
        """Send this rank's tokens without waiting for a peer: the first half of `dispatch`.

        Kernels that follow in the stream run while the peers' tokens arrive. Needs
        split_phase=True.

        Args:
            x: As in `dispatch`.
            topk_ids: As in `dispatch`.
            topk_weights: As in `dispatch`.
            num_tokens: As in `dispatch`.
            stats: As in `dispatch`.
            rows: As in `dispatch`.
        """
        if _unknown:
            reject_unknown(self.dispatch_send, _unknown)
        self._check_split_phase("dispatch_send")
        tensors, entry = to_tensor_tuple("x", x), "dispatch_send"
        self._dispatch(entry, tensors, topk_ids, topk_weights, num_tokens, stats, rows)

    def dispatch_recv(self) -> Received:
        """Wait for all peers' tokens: the second half of `dispatch`.

        Returns:
            As `dispatch`.
        """
        self._check_split_phase("dispatch_recv")
        return self._receive()

    def combine_send(self, y: torch.Tensor | None = None) -> None:
        """Publish or push this rank's rows: the first half of `combine`.

        With several hosts, it waits for the ranks of this host, sums their rows and starts to
        return the sums.

        Args:
            y: As in `combine`.
        """
        self._check_split_phase("combine_send")
        self._combine_send(y)

    def combine_recv(
        self, *, out: torch.Tensor | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Wait for all peers' rows and sum them: the second half of `combine`.

        Args:
            out: As in `combine`.
            add: As in `combine`.

        Returns:
            As `combine`.
        """
        self._check_split_phase("combine_recv")
        return self._combine("combine_receive", None, out, add)

    def timeline(self, rank: int | None = None) -> list[Span]:
        """Return the last 32 rounds of a rank. Needs profile=True; synchronise first.

        Args:
            rank: Rank to read. Default: this rank.

        Returns:
            One span for each operation, with times in nanoseconds of that rank's clock.
        """
        self.check_open()
        return read_timeline(self.heap, rank)

    # Implementation of the calls: check, launch, advance the state of the round.

    @exclusive_call("dispatch")
    def _dispatch(
        self,
        entry: str,
        tensors: tuple[torch.Tensor, ...],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
        stats: torch.Tensor | None,
        rows: int | None,
    ) -> None:
        """Run `dispatch` or `dispatch_send`."""
        if self.state is not State.IDLE:
            self._raise_out_of_order(entry)
        tokens = self.config.check_dispatch(
            tensors, topk_ids, topk_weights, num_tokens, stats, self.group.device
        )
        if rows is None:
            rows = self.config.max_tokens
        else:
            rows = self.config.check_rows(rows, tokens)
        self._tokens, self._rows = tokens, rows
        call = self._layer_call or make_dispatch_record(self._descriptor, self._layer, rows, 0)
        self._exchange.dispatch(
            entry, call, tensors, topk_ids, topk_weights, num_tokens, stats, rows
        )
        self.traced_tokens, self._traced_rows = (
            tokens,
            rows,
        )  # for a combine that is traced without its dispatch
        self.round_number += 1
        self._set_state(State.RECEIVED if entry == "dispatch" else State.SENT)

    @exclusive_call("dispatch_recv")
    def _receive(self) -> Received:
        """Wait for the dispatch in flight and return its result."""
        self.expect_state(State.SENT, "dispatch_recv")
        self._exchange.dispatch_receive()
        self._set_state(State.RECEIVED)
        return self.receive_views(self._rows)[0]

    @exclusive_call("combine_send")
    def _combine_send(self, y: torch.Tensor | None) -> None:
        """Run `combine_send`."""
        self.expect_state(State.RECEIVED, "combine_send")
        self._copy_to_output(y)
        self._exchange.combine_send(self._rows, self._tokens)
        self._set_state(State.RETURNED)

    @internal
    def get_source_rows(self) -> int:
        """Return the slots of each rank of this host in this round: `rows` for each host."""
        return self._rows * self.config.hosts

    @internal
    def mark_sent(self, tokens: int | None = None) -> None:
        """Record that another kernel has sent the experts' rows and set the peers' flags.

        Args:
            tokens: Number of this rank's tokens whose rows return. Default: that of the dispatch.
        """
        self._tokens = self._tokens if tokens is None else tokens
        self._set_state(State.RETURNED)

    @exclusive_call("combine")
    def _combine(
        self,
        entry: str,
        y: torch.Tensor | None,
        out: torch.Tensor | None,
        add: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run `combine` or `combine_receive` and return `out`."""
        self.expect_state(State.RECEIVED if entry == "combine" else State.RETURNED, entry)
        device, dtypes = self.group.device, (self.config.dtype,)
        size = (self._tokens, self.config.shape.hidden)
        if out is None:
            out = torch.empty(size, dtype=self.config.dtype, device=device)
        else:
            check_tensor("out", out, shape=size, dtypes=dtypes, device=device, aligned=16)
            self.check_not_symmetric("out", out)
        if add is not None:
            check_tensor("add", add, shape=size, dtypes=dtypes, device=device, aligned=16)
            check_no_overlap("out", out, {"add": add}, exact="add")
        self._copy_to_output(y)
        self._exchange.combine(entry, out, add, self._rows)
        self._set_state(State.IDLE)
        return out

    @internal
    @exclusive_call("combine")
    def finish_round(self) -> None:
        """End a round without returning rows, so that peers may write this rank's inbox again."""
        self.expect_state(State.RECEIVED, "finish")
        self._exchange.finish(self._rows)
        self._set_state(State.IDLE)

    def _poison(self, call: str, *, before: bool) -> None:
        received, output = self._full_views
        if before and call in ("combine", "combine_send") and self.state is State.RECEIVED:
            for plane in received.payloads:  # experts have finished; peers wait for this combine
                poison(plane)
        elif not before and self.state is State.RECEIVED:
            poison(output)  # peers have read the rows of the last round

    @property
    def is_mid_round(self) -> bool:
        """Whether a round is open: between dispatch and combine."""
        return self.state is not State.IDLE

    @property
    def latest_received(self) -> Received:
        """Views of this rank's inbox with `max_tokens` slots per source."""
        return self.receive_views(self.max_tokens)[0]

    def _copy_to_output(self, y: torch.Tensor | None) -> None:
        output = self.receive_views(self._rows)[1]
        if y is not None and not isinstance(y, torch.Tensor):
            raise_not_tensor("y", y)
        if y is not None and self.config.shape.combine == "gemm_push" and y.numel():
            raise InvalidArgument(
                "y in an all-to-all with combine='gemm_push': every row is stored at its "
                "token's owner, by ExpertGroups.send or by the kernel that computes it"
            )
        if y is None or y is output:
            return
        strided = y.layout is torch.strided and not y.is_nested
        if strided and y.data_ptr() == output.data_ptr():
            return
        device, dtypes = self.group.device, (self.config.dtype,)
        check_tensor("y", y, shape=output.shape, dtypes=dtypes, device=device, aligned=1)
        output.copy_(y)

    @internal
    def expect_state(self, state: State, call: str) -> None:
        """Raise OutOfOrder unless the round is in `state`."""
        if self.state is not state:
            self._raise_out_of_order(call)

    def _raise_out_of_order(self, call: str) -> NoReturn:
        context = "" if self.state is State.IDLE else f" while {self._tokens} tokens are dispatched"
        raise OutOfOrder(
            f"{call} out of order{context}: this all-to-all expects {self.state.value}. A round "
            "is one dispatch and one combine, each as one call or as send then recv"
        )

    def _set_state(self, state: State) -> None:
        self.state = state
        self._raise_if_broken()

    def _connect_hosts(self, span: HostSpan) -> None:
        """Extend the exchange to all hosts. Collective over them."""
        received, output = self._full_views
        self.output_buffer = split_hosts(output, span.hosts)
        self._set_views(received.split_by_source_rank(span.hosts))
        rail = open_rail(self, span)
        self._exchange = ManyHosts(self._local, rail, span.hosts, self._raise_if_broken)

    # Initial contents and views of the share.

    def _count_local_bytes(self) -> int:
        return self.config.host_bytes

    def _discard_calls(self) -> None:
        self.state = State.IDLE
        self._tokens = 0  # this rank's tokens in the open round
        self._rows = self.max_tokens  # slots for each source in this round
        self.traced_tokens, self._traced_rows = 0, self.max_tokens

    def _write_contents(self, header: ctypes.Structure) -> None:
        shape, offsets, heap = self.config.shape, self.config.offsets, self.heap
        header.source_rows = shape.tokens
        words = offsets.route_bytes // 4
        flags = header_bytes(shape.ranks)
        heap.tensor((offsets.route - flags,), torch.uint8, offset=flags).zero_()
        routes = heap.tensor((shape.ranks * shape.tokens, words), torch.int32, offset=offsets.route)
        routes[:, : shape.padded_top_k].fill_(-1)
        if shape.stats:
            size = (shape.ranks, shape.stats)
            heap.tensor(size, torch.int32, offset=offsets.stats).zero_()
        if shape.combine == "push_fp8":  # sentinels: a word of all ones has not arrived
            returned = (shape.returned_rows * shape.returned_bytes,)
            heap.tensor(returned, torch.uint8, offset=offsets.returned).fill_(0xFF)

    def _make_views(self) -> None:
        config, heap = self.config, self.heap
        shape, offsets = config.shape, config.offsets
        slots, words = (shape.ranks, shape.tokens), offsets.route_bytes // 4
        stride = (shape.tokens * words, words, 1)
        ids = heap.tensor((*slots, shape.top_k), torch.int32, offset=offsets.route, stride=stride)
        weights = heap.tensor(
            (*slots, shape.top_k),
            torch.float32,
            offset=offsets.route + 4 * shape.padded_top_k,
            stride=stride,
        )
        planes = tuple(
            _create_plane_view(heap, slots, payload, offset, pitch)
            for payload, offset, pitch in zip(
                config.payloads, offsets.planes, offsets.pitches, strict=True
            )
        )
        counts = heap.tensor((shape.ranks,), torch.int32, offset=offsets.counts)
        size = (shape.ranks, shape.stats)
        stats = heap.tensor(size, torch.int32, offset=offsets.stats) if shape.stats else None
        # With gemm_push, kernels store rows directly at the owners, and there is no outbox.
        sources = 0 if shape.combine == "gemm_push" else shape.ranks
        rows = (sources, shape.tokens, shape.hidden)
        self.output_buffer = heap.tensor(rows, config.dtype, offset=offsets.outbox)
        self._set_views(Received(planes, ids, weights, counts, stats))

    def _set_views(self, received: Received) -> None:
        self._full_views = received, self.output_buffer
        self._view_cache = {self.max_tokens: self._full_views}

    @internal
    def receive_views(self, rows: int) -> tuple[Received, torch.Tensor]:
        """Return views of the inbox and of the output with `rows` slots for each source."""
        views = self._view_cache.get(rows)
        if views is None:
            received, output = self._full_views
            if len(self._view_cache) == MAX_VIEWS:
                self._view_cache = {self.max_tokens: self._full_views}
            output = slice_rows(output, rows) if len(output) else output
            views = self._view_cache[rows] = received.slice_rows(rows), output
        return views

    def _drop_views(self) -> None:
        self._view_cache.clear()
        del self._full_views, self.output_buffer


def _create_plane_view(
    heap: Heap, slots: tuple[int, int], payload: Payload, offset: int, pitch: int
) -> torch.Tensor:
    """Return the view of one payload plane, whose rows are padded to 16-byte vectors."""
    item = payload.dtype.itemsize
    if pitch % item:
        raise InvalidArgument(f"rows of {payload} cannot be padded to {pitch} bytes")
    inner = [1]
    for size in reversed(payload.shape[1:]):
        inner.insert(0, inner[0] * size)
    stride = (slots[1] * pitch // item, pitch // item, *inner[: len(payload.shape)])
    return heap.tensor((*slots, *payload.shape), payload.dtype, offset=offset, stride=stride)
