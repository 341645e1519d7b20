# SPDX-License-Identifier: Apache-2.0
"""LowLatencyAllToAll: expert-parallel dispatch and combine for decoding, expert-major.

A result lives from its dispatch to its combine. As many are alive at once as there are slots. At
most one dispatch and one combine may be on their way, sent and not yet received.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Never

import torch

from weft.arguments import flags, refuse
from weft.cuda.driver import as_creation
from weft.errors import InvalidArgument, OutOfOrder
from weft.group import Group
from weft.heap.header import mirrors
from weft.hosts.operator import AcrossHosts
from weft.keywords import refuse_unknown
from weft.lowlatency import compile as traced
from weft.lowlatency.config import (
    LowLatencyCombineArgs,
    LowLatencyConfig,
    LowLatencyDispatchArgs,
    LowShape,
    memory_bytes,
    tracks,
)
from weft.lowlatency.kernels import load_kernels
from weft.lowlatency.reference import sent
from weft.lowlatency.results import ExpertRows, Handle, Slot
from weft.lowlatency.trace import dump
from weft.placement import Placed
from weft.runtime.check import check_apart, check_choices, check_tensor
from weft.runtime.debug import poison
from weft.runtime.kernels import Build, Kernels
from weft.runtime.layout import Memory
from weft.runtime.operator import one_call
from weft.runtime.timeline import DEFINE

Hook = Callable[[], object]


def as_sent(x: torch.Tensor, shape: LowShape) -> torch.Tensor:
    """Rows of x `[tokens, hidden]` as they leave a host: uint8 `[tokens, shape.row_bytes]`.

    Quantised, these are the numbers and then the scales in float32, as the kernels take them.
    """
    if not shape.group:
        return x.view(torch.uint8)
    numbers, scales = sent(x, "fp8", shape.group, shape.scales)
    assert scales is not None
    rows = torch.zeros((len(x), shape.row_bytes), dtype=torch.uint8, device=x.device)
    rows[:, : shape.hidden] = numbers.view(torch.uint8)
    rows[:, shape.hidden :][:, : 4 * shape.blocks] = scales.view(torch.uint8)
    return rows


class LowLatencyAllToAll(Placed, AcrossHosts):
    """Quantise tokens on their way to their experts, lay them out by expert, and return the sums.

    `weft.lowlatency.reference` specifies the results bit for bit. The constructor allocates all
    memory and is collective. A call allocates only its result, synchronises with no host, and may
    be captured in CUDA graphs. Every rank makes the same sequence of calls; a rank without tokens
    calls with zero of them.

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
        quantize: "fp8": dispatch delivers e4m3 numbers and scales. None: it delivers rows as they
            are.
        combine: "push": combine sends the experts' rows to the tokens' owners. "gemm_push": the
            kernel that makes a row stores it at the owner (`ExpertRows.dst_addr`); needs slots=1,
            reduce="receiver", and neither combine_dtype nor split_phase.
        combine_dtype: "fp8": rows return as FP8 with a scale for 128 columns. None: in `dtype`.
        split_phase: Also build `dispatch_send`, `dispatch_recv`, `combine_send` and `combine_recv`.
            A dispatch and a combine may then be in flight at once.
        group_size: Columns that share a scale: 32, 64 or 128.
        scale: "fp32_row", "fp32_col" (column-major, as TMA reads it) or "ue8m0" (powers of two,
            four in an int32, column-major).
        reduce: "receiver": the owner adds a token's weighted rows in fp32 in top-k order. "sender":
            each rank first adds the rows of its own experts, and fewer rows travel.
        slots: Results that may be alive at once, 1 or 2.
        num_sms: SMs that the kernels may fill. Default: all.
        programmatic_launch: Let a kernel become resident while its predecessor in the stream still
            runs. It touches no memory before the predecessor has ended.
        profile: Record the times of the last 32 rounds for `dump_trace`.

    Raises:
        InvalidArgument: an argument is invalid on every rank.
        CreationFailed: a rank cannot do its part. Every rank raises it.
        GeometryMismatch: ranks pass different sizes.
    """

    config: LowLatencyConfig
    _drops_repeats = True  # a row is among an expert's once

    @as_creation
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
        reduce: str = "receiver",
        slots: int = 2,
        num_sms: int | None = None,
        programmatic_launch: bool = True,
        profile: bool = False,
        _recipe: str = "weft",
        _allow_handle_reuse: bool = False,
        _defines: Sequence[str] = (),
        _first_epoch: int = 0,
    ) -> None:
        def prepare() -> tuple[LowLatencyConfig, Kernels]:
            flags(split_phase=split_phase, programmatic_launch=programmatic_launch, profile=profile)
            config = LowLatencyConfig.of(
                ranks=group.local.size,
                max_tokens=max_tokens,
                top_k=top_k,
                num_experts=num_experts,
                hidden=hidden,
                dtype=dtype,
                expert_map=expert_map,
                quantize=quantize,
                combine=combine,
                combine_dtype=combine_dtype,
                group_size=group_size,
                scale=scale,
                reduce=reduce,
                slots=slots,
                profile=profile,
                _recipe=_recipe,
                _hosts=group.host_ranks,
                _host=group.host,
            )
            defines = (*_defines, *((DEFINE,) if profile else ()))
            self._build = Build(num_sms, programmatic_launch, split_phase, defines)
            return config, load_kernels(group.device, config.shape, self._build)

        self._create(
            group,
            "a low-latency all-to-all",
            prepare,
            timeout=timeout,
            first_timeout=first_timeout,
            first_epoch=_first_epoch,
        )
        config = self.config
        self.dtype, self.placement = config.dtype, config.placement
        # May a dispatch be dropped, and combined again? Then a slot keeps its result until a later
        # dispatch needs it.
        self._allow_handle_reuse = _allow_handle_reuse
        self._number = 0  # of this rank's dispatches
        self._sent: Handle | None = None
        self._returned: Handle | None = None
        self._dispatch_args = LowLatencyDispatchArgs(site=self._site)
        self._combine_args = LowLatencyCombineArgs(site=self._site)
        for args in (self._dispatch_args, self._combine_args):
            args.own_experts = self.num_local_experts
            args.traces = self._tracks.data_ptr()
        if config.local_placement.explicit:
            self._table = config.local_placement.table(group.device)
            self._dispatch_args.placement = self._table.data_ptr()
            self._combine_args.placement = self._table.data_ptr()
        self._traced_handles = traced.TracedHandles(config.slots)
        self._open_rail()

    memory_bytes = staticmethod(memory_bytes)

    @property
    def memory(self) -> Memory:
        """Bytes that the rank with most experts holds for this object."""
        return self.config.memory

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        **_unknown: Never,
    ) -> ExpertRows:
        """Send this rank's tokens and return what all ranks sent to its experts.

        Ids out of range, and ids that repeat an earlier one of their row, are dropped; `check()`
        raises them.

        Args:
            x: `[tokens, hidden]` of `dtype`.
            topk_ids: int32 or int64 `[tokens, top_k]`, global expert ids, -1 for none.
            topk_weights: float32 `[tokens, top_k]`. Needed with reduce="sender" and on several
                hosts. None means ones.

        Returns:
            Rows by expert, valid until their handle is combined.

        Raises:
            InvalidArgument: a tensor has the wrong shape, dtype, device or stride.
            TokenOverflow: more tokens than `max_tokens`.
            OutOfOrder: `slots` results are alive, or the object is closed.
            GroupError: the group is broken.
        """
        if _unknown:
            refuse_unknown(self.dispatch, _unknown)
        if torch.compiler.is_dynamo_compiling():
            return traced.dispatch(self, x, topk_ids, topk_weights)
        return self._dispatch("dispatch", x, topk_ids, topk_weights)

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

        `out[t] = sum over k of weight * y + add[t]`. Products and sums are rounded to fp32 in top-k
        order ("sender": a rank's rows in top-k order, rounded to what travels, then by rank); then
        `add`; then one rounding to `dtype`. With several hosts, pass dispatch the same weights;
        each host's sum is rounded to what travels.

        Args:
            y: `[local_experts, ep_size * max_tokens, hidden]` of `dtype`, a result for each row of
                the dispatch; rows from `counts` on are not read. None with combine="gemm_push".
            topk_ids: As in the dispatch.
            topk_weights: As in the dispatch. None means ones.
            handle: `ExpertRows.handle`. Its result may be overwritten from now on.
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
            refuse_unknown(self.combine, _unknown)
        if torch.compiler.is_dynamo_compiling() or traced.is_of_graph(handle):
            return traced.combine(self, y, topk_ids, topk_weights, handle, out, add)
        return self._combine("combine", y, topk_ids, topk_weights, handle, out, add)

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
            The result, which holds nothing yet, and a function that receives it. Call that function
                or `dispatch_recv`.
        """
        if _unknown:
            refuse_unknown(self.dispatch_send, _unknown)
        self._check_split_phase("dispatch_send")
        return self._dispatch("dispatch_send", x, topk_ids, topk_weights), self._receive

    def dispatch_recv(self) -> ExpertRows:
        """Wait for all peers' tokens and lay them out: the second half of `dispatch`.

        Returns:
            What `dispatch` returns.
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

        With several hosts, it waits for the ranks of this host, sums, and starts to return the
        sums. `add`, `out`, ids and weights must stay unchanged until the second half has run.

        Args:
            y: As in `combine`.
            topk_ids: As in `combine`.
            topk_weights: As in `combine`.
            handle: As in `combine`.
            out: As in `combine`.
            add: As in `combine`.

        Returns:
            `out`, which holds nothing yet, and a function that receives it. Call that function or
                `combine_recv`.
        """
        if _unknown:
            refuse_unknown(self.combine_send, _unknown)
        self._check_split_phase("combine_send")
        result = self._combine("combine_send", y, topk_ids, topk_weights, handle, out, add)
        return result, self._combine_receive

    def combine_recv(self) -> torch.Tensor:
        """Wait for the rows and add them: the second half of `combine`.

        Returns:
            What `combine` returns.
        """
        self._check_split_phase("combine_recv")
        return self._combine_receive()

    def dump_trace(self, path: str | os.PathLike[str]) -> None:
        """Write this rank's last 32 rounds as JSON for Perfetto. Needs profile=True.

        It waits for this rank's own work. Every rank writes its own file, all on rank 0's clock;
        `weft.lowlatency.trace.merge` joins them. Call it when all ranks have finished the same
        rounds.

        Args:
            path: File to write.

        Raises:
            InvalidArgument: the object was built without profile=True, or path is no path.
            OutOfOrder: the object is closed.
        """
        self._check_open()
        if not isinstance(path, str | os.PathLike):
            refuse("path", path, "a str or os.PathLike")
        dump(Path(path), self._tracks, self.heap)

    # The calls: each is checked, handed to a kernel, and changes which results are alive.

    @one_call("dispatch")
    def _dispatch(
        self,
        entry: str,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        results: Mapping[str, torch.Tensor] | None = None,
    ) -> ExpertRows:
        """Run `dispatch` or `dispatch_send`; the result is there after it, or after its receive.

        results: where the rows and their metadata go, by name; default, into the slot.
        """
        tokens = self.config.check_dispatch(x, topk_ids, topk_weights, self.group.device)
        if self._sent is not None:
            raise OutOfOrder(
                f"{entry} while dispatch {self._sent.number} is on its way: receive it first"
            )
        handle = Handle(self._number + 1, self._free_slot(entry), tokens)
        call = self._identify(self._dispatch_args, self.max_tokens)
        slot = self._slots[handle.slot]
        args, t = self._dispatch_args, slot.tensors if results is None else results
        slot.point(args)
        args.rows, args.scales = t["x"].data_ptr(), t["scales"].data_ptr()
        args.counts, args.source = t["counts"].data_ptr(), t["source"].data_ptr()
        args.ranges = t["ranges"].data_ptr()
        if self._rail is None:
            self._run_dispatch(entry, x, topk_ids, topk_weights)
        else:
            row = (as_sent(x, self.config.shape),)
            self._rail.send(row, topk_ids, topk_weights, None, None, self.max_tokens, call)
            slot.sent_weights = topk_weights
            if entry == "dispatch":
                self._forward(slot)
        self._number, slot.alive, slot.latest = handle.number, handle, handle
        if entry != "dispatch":
            self._sent = handle
        self._raise_if_broken()
        return slot.rows(handle)

    def _run_dispatch(
        self,
        entry: str,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
    ) -> None:
        """Send rows to the ranks of this host."""
        args, tokens = self._dispatch_args, topk_ids.shape[0]
        args.x, args.ids, args.ids_bytes = x.data_ptr(), topk_ids.data_ptr(), topk_ids.itemsize
        args.weights = 0 if topk_weights is None else topk_weights.data_ptr()
        args.tokens = tokens
        self._kernels.run(entry, args, tokens)

    def _forward(self, slot: Slot) -> None:
        """Wait for the rows of all hosts, and send them to the ranks of this one."""
        assert self._rail is not None
        came = self._rail.receive(self.max_tokens)
        # Combine needs them, and another dispatch may come before it.
        slot.tensors["came_ids"].copy_(came.ids)
        slot.tensors["came_weights"].copy_(came.weights)
        self._run_dispatch("dispatch", came.planes[0], came.ids, came.weights)

    @one_call("dispatch_recv")
    def _receive(self) -> ExpertRows:
        """Run `dispatch_receive`."""
        handle = self._sent
        if handle is None:
            raise OutOfOrder("dispatch_recv without a dispatch_send")
        if self._rail is None:
            self._dispatch_args.tokens = handle.tokens
            self._kernels.run("dispatch_receive", self._dispatch_args, handle.tokens)
        else:
            self._forward(self._slots[handle.slot])
        self._sent = None
        self._raise_if_broken()
        return self._slots[handle.slot].rows(handle)

    @one_call("combine")
    def _combine(
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
        """Run `combine` or `combine_send`; the result is there after it, or after its receive.

        counts: of the dispatch, where its results did not go into the slot.
        """
        self._check_handle(handle, entry)
        device, dtypes = self.group.device, (self.dtype,)
        tokens = check_choices(topk_ids, topk_weights, self.config.shape.top_k, device)
        if tokens != handle.tokens:
            raise InvalidArgument(
                f"topk_ids has {tokens} rows, dispatch {handle.number} had {handle.tokens}: pass "
                "what it was called with"
            )
        slot = self._slots[handle.slot]
        self._check_results(y, slot)
        size = (tokens, self.config.shape.hidden)
        if out is None:
            out = torch.empty(size, dtype=self.dtype, device=device)
        for name, tensor in (("out", out), ("add", add)):
            if tensor is not None:
                check_tensor(name, tensor, shape=size, dtypes=dtypes, device=device, aligned=16)
        self._check_outside("out", out)
        read = {"add": add, "y": y, "topk_ids": topk_ids, "topk_weights": topk_weights}
        check_apart("out", out, read, exact="add")
        args = self._combine_args
        args.y = 0 if y is None else y.data_ptr()
        args.counts = (slot.tensors["counts"] if counts is None else counts).data_ptr()
        given, sums = (topk_ids, topk_weights), out
        if self._rail is not None:
            slot.check_weights(topk_weights)
            topk_ids, topk_weights = slot.tensors["came_ids"], slot.tensors["came_weights"]
            tokens, sums = len(topk_ids), self._rail.sums(self.max_tokens)
        args.ids, args.ids_bytes = topk_ids.data_ptr(), topk_ids.itemsize
        args.weights = 0 if topk_weights is None else topk_weights.data_ptr()
        args.out = sums.data_ptr()
        args.add = 0 if add is None or self._rail is not None else add.data_ptr()
        args.tokens, args.dispatch_id = tokens, self._place(handle)
        slot.point(args)
        self._kernels.run(entry if self._rail is None else "combine", args, tokens)
        if self._rail is not None:
            self._raise_if_broken()
            self._rail.send_home(self.max_tokens)
        if entry == "combine":
            if self._rail is not None:
                self._rail.receive_home(out, add)
            slot.alive = None
        else:
            self._returned = slot.alive = handle
            self._kept = (out, add, given)  # the receive reads them
        self._raise_if_broken()
        return out

    @one_call("combine_recv")
    def _combine_receive(self) -> torch.Tensor:
        """Run `combine_receive`."""
        handle = self._returned
        if handle is None:
            raise OutOfOrder("combine_recv without a combine_send")
        out, add, _ = self._kept
        if self._rail is None:
            self._kernels.run("combine_receive", self._combine_args, handle.tokens)
        else:
            self._rail.receive_home(out, add)
        self._slots[handle.slot].alive = self._returned = None
        del self._kept
        self._raise_if_broken()
        return out

    def _poison(self, doing: str, *, before: bool) -> None:
        if before or doing != "combine" or self._allow_handle_reuse:
            return
        for slot in self._slots:
            if slot.alive is None:
                for name in ("x", "scales"):
                    if slot.tensors[name] is not None:
                        poison(slot.tensors[name])

    @property
    def _mid_round(self) -> bool:
        """Is a result alive that has not been combined?"""
        return bool(self._alive)

    @property
    def _alive(self) -> list[Handle]:
        """The dispatches whose results are alive."""
        return [slot.alive for slot in self._slots if slot.alive is not None]

    def _handle_of(self, number: int) -> Handle | None:
        """The handle of dispatch `number`, as long as its result is alive."""
        return next((h for h in self._alive if h.number == number), None)

    def _drop(self, handle: Handle) -> None:
        """Give up a result that nobody will combine."""
        slot = self._slots[handle.slot]
        if slot.alive is handle:
            slot.alive = None

    def _place(self, handle: Handle) -> int:
        """Which of the results that are alive this is, the oldest being 1; ranks compare it.

        Not the dispatch's number: graphs replay dispatches that no host counts.
        """
        return 1 + sum(h.number < handle.number for h in self._alive)

    def _free_slot(self, entry: str) -> int:
        """The next slot in turn that no result lives in; results may be combined in any order.

        With `_allow_handle_reuse` and none free, the slot of the oldest result, unless its combine
        is on its way. Only the order of calls decides, so all ranks drop the same result.
        """
        slots = len(self._slots)
        for turn in range(slots):
            slot = (self._number + turn) % slots
            if self._slots[slot].alive is None:
                return slot
        oldest = min(self._alive, key=lambda handle: handle.number)
        if self._allow_handle_reuse and oldest is not self._returned:
            return oldest.slot
        raise OutOfOrder(
            f"{entry} while {slots} results are alive, the oldest of dispatch {oldest.number}: "
            "combine one first"
        )

    def _check_results(self, y: torch.Tensor | None, slot: Slot) -> None:
        if self.config.shape.gemm_push:
            if y is not None:
                raise InvalidArgument(
                    "y is given, combine='gemm_push': rows are stored at their owners by the "
                    "kernel that makes them; pass None"
                )
            return
        if y is None:
            raise InvalidArgument("y is None; pass the results of the dispatch's rows")
        device, dtypes = self.group.device, (self.dtype,)
        check_tensor("y", y, shape=slot.x.shape, dtypes=dtypes, device=device, aligned=16)

    def _check_handle(self, handle: Handle, entry: str) -> None:
        if not isinstance(handle, Handle):
            raise InvalidArgument(
                f"handle is a {type(handle).__name__}; pass the handle of what dispatch returned"
            )
        if self._returned is not None:
            raise OutOfOrder(
                f"{entry} while the combine of dispatch {self._returned.number} is on its way: "
                "receive it first"
            )
        # By identity: another all-to-all's handle may have the same numbers.
        if self._allow_handle_reuse:
            kept = any(slot.latest is handle for slot in self._slots)
            if kept and handle is not self._sent:
                return
            why = "it has not been received" if kept else "a later dispatch has taken its slot"
            raise OutOfOrder(
                f"{entry} of dispatch {handle.number}: {why}; {len(self._slots)} results are kept: "
                "combine before that dispatch"
            )
        alive = any(h is handle for h in self._alive)
        if not alive or handle is self._sent:
            why = "it has not been received" if alive else "it is not alive"
            raise OutOfOrder(
                f"{entry} of dispatch {handle.number}: {why}; each dispatch is combined once, by "
                "the all-to-all that made it"
            )

    # The share's first contents, and this rank's own memory.

    def _own_bytes(self) -> int:
        return super()._own_bytes() + self.config.memory.ordinary

    def _start_anew(self) -> None:
        self._sent = self._returned = None
        self._traced_handles.alive.clear()
        for slot in self._slots:
            slot.start_anew()

    def _write_contents(self, header: ctypes.Structure) -> None:
        at, heap = self.config.offsets, self.heap
        heap.tensor((at.tokens - at.progress,), torch.uint8, offset=at.progress).zero_()
        blank = at.share_bytes - at.tokens
        heap.tensor((blank,), torch.uint8, offset=at.tokens).fill_(0xFF)
        heap.tensor((4,), torch.int64, offset=at.progress).fill_(header.first_epoch)

    def _make_views(self) -> None:
        config, heap, device = self.config, self.heap, self.group.device
        own = len(config.placement.experts_of(self.group.rank))
        failed = mirrors(config.shape.ranks).Header.failed
        abort_flag = heap.tensor((1,), torch.int32, offset=failed.offset)
        self._slots = [Slot(config, own, device, abort_flag) for _ in range(config.slots)]
        size = tracks(config.shape.ranks) if config.profile else (0,)
        self._tracks = torch.zeros(size, dtype=torch.uint8, device=device)

    def _drop_views(self) -> None:
        self._slots.clear()
        self._tracks = self._tracks.new_empty(0)
