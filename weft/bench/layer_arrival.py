"""When do rows reach their owners that a product stores there? Watched while it runs.

Beside the product another kernel of the same GPU reads two places at peers over NVLink until they
change: the first row that goes to a peer, and the last. All stamps are of one GPU's clock. A change
is seen after it happened, and the product's end is stamped by a kernel behind it: so the first row
is there no later than it is said to be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.errors import InvalidArgument

if TYPE_CHECKING:
    from weft.bench.layer_overlap import SecondHalf

ROUNDS = 11
AHEAD = 2_000_000  # cycles, about 1 ms: the host enqueues a round before the device begins it
LIMIT_NS = 20_000_000
# The product's time, and when peers saw the first and the last of the rows that it stores there.
STORED, FIRST, LAST = "storing product", "first row at a peer", "last row"
Samples = dict[str, list[float]]


def watch_rows(half: SecondHalf) -> Samples:
    """us of ROUNDS rounds of this rank: STORED, FIRST and LAST, from the product's start on.

    Nothing where some rank has no row for a peer. Collective. Raises InvalidArgument when a row
    that was watched did not come.
    """
    from weft.bench.watching import stamp, watch  # needs Triton

    device, group = half.group.device, half.group
    half.before()
    half.together()
    half.after()
    places = watched_places(half)
    if not all(group.all_gather(places is not None)):
        return {}
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stamps = torch.zeros((ROUNDS + 1, 4), dtype=torch.int64, device=device)
    # Compiled and loaded before anything depends on it; alignments are part of what is compiled.
    watch[(2,)](places, stamps[0, 2:], 0)
    stamp[(1,)](stamps[0])
    stamp[(1,)](stamps[0, 1:])
    torch.cuda.synchronize()
    group.barrier()
    for row in stamps:
        torch.cuda._sleep(AHEAD)  # type: ignore[no-untyped-call]
        _blank(half)
        half.before()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            watch[(2,)](places, row[2:], LIMIT_NS)
        stamp[(1,)](row)
        half.mlp.push(half.weights)
        stamp[(1,)](row[1:])
        half.groups.sent()
        half.after()
        torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    half.a2a.check()
    return samples_of(stamps[1:].tolist())


def samples_of(stamps: list[list[int]]) -> Samples:
    """us by name from `(start, end, first, last)` in ns; 0 is a missing one: InvalidArgument."""
    if not all(all(row) for row in stamps):
        raise InvalidArgument(
            f"a row that was watched did not come within {LIMIT_NS / 1e6:g} ms of its round"
        )
    found: Samples = {STORED: [], FIRST: [], LAST: []}
    for start, *others in stamps:
        for name, at in zip(found, others, strict=True):
            found[name].append((at - start) / 1e3)
    return found


def watched_places(half: SecondHalf) -> torch.Tensor | None:
    """int64 `[2]`: the first word of the first row that goes to a peer, the last word of the last.

    Tiles go through experts and columns in order: these are of an early and of a late one. None
    where this rank has no row for a peer.
    """
    grouped = half.grouped
    assert grouped is not None
    assert grouped.home is not None
    owners = torch.div(grouped.slot, half.a2a.max_tokens, rounding_mode="floor")
    away = ((grouped.slot >= 0) & (owners != half.group.rank)).nonzero().flatten()
    if not len(away):
        return None
    row_bytes = half.hidden * half.a2a.dtype.itemsize
    ends = torch.tensor([0, row_bytes - 4], device=away.device)
    return grouped.home[away[[0, -1]]] + ends


def _blank(half: SecondHalf) -> None:
    """0xFF, which no product stores, where peers push rows behind this rank's next dispatch."""
    shape, offset = half.a2a._geometry.shape, half.a2a._geometry.layout.returned
    size = (shape.returned_rows * shape.returned_bytes,)
    half.a2a._workspace.heap.tensor(size, torch.uint8, offset=offset).fill_(0xFF)
