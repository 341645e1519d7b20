"""Grouping of one all-to-all's rounds: buffers, kernels, and the order of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from weft.alltoall.config import AllToAllConfig
from weft.alltoall.operator import AllToAll, State
from weft.alltoall.received import Received
from weft.arguments import instance
from weft.errors import InvalidArgument, OutOfOrder
from weft.grouping.entry import GroupArgs, Grouping, load_entries
from weft.grouping.sending import check_addresses, check_scatters, check_sends
from weft.memory.driver import plain_tensors, relaxed
from weft.runtime.check import check_alignment, check_tensor
from weft.runtime.kernels import Build, Kernels
from weft.runtime.operator import one_call
from weft.runtime.stream import synchronize_stream


class Buffers(NamedTuple):
    """Everything that one grouping allocates; sizes in grouping/layout.cuh."""

    rows: tuple[torch.Tensor, ...]
    slot: torch.Tensor
    weight: torch.Tensor
    offsets: torch.Tensor
    counts: torch.Tensor
    position: torch.Tensor
    within: torch.Tensor
    before: torch.Tensor
    arrived: torch.Tensor
    dst_addr: torch.Tensor

    @classmethod
    def make(
        cls,
        geometry: AllToAllConfig,
        grouping: Grouping,
        device: torch.device,
        *,
        on_gpu: bool,
        own_rows: bool = True,
    ) -> Buffers:
        """Zeroed, so that a masked GEMM meets finite numbers in rows that nobody has written.

        own_rows: are there buffers of payload rows? Without, each gather brings its own.
        """
        shape, total = geometry.shape, grouping.total
        entries = (shape.ranks, shape.tokens, shape.top_k)

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            rows=tuple(
                zeros(total * size, dtype=torch.uint8).view(p.dtype).view(total, *p.shape)
                for p, size in zip(geometry.payloads, shape.row_bytes, strict=True)
                if own_rows
            ),
            slot=zeros(total),
            weight=zeros(total, dtype=torch.float32),
            offsets=zeros(grouping.groups + 1),
            counts=zeros(grouping.groups),
            position=zeros(*entries),
            # Only the GPU's two passes keep what they have counted.
            within=zeros(*(entries if on_gpu else (0,))),
            before=zeros(grouping.tiles(shape) if on_gpu else 0, grouping.groups),
            arrived=zeros(1),
            dst_addr=zeros(total if shape.combine == "gemm_push" else 0, dtype=torch.int64),
        )

    def bytes(self) -> int:
        """Bytes of all of them."""
        tensors = (*self.rows, *self[1:])
        return sum(t.numel() * t.element_size() for t in tensors)


class GroupRounds:
    """One grouping of one all-to-all: its buffers, its kernels, and the order of calls.

    own_rows: as in Buffers.make.
    """

    def __init__(
        self, a2a: AllToAll, grouping: Grouping, programmatic: bool, *, own_rows: bool = True
    ) -> None:
        a2a._check_running()
        shape, device = a2a.config.shape, a2a.group.device
        self._a2a, self.grouping = a2a, grouping
        self._operator = a2a
        self._gathered = 0  # the round whose rows are grouped
        sends = shape.combine != "pull" and a2a._build.split_phase
        build = Build(programmatic=programmatic, defines=a2a._build.defines)
        self._entries: Kernels | None = load_entries(device, shape, grouping, build, sends=sends)
        on_gpu = device.type == "cuda"
        with relaxed(device), plain_tensors():
            b = Buffers.make(a2a.config, grouping, device, on_gpu=on_gpu, own_rows=own_rows)
            synchronize_stream(device)
        self.buffers = b
        self._args = GroupArgs(site=a2a._site, row_limit=grouping.total)
        for plane, rows in enumerate(b.rows):
            self._args.rows[plane] = rows.data_ptr()
        for name in b._fields[1:]:
            setattr(self._args, name, getattr(b, name).data_ptr())

    @one_call("gather")
    def gather(self, received: Received, into: Sequence[torch.Tensor] = ()) -> None:
        """Group what the round's dispatch brought.

        into: where there are no buffers of rows: for each payload, contiguous `[rows, *row]` on
            the device, all of as many rows; what does not fit is dropped and refused.
        """
        entries = self._running("gather")
        instance("received", received, Received, "pass what dispatch of this all-to-all returned")
        ours, theirs = self._a2a._received.ids.data_ptr(), received.ids.data_ptr()
        if ours != theirs:
            raise InvalidArgument(
                f"received has its ids at {theirs:#x}, this all-to-all at {ours:#x}: "
                "pass what its own dispatch returned, not a copy"
            )
        self._args.source_rows = self._a2a._rows
        if not self.buffers.rows:
            for plane, rows in enumerate(into):
                self._args.rows[plane] = rows.data_ptr()
            self._args.row_limit = min(len(into[0]), self.grouping.total)
        entries.run("gather", self._args, 0)
        self._gathered = self._a2a._round

    @one_call("scatter")
    def scatter(self, y: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Sum y, of `shape`, into the output rows of the tokens that were gathered."""
        entries = self._running("scatter")
        check_scatters(self._a2a)
        self._take(y, shape, "scatter")
        entries.run("scatter", self._args, 0)
        self._gathered = 0

    @one_call("send")
    def send(self, y: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Bring the sums of y, of `shape`, to the inboxes of the tokens' owners."""
        entries = self._open("send")
        check_sends(self._a2a)
        self._a2a._expect(State.RECEIVED, "send")
        self._take(y, shape, "send")
        entries.run("send", self._args, 0)
        self._a2a._sent()
        self._gathered = 0

    def sent(self) -> None:
        """Publish to the peers that the last gather's rows are stored at their owners."""
        self._running("sent")
        check_sends(self._a2a)
        check_addresses(self._a2a)
        self._check_gathered("sent")
        self._a2a.combine_send()
        self._gathered = 0

    def close(self) -> None:
        """Unload the kernels, once they have run, and let go of the buffers."""
        if self._entries is None:
            return
        entries, self._entries = self._entries, None
        try:
            entries.close()
        finally:
            del self.buffers

    def _take(self, y: torch.Tensor, shape: tuple[int, ...], doing: str) -> None:
        """Check one result for each row of this round's gather, and where it is."""
        self._check_gathered(doing)
        a2a = self._a2a
        check_tensor("y", y, shape=shape, dtypes=(a2a.dtype,), device=a2a.group.device)
        check_alignment("y", y, a2a.config.shape.out_bytes)
        self._args.y = y.data_ptr()

    def _check_gathered(self, doing: str) -> None:
        if self._gathered != self._a2a._round:
            raise OutOfOrder(f"{doing} without a gather: gather what this round's dispatch brought")

    def _open(self, doing: str) -> Kernels:
        if self._entries is None:
            raise OutOfOrder(f"{doing} after close: make a new one")
        self._a2a._check_running()
        return self._entries

    def _running(self, doing: str) -> Kernels:
        entries = self._open(doing)
        if self._a2a._state is not State.RECEIVED:
            raise OutOfOrder(f"{doing} outside of a round: call it after dispatch, before combine")
        return entries


def buffer_bytes(geometry: AllToAllConfig, grouping: Grouping, device: torch.device) -> int:
    """Bytes that this grouping allocates on a rank's device."""
    on_gpu = device.type == "cuda"
    return Buffers.make(geometry, grouping, torch.device("meta"), on_gpu=on_gpu).bytes()
