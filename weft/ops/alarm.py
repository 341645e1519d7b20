"""How one rank asks the whole group to leave its waits."""

from __future__ import annotations

import torch

from weft.memory import Heap
from weft.memory.header import Header


class Alarm:
    """The abort words in the headers of this rank's peers, ready to be written.

    Everything is made here, at construction: what rings while kernels wait must neither allocate
    nor queue behind them. On a GPU the words go out as copies from pinned memory on a stream of
    their own: the copy engines need no SM, and waiting kernels may hold them all.
    """

    def __init__(self, heap: Heap) -> None:
        group = heap.group
        self._asker = torch.tensor([group.rank + 1], dtype=torch.int64, device="cpu")
        self._stream: torch.cuda.Stream | None = None
        if group.device.type == "cuda":
            self._asker = self._asker.pin_memory()
            # The heap's own: a stream of torch's pool may be one that waits, or is being captured.
            self._stream = torch.cuda.ExternalStream(heap.stream, group.device)  # type: ignore[no-untyped-call]
        self._words = [
            heap.tensor((1,), torch.int64, offset=Header.abort.offset, rank=peer)
            for peer in range(group.size)
            if peer != group.rank
        ]

    def ring(self) -> None:
        """Write this rank + 1 into every peer's abort word; returns when all are written."""
        with torch.cuda.stream(self._stream):  # does nothing for None
            for word in self._words:
                word.copy_(self._asker, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
