"""Workspace: one heap laid out for one all-to-all, its views, and what its kernels report."""

from __future__ import annotations

import torch

from weft.alltoall.geometry import Geometry
from weft.alltoall.received import Payload, Received, with_rows
from weft.errors import InvalidArgument
from weft.memory import Group, Heap
from weft.memory.header import HEADER_BYTES, Header
from weft.runtime.entries import Entries
from weft.runtime.watched import Watched, new_header

MAX_VIEWS = 256  # numbers of rows whose views are kept: one for each batch size of an engine


class Workspace(Watched):
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
        header = new_header(
            group,
            geometry.layout.share_bytes,
            seconds=(timeout, first_timeout),
            first_epoch=first_epoch,
        )
        self.heap = Heap.create(group, geometry.layout.share_bytes)
        # A vote: no peer may dispatch into this share before it is initialised.
        group.together(
            lambda: self._initialise(geometry, header), doing="initialising an all-to-all"
        )

    def _initialise(self, geometry: Geometry, header: Header) -> None:
        group = self.heap.group
        self._watch(geometry.shape.descriptor, "all-to-all")
        self._views: dict[int, tuple[Received, torch.Tensor]] = {}
        self._max_rows = geometry.shape.tokens
        self.received = self._inbox_views(geometry)
        shape, layout = geometry.shape, geometry.layout
        # Each choice's row is stored at its token's owner: there is no outbox to write to.
        sources = 0 if shape.combine == "gemm_push" else shape.ranks
        rows = (sources, shape.tokens, shape.hidden)
        self.output = self.heap.tensor(rows, geometry.dtype, offset=layout.outbox)
        if shape.combine == "push_fp8":  # blank: a row is there when no word of it is all ones
            places = (shape.returned_rows * shape.returned_bytes,)
            self.heap.tensor(places, torch.uint8, offset=layout.returned).fill_(0xFF)
        header.generation = self.heap.generation
        header.source_rows = shape.tokens
        raw = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self.heap.tensor((HEADER_BYTES,), torch.uint8).copy_(raw)
        if group.device.type == "cuda":
            torch.cuda.current_stream(group.device).synchronize()

    def _inbox_views(self, geometry: Geometry) -> Received:
        shape, layout, heap = geometry.shape, geometry.layout, self.heap
        slots = (shape.ranks, shape.tokens)
        words = layout.route_bytes // 4
        stride = (shape.tokens * words, words, 1)
        route = heap.tensor((*slots, words), torch.int32, offset=layout.route)
        route[..., : shape.slots].fill_(-1)
        source_rows = heap.tensor((shape.ranks,), torch.int32, offset=layout.source_rows)
        source_rows.fill_(shape.tokens)
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

    def views(self, rows: int) -> tuple[Received, torch.Tensor]:
        """`received` and `output` as a round with so many rows for each source lays them out."""
        if rows == self._max_rows:
            return self.received, self.output
        found = self._views.get(rows)
        if found is None:
            if len(self._views) == MAX_VIEWS:
                self._views.clear()
            output = self.output if not len(self.output) else with_rows(self.output, rows)
            found = self._views[rows] = self.received._with_rows(rows), output
        return found

    def close(self) -> None:
        """Give the memory back, but for what a caller's views still show; local."""
        self._views.clear()
        del self.received, self.output
        self.free()


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
