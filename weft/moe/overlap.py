"""What runs beside what in a layer, and in which streams.

"none": one thing after the other. The others give the shared expert a stream of its own, from
before dispatch until combine needs its result. With "push" the second product also stores every row
at its owner, who sums them. All give the same bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from weft.errors import InvalidArgument

EXCHANGES = ("rank", "expert")
OVERLAPS = ("none", "shared", "push")
# How sums come home, or by expert each row. Sums that their makers send take one kernel less than
# sums that their owners fetch: a round on 4 x H200 without the products takes 25 us against 31 at
# 16 tokens, 169 against 201 at 512 (2026-11-21).
HOMES = ("push", "fp8")


class Beside:
    """A stream beside the caller's; on CPU ranks there is one stream only, and this is it.

    Memory that is allocated within and used by the caller after `join` is not handed out again
    before the caller has used it: all later use of the stream begins behind the caller's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._busy = device, False
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """What is enqueued within `after_mark` comes after all that the caller's stream holds."""
        if self._stream is not None:
            self._mark.record(torch.cuda.current_stream(self._device))

    @property
    def busy(self) -> bool:
        """Has something been enqueued here since the last `join`? Never on CPU ranks."""
        return self._busy

    def after_mark(self) -> AbstractContextManager[object]:
        """Enqueue here what may run beside all that the caller has enqueued since `mark`."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(self._mark)
        self._busy = True
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """The caller's stream goes on after all that was enqueued here since the last `join`.

        Nothing was: then there is nothing to wait for, which a capture would even refuse.
        """
        if self._stream is not None and self._busy:
            self._busy = False
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def check_overlap(overlap: str, combine_by: str | None, gemm: str) -> str:
    """How rows come home with this overlap: combine_by of the exchange.

    Raises InvalidArgument for what an overlap excludes.
    """
    if overlap != "push":
        return combine_by or "push"
    if combine_by is not None:
        raise InvalidArgument(
            f"combine_by is {combine_by!r}, overlap 'push', whose rows the second product stores "
            "at home: leave combine_by out"
        )
    if gemm != "tiled":
        raise InvalidArgument(
            "overlap 'push' needs a product that stores its rows at their homes, gemm is "
            f"{gemm!r}: use gemm='tiled'"
        )
    return "choices"
