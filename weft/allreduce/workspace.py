"""The symmetric memory of a fused all-reduce: its slots, filled with sentinels, and its header."""

from __future__ import annotations

import torch

from weft.allreduce.reduction import Reduction
from weft.memory import Group, Heap
from weft.memory.header import HEADER_BYTES, Header
from weft.runtime.watched import Watched, new_header


class ReduceWorkspace(Watched):
    """One heap laid out for one all-reduce.

    Creation is collective and a vote; every rank leaves it with all ranks' slots empty.
    """

    def __init__(
        self,
        group: Group,
        reduction: Reduction,
        *,
        seconds: tuple[float, float],
        first_epoch: int = 0,
    ) -> None:
        header = new_header(group, reduction.share_bytes, seconds=seconds, first_epoch=first_epoch)
        self.heap = Heap.create(group, reduction.share_bytes)
        # A vote: no peer may push into these slots before they are empty.
        group.together(
            lambda: self._initialise(reduction, header), doing="initialising an all-reduce"
        )

    def _initialise(self, reduction: Reduction, header: Header) -> None:
        self._watch(
            0, "all-reduce"
        )  # the sizes were compared in full; call words distinguish calls
        size = (reduction.trailers - reduction.rows,)  # all else stays zero
        self.heap.tensor(size, torch.uint8, offset=reduction.rows).fill_(0xFF)
        header.generation = self.heap.generation
        raw = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self.heap.tensor((HEADER_BYTES,), torch.uint8).copy_(raw)
        if self.heap.group.device.type == "cuda":
            torch.cuda.current_stream(self.heap.group.device).synchronize()
