"""What runs beside what in a layer, and in which streams.

"none": one thing after the other. The others give the shared expert a stream of its own, from
before dispatch until combine needs its result. "columns" also sends the last columns of the second
product, in a third stream, while the next are multiplied; "signals" does so with one product and
one send, which waits on the device for each block of columns; with "push" the product itself stores
every row at its owner, who sums them. All give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from weft.arguments import one_of
from weft.errors import InvalidArgument
from weft.moe.experts import ExpertWeights
from weft.moe.mlp import Mlp
from weft.moe.products import Columns
from weft.ops.grouping import ExpertGroups

EXCHANGES = ("rank", "expert")
OVERLAPS = ("none", "shared", "columns", "signals", "push")
# How rows come home by default. Sums that their makers send take one kernel less than sums that
# their owners fetch: a round on 4 x H200 without the products takes 25 us against 31 at 16 tokens,
# 169 against 201 at 512 (2026-11-21).
HOME = dict.fromkeys(OVERLAPS, "push") | {"push": "choices"}
PARTS = 4  # of the second product's columns
COLUMNS, WIDE_COLUMNS = 128, 256  # of a tile; parts are multiples of it
FEWEST_SMS, MOST_SMS = 4, 32  # for sends beside a product
# What an SM sends while a product runs beside it: about 10 GB/s (16 of them, 4 x H200, 2026-11-21)
# in the 120 us of a down projection of DeepSeek-V3.
SENT_BY_AN_SM = 1.2e6


class Beside:
    """A stream beside the caller's; on CPU ranks there is one stream only, and this is it.

    priority: as of torch.cuda.Stream: lower goes first.

    Memory that is allocated within and used by the caller after `join` is not handed out again
    before the caller has used it: all later use of the stream begins behind the caller's.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._device, self._busy = device, False
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
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


def parts_of(hidden: int, parts: int) -> Iterator[Columns]:
    """At most `parts` ranges of columns that cover `hidden`, in whole tiles, but for the last.

    Where wide tiles fit into hidden, a product of many rows has them.
    """
    tile = COLUMNS if hidden % WIDE_COLUMNS else WIDE_COLUMNS
    step = -(-hidden // tile // parts) * tile
    for first in range(0, hidden, step):
        yield first, min(first + step, hidden)


def send_by_columns(
    mlp: Mlp,
    weights: ExpertWeights,
    groups: ExpertGroups,
    beside: Beside,
    *,
    hidden: int,
    parts: int,
    num_sms: int | None,
) -> None:
    """Multiply and send part after part; the last send has all SMs."""
    for columns in parts_of(hidden, parts):
        y = mlp.down(weights, columns)
        last = columns[1] == hidden
        beside.mark()
        with beside.after_mark():
            groups.send(y, columns=columns, num_sms=None if last else num_sms)
    beside.join()


def sms_to_send(tokens: int, ranks: int, row_bytes: int) -> int:
    """SMs that send `tokens` sums of each rank to every rank while a product runs beside them."""
    wanted = -(-tokens * ranks * row_bytes // int(SENT_BY_AN_SM))
    return min(max(wanted, FEWEST_SMS), MOST_SMS)


def send_by_signals(
    mlp: Mlp,
    weights: ExpertWeights,
    groups: ExpertGroups,
    beside: Beside,
    *,
    cells: torch.Tensor,
    num_sms: int | None,
) -> None:
    """One product and one send, which waits for the product's columns, block by block.

    The send begins behind all that came before the product, and the product keeps off its SMs.
    """
    beside.mark()
    y, signal = mlp.down_signalled(weights, cells, num_sms)
    with beside.after_mark():
        groups.send(y, signal=signal, num_sms=num_sms)
    beside.join()


def check_overlap(overlap: str, combine_by: str | None, gemm: str) -> str:
    """How rows come home with this overlap: combine_by as given, or its default.

    Raises InvalidArgument for an overlap that does not exist, and what it excludes.
    """
    one_of("overlap", overlap, OVERLAPS)
    home = combine_by or HOME[overlap]
    if overlap in ("columns", "signals") and home not in ("push", "fp8"):
        raise InvalidArgument(
            f"overlap {overlap!r} sends sums while others are made, combine_by is {home!r}: leave "
            "it out, or pass 'push' or 'fp8'"
        )
    if (overlap == "push") != (home == "choices"):
        raise InvalidArgument(
            f"overlap is {overlap!r}, combine_by {home!r}; 'push' and 'choices' go together: "
            "leave combine_by out"
        )
    if overlap in ("signals", "push") and gemm != "tiled":
        does = (
            "tells what it has made" if overlap == "signals" else "stores its rows at their homes"
        )
        raise InvalidArgument(
            f"overlap {overlap!r} needs a product that {does}, gemm is {gemm!r}: use gemm='tiled'"
        )
    return home
