"""What every exchange over symmetric memory has beside its rows: a header, a mailbox, an alarm."""

from __future__ import annotations

import torch

from weft.errors import Aborted
from weft.memory import Group, Heap
from weft.memory.header import ABI, EPOCH_MASK, HEADER_BYTES, Header, Mailbox, Record
from weft.ops.alarm import Alarm
from weft.ops.args import Site
from weft.ops.report import breakage, refusal


class Premises:
    """One heap that begins with a header, and what kernels report by it.

    site: where the shares lie, as kernels take it.

    Creation is collective and a vote; every rank leaves it with all ranks' shares initialised.
    Subclasses furnish the rest of the share in `_furnish`.
    """

    def __init__(
        self,
        group: Group,
        share_bytes: int,
        descriptor: int,
        *,
        seconds: tuple[float, float],
        first_epoch: int = 0,
        doing: str,
    ) -> None:
        header = Header()
        header.abi, header.rank, header.ranks = ABI, group.rank, group.size
        header.share_bytes = share_bytes
        header.first_epoch = header.epoch = first_epoch & EPOCH_MASK
        header.deadline_ns, header.first_deadline_ns = (int(s * 1e9) for s in seconds)
        self.heap = Heap.create(group, share_bytes)
        self._seen_refusals = 0
        # A vote: no peer may write into this share before it is initialised.
        group.together(lambda: self._initialise(header, descriptor), doing=doing)

    def _initialise(self, header: Header, descriptor: int) -> None:
        group = self.heap.group
        self._mailbox = Mailbox.from_address(self.heap.mailbox.host)
        self.site = Site(
            base=self.heap.base,
            stride=self.heap.stride,
            mailbox=self.heap.mailbox.device,
            rank=group.rank,
            descriptor=descriptor,
        )
        self._furnish()
        self._alarm = Alarm(self.heap)
        header.generation = self.heap.generation
        raw = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self.heap.tensor((HEADER_BYTES,), torch.uint8).copy_(raw)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)

    def _furnish(self) -> None:
        """Write what the share holds at first, and make views of it."""
        raise NotImplementedError

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
        del self._mailbox, self._alarm
        self.heap.close()
