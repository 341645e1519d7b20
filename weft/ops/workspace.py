"""Workspace: one heap laid out for one all-to-all, its views, and what its kernels report."""

from __future__ import annotations

import torch

from weft.errors import Aborted, InvalidArgument
from weft.memory import Group, Heap
from weft.memory.header import ABI, EPOCH_MASK, HEADER_BYTES, Header, Mailbox, Record
from weft.ops.alarm import Alarm
from weft.ops.args import Site
from weft.ops.entry import Entries
from weft.ops.geometry import Geometry
from weft.ops.received import Payload, Received
from weft.ops.report import breakage, refusal


class Workspace:
    """The symmetric memory of an all-to-all.

    received: views of what peers write into this rank's inbox.
    output: `[ep_size, max_tokens, hidden]`, what this rank's experts write for peers to read.
    site: where the shares lie, as kernels take it.

    Creation is collective and a vote; every rank leaves it with all ranks' shares initialised.
    """

    def __init__(
        self,
        group: Group,
        geometry: Geometry,
        *,
        timeout: float,
        first_timeout: float,
        first_epoch: int = 0,
    ) -> None:
        header = Header()
        header.abi, header.rank, header.ranks = ABI, group.rank, group.size
        header.share_bytes = geometry.layout.share_bytes
        header.first_epoch = header.epoch = first_epoch & EPOCH_MASK
        header.deadline_ns = int(timeout * 1e9)
        header.first_deadline_ns = int(first_timeout * 1e9)
        self.heap = Heap.create(group, geometry.layout.share_bytes)
        self._seen_refusals = 0
        # A vote: no peer may dispatch into this share before it is initialised.
        group.together(
            lambda: self._initialise(geometry, header), doing="initialising an all-to-all"
        )

    def _initialise(self, geometry: Geometry, header: Header) -> None:
        group = self.heap.group
        self._mailbox = Mailbox.from_address(self.heap.mailbox.host)
        self.site = Site(
            base=self.heap.base,
            stride=self.heap.stride,
            mailbox=self.heap.mailbox.device,
            rank=group.rank,
            descriptor=geometry.shape.descriptor,
        )
        self.received = self._inbox_views(geometry)
        shape, layout = geometry.shape, geometry.layout
        rows = (shape.ranks, shape.tokens, shape.hidden)
        self.output = self.heap.tensor(rows, geometry.dtype, offset=layout.outbox)
        self._alarm = Alarm(self.heap)
        header.generation = self.heap.generation
        raw = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self.heap.tensor((HEADER_BYTES,), torch.uint8).copy_(raw)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)

    def _inbox_views(self, geometry: Geometry) -> Received:
        shape, layout, heap = geometry.shape, geometry.layout, self.heap
        slots = (shape.ranks, shape.tokens)
        words = layout.route_bytes // 4
        stride = (shape.tokens * words, words, 1)
        route = heap.tensor((*slots, words), torch.int32, offset=layout.route)
        route[..., : shape.slots].fill_(-1)
        ids = heap.tensor((*slots, shape.top_k), torch.int32, offset=layout.route, stride=stride)
        weights = heap.tensor(
            (*slots, shape.top_k),
            torch.float32,
            offset=layout.route + 4 * shape.slots,
            stride=stride,
        )
        planes = tuple(
            _plane(heap, slots, payload, offset, pitch)
            for payload, offset, pitch in zip(
                geometry.payloads, layout.planes, layout.pitches, strict=True
            )
        )
        counts = heap.tensor((shape.ranks,), torch.int32, offset=layout.counts)
        size = (shape.ranks, shape.stats)
        stats = heap.tensor(size, torch.int32, offset=layout.stats) if shape.stats else None
        return Received(planes, ids, weights, counts, stats)

    def raise_if_broken(self) -> None:
        """Raise what ended the group, if anything did."""
        if self._mailbox.broken_code:
            raise breakage(self._mailbox.broken)
        if self._mailbox.abort:
            raise Aborted(f"this rank, {self.site.rank}, called abort(); make a new group")

    def raise_refusal(self) -> None:
        """Raise the latest refused input since the last call, if there was any."""
        serial = self._mailbox.refusals
        if serial == self._seen_refusals:
            return
        count = (serial - self._seen_refusals) & 0xFFFFFFFF
        self._seen_refusals = serial
        raise refusal(self._mailbox.refused[serial % len(self._mailbox.refused)], count)

    def abort(self) -> None:
        """Ask the kernels of all ranks to leave their waits."""
        self._mailbox.abort = 1
        self._alarm.ring()

    def history(self, rank: int | None) -> list[Record]:
        """Finished operations of a rank, oldest first."""
        header = Header.from_buffer_copy(self.heap.header(rank))
        return sorted((r for r in header.ring if r.phase), key=lambda r: (r.epoch, r.phase))

    def close(self) -> None:
        """Give the memory back, but for what a caller's views still show; local."""
        del self._mailbox, self._alarm, self.received, self.output
        self.heap.close()


def open_workspace(
    group: Group,
    geometry: Geometry,
    entries: Entries,
    seconds: tuple[float, float],
    first_epoch: int,
) -> Workspace:
    """The shared memory, once all ranks agree on what it holds; else nothing stays loaded."""
    try:
        group.agree(geometry.manifest(), what="all-to-all geometry")
        return Workspace(
            group,
            geometry,
            timeout=seconds[0],
            first_timeout=seconds[1],
            first_epoch=first_epoch,
        )
    except BaseException:
        entries.close()
        raise


def _plane(
    heap: Heap, slots: tuple[int, int], payload: Payload, offset: int, pitch: int
) -> torch.Tensor:
    """The view of one payload plane; in memory its rows are padded to whole 16-byte vectors."""
    item = payload.dtype.itemsize
    if pitch % item:
        raise InvalidArgument(f"rows of {payload} cannot be padded to {pitch} bytes")
    inner = [1]
    for size in reversed(payload.shape[1:]):
        inner.insert(0, inner[0] * size)
    stride = (slots[1] * pitch // item, pitch // item, *inner[: len(payload.shape)])
    return heap.tensor((*slots, *payload.shape), payload.dtype, offset=offset, stride=stride)
