"""The calls of a low-latency all-to-all: results, their order, and what each hands to its entry.

A result lives from its dispatch to its combine. As many are alive at once as there are slots. At
most one dispatch and one combine may be on their way, sent and not yet received. With `recycles` a
dispatch may be dropped, and combined again: a slot keeps its result until a later one needs it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.errors import InvalidArgument, OutOfOrder
from weft.lowlatency.geometry import TRACKS, LowGeometry
from weft.lowlatency.results import ExpertRows, Handle, Slot
from weft.lowlatency.shape import LowLatencyCombineArgs, LowLatencyDispatchArgs
from weft.memory import Group, Heap
from weft.memory.driver import relaxed
from weft.memory.header import HEADER_BYTES, Header
from weft.memory.room import require_room
from weft.runtime.check import check_alignment, check_tensor
from weft.runtime.kernels import Kernels
from weft.runtime.stream import finish
from weft.runtime.watched import Watched, new_header, one_call


class LowPremises(Watched):
    """The shared memory of a low-latency all-to-all: header, flags and the inbox.

    Creation is collective and a vote; every rank leaves it with all ranks' shares initialised.
    """

    _drops_repeats = True  # a row lies once among an expert's

    def __init__(
        self,
        group: Group,
        geometry: LowGeometry,
        *,
        seconds: tuple[float, float],
        first_epoch: int,
    ) -> None:
        layout = geometry.layout
        header = new_header(group, layout.share_bytes, seconds=seconds, first_epoch=first_epoch)
        self.heap = Heap.create(group, layout.share_bytes)
        # A vote: no peer may write into this share before it is initialised.
        group.together(
            lambda: self._initialise(geometry, header),
            doing="initialising a low-latency all-to-all",
        )

    def _initialise(self, geometry: LowGeometry, header: Header) -> None:
        self._watch(geometry.shape.descriptor, "low-latency all-to-all")
        layout, heap = geometry.layout, self.heap
        self.abort_flag = heap.tensor((1,), torch.int32, offset=Header.failed.offset)
        blank = layout.share_bytes - layout.tokens
        heap.tensor((blank,), torch.uint8, offset=layout.tokens).fill_(0xFF)
        heap.tensor((4,), torch.int64, offset=layout.progress).fill_(header.first_epoch)
        header.generation = heap.generation
        raw = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        heap.tensor((HEADER_BYTES,), torch.uint8).copy_(raw)
        if heap.group.device.type == "cuda":
            torch.cuda.current_stream(heap.group.device).synchronize()

    def close(self) -> None:
        """Give the memory back; local."""
        del self.abort_flag
        self.free()


class LowRounds:
    """One rank's calls on one set of slots."""

    def __init__(
        self,
        group: Group,
        geometry: LowGeometry,
        premises: LowPremises,
        entries: Kernels,
        *,
        split_phase: bool,
    ) -> None:
        self.recycles = False
        self.geometry, self.premises, self._entries = geometry, premises, entries
        self._watched = premises
        self._halves = split_phase
        self.device = group.device
        own = len(geometry.placement.experts_of(group.rank))
        self.slots = [
            Slot(geometry, own, group.device, premises.abort_flag) for _ in range(geometry.slots)
        ]
        size = TRACKS if geometry.profile else (0,)
        self.tracks = torch.zeros(size, dtype=torch.uint8, device=group.device)
        self._dispatch_args = LowLatencyDispatchArgs(
            site=premises.site, own_experts=own, traces=self.tracks.data_ptr()
        )
        self._combine_args = LowLatencyCombineArgs(
            site=premises.site, own_experts=own, traces=self.tracks.data_ptr()
        )
        if geometry.placement.explicit:
            self._table = geometry.placement.table(group.device)
            for args in (self._dispatch_args, self._combine_args):
                args.placement = self._table.data_ptr()
        finish(group.device)
        self._number = 0
        self._sent: Handle | None = None
        self._returned: Handle | None = None

    @one_call("dispatch")
    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        *,
        entry: str,
        results: Mapping[str, torch.Tensor] | None = None,
    ) -> ExpertRows:
        """Run `dispatch` or `dispatch_send`; the result is there behind it, or its receive.

        results: where the rows and their metadata go, by name; default, into the slot.
        """
        geometry = self.geometry
        tokens = geometry.check_dispatch(x, topk_ids, topk_weights, self.device)
        if self._sent is not None:
            raise OutOfOrder(
                f"{entry} while dispatch {self._sent.number} is on its way: receive it first"
            )
        self._check_built(entry)
        handle = Handle(self._number + 1, self._free_slot(entry), tokens)
        slot = self.slots[handle.slot]
        args, t = self._dispatch_args, slot.tensors if results is None else results
        args.x, args.ids, args.ids_bytes = x.data_ptr(), topk_ids.data_ptr(), topk_ids.itemsize
        args.weights = 0 if topk_weights is None else topk_weights.data_ptr()
        args.tokens = tokens
        self._point(args, slot)
        for name, field in (("rows", "x"), ("scales", "scales"), ("counts", "counts")):
            setattr(args, name, t[field].data_ptr())
        args.source, args.ranges = t["source"].data_ptr(), t["ranges"].data_ptr()
        self._entries.run(entry, args, tokens)
        self._number, slot.alive, slot.latest = handle.number, handle, handle
        if entry != "dispatch":
            self._sent = handle
        self.premises.raise_if_broken()
        return slot.rows(handle)

    @one_call("dispatch_recv")
    def receive(self) -> ExpertRows:
        """Run `dispatch_receive`."""
        handle = self._sent
        if handle is None:
            raise OutOfOrder("dispatch_recv without a dispatch_send")
        self._dispatch_args.tokens = handle.tokens
        self._entries.run("dispatch_receive", self._dispatch_args, handle.tokens)
        self._sent = None
        self.premises.raise_if_broken()
        return self.slots[handle.slot].rows(handle)

    @one_call("combine")
    def combine(
        self,
        y: torch.Tensor | None,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        handle: Handle,
        *,
        out: torch.Tensor | None,
        add: torch.Tensor | None,
        entry: str,
        counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run `combine` or `combine_send`; the result is there behind it, or its receive.

        counts: of the dispatch, where its results did not go into the slot.
        """
        self._check_handle(handle, entry)
        shape, dtype = self.geometry.shape, self.geometry.dtype
        tokens = self.geometry.check_choices(topk_ids, topk_weights, self.device)
        if tokens != handle.tokens:
            raise InvalidArgument(
                f"topk_ids has {tokens} rows, dispatch {handle.number} had {handle.tokens}: pass "
                "what it was called with"
            )
        slot = self.slots[handle.slot]
        self._check_results(y, slot)
        if out is None:
            out = torch.empty((tokens, shape.hidden), dtype=dtype, device=self.device)
        for name, tensor in (("out", out), ("add", add)):
            if tensor is not None:
                size = (tokens, shape.hidden)
                check_tensor(name, tensor, shape=size, dtypes=(dtype,), device=self.device)
                check_alignment(name, tensor, 16)
        args = self._combine_args
        args.y = 0 if y is None else y.data_ptr()
        args.ids, args.ids_bytes = topk_ids.data_ptr(), topk_ids.itemsize
        args.weights = 0 if topk_weights is None else topk_weights.data_ptr()
        args.counts = (slot.tensors["counts"] if counts is None else counts).data_ptr()
        args.out, args.add = out.data_ptr(), 0 if add is None else add.data_ptr()
        args.tokens, args.dispatch_id = tokens, self._place(handle)
        self._point(args, slot)
        self._entries.run(entry, args, tokens)
        if entry == "combine":
            slot.alive = None
        else:
            self._returned = slot.alive = handle
            self._kept = (out, add, topk_ids, topk_weights)  # the receive reads them
        self.premises.raise_if_broken()
        return out

    @one_call("combine_recv")
    def combine_receive(self) -> torch.Tensor:
        """Run `combine_receive`."""
        handle = self._returned
        if handle is None:
            raise OutOfOrder("combine_recv without a combine_send")
        self._entries.run("combine_receive", self._combine_args, handle.tokens)
        self.slots[handle.slot].alive = self._returned = None
        out = self._kept[0]
        del self._kept
        self.premises.raise_if_broken()
        return out

    def handle_of(self, number: int) -> Handle | None:
        """The handle of dispatch `number`, as long as its result is alive."""
        alive = (slot.alive for slot in self.slots)
        return next((h for h in alive if h is not None and h.number == number), None)

    def drop(self, handle: Handle) -> None:
        """Give up a result that nobody will combine."""
        slot = self.slots[handle.slot]
        if slot.alive is handle:
            slot.alive = None

    def close(self) -> None:
        """Notify the peers, wait for this rank's own work, give everything back. Idempotent."""
        if not self.premises.begin_close():
            return
        with relaxed(self.device):
            try:
                self._entries.close()
            finally:
                self.slots.clear()
                self.tracks = self.tracks.new_empty(0)
                self.premises.close()

    @staticmethod
    def _point(args: LowLatencyDispatchArgs | LowLatencyCombineArgs, slot: Slot) -> None:
        """Let arguments speak of a slot's record. A dispatch on its way keeps its own."""
        for name in ("position", "weights", "source_tokens", "expected", "dst_addr"):
            setattr(args.routing, name, slot.tensors[name].data_ptr())

    def _place(self, handle: Handle) -> int:
        """Which of the results that are alive this is, the oldest being 1; ranks compare it.

        Not the dispatch's number: graphs replay dispatches that no host counts.
        """
        place = 1
        for slot in self.slots:
            if slot.alive is not None and slot.alive.number < handle.number:
                place += 1
        return place

    def _free_slot(self, entry: str) -> int:
        """The next slot in turn that no result lives in; results may be combined in any order.

        With `recycles` and none free, the slot of the oldest result, unless its combine is on its
        way. Only the order of calls decides, so all ranks drop the same result.
        """
        slots = len(self.slots)
        for turn in range(slots):
            slot = (self._number + turn) % slots
            if self.slots[slot].alive is None:
                return slot
        alive = [slot.alive for slot in self.slots if slot.alive is not None]
        oldest = min(alive, key=lambda handle: handle.number)
        if self.recycles and oldest is not self._returned:
            return oldest.slot
        raise OutOfOrder(
            f"{entry} while {slots} results are alive, the oldest of dispatch {oldest.number}: "
            "combine one first"
        )

    def _check_results(self, y: torch.Tensor | None, slot: Slot) -> None:
        if self.geometry.shape.gemm_push:
            if y is not None:
                raise InvalidArgument(
                    "y is given, combine='gemm_push': rows are stored at their owners by "
                    "whoever makes them; pass None"
                )
            return
        if y is None:
            raise InvalidArgument("y is None; pass the results of the dispatch's rows")
        dtypes = (self.geometry.dtype,)
        check_tensor("y", y, shape=slot.x.shape, dtypes=dtypes, device=self.device)
        check_alignment("y", y, 16)

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
        self._check_built(entry)
        # By identity: another all-to-all's handle may have the same numbers.
        if self.recycles:
            kept = any(slot.latest is handle for slot in self.slots)
            if kept and handle is not self._sent:
                return
            why = "it has not been received" if kept else "a later dispatch has taken its slot"
            raise OutOfOrder(
                f"{entry} of dispatch {handle.number}: {why}; {len(self.slots)} results are kept: "
                "combine before that dispatch"
            )
        alive = any(slot.alive is handle for slot in self.slots)
        if not alive or handle is self._sent:
            why = "it has not been received" if alive else "it is not alive"
            raise OutOfOrder(
                f"{entry} of dispatch {handle.number}: {why}; each dispatch is combined once, by "
                "the all-to-all that made it"
            )

    def _check_built(self, entry: str) -> None:
        if entry.endswith("_send") and not self._halves:
            raise InvalidArgument(
                f"{entry} of an all-to-all built without split_phase; pass split_phase=True"
            )


def open_rounds(
    group: Group,
    geometry: LowGeometry,
    entries: Kernels,
    seconds: tuple[float, float],
    first_epoch: int,
    *,
    split_phase: bool,
) -> LowRounds:
    """The memory and the calls, once all ranks agree; else nothing stays loaded."""
    try:
        group.agree(geometry.manifest(), what="low-latency geometry")
        require_room(group, geometry.memory.total, what="a low-latency all-to-all")
        premises = LowPremises(group, geometry, seconds=seconds, first_epoch=first_epoch)
        return group.together(
            lambda: LowRounds(group, geometry, premises, entries, split_phase=split_phase),
            doing="allocating the results of a low-latency all-to-all",
        )
    except BaseException:
        entries.close()
        raise
