"""A heap whose kernels report through its mailbox: what broke, what was refused, what was done."""

from __future__ import annotations

from weft.errors import Aborted
from weft.memory import Group, Heap
from weft.memory.header import ABI, EPOCH_MASK, Header, Mailbox, Record
from weft.ops.alarm import Alarm
from weft.ops.args import Site
from weft.ops.report import breakage, refusal


class Watched:
    """One heap, its mailbox and its alarm; `site` says where the shares lie, as kernels take it."""

    heap: Heap
    site: Site
    _seen_refusals = 0
    _drops_repeats = False  # does a dispatch drop ids that an earlier one of their row names?

    def _watch(self, descriptor: int) -> None:
        """Open the mailbox, the alarm and the site of `self.heap`."""
        self._mailbox = Mailbox.from_address(self.heap.mailbox.host)
        self._alarm = Alarm(self.heap)
        self.site = Site(
            base=self.heap.base,
            stride=self.heap.stride,
            mailbox=self.heap.mailbox.device,
            rank=self.heap.group.rank,
            descriptor=descriptor,
        )

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
        record = self._mailbox.refused[serial % len(self._mailbox.refused)]
        raise refusal(record, count, drops_repeats=self._drops_repeats)

    def abort(self) -> None:
        """Ask the kernels of all ranks to leave their waits."""
        self._mailbox.abort = 1
        self._alarm.ring()

    def history(self, rank: int | None) -> list[Record]:
        """Finished operations of a rank, oldest first."""
        header = Header.from_buffer_copy(self.heap.header(rank))
        return sorted((r for r in header.ring if r.phase), key=lambda r: (r.epoch, r.phase))


def new_header(
    group: Group, share_bytes: int, *, seconds: tuple[float, float], first_epoch: int
) -> Header:
    """The header that a share begins with, but for the heap's generation.

    seconds: what a wait may take, and what one of the first round may.
    """
    header = Header()
    header.abi, header.rank, header.ranks = ABI, group.rank, group.size
    header.share_bytes = share_bytes
    header.first_epoch = header.epoch = first_epoch & EPOCH_MASK
    header.deadline_ns, header.first_deadline_ns = (int(s * 1e9) for s in seconds)
    return header
