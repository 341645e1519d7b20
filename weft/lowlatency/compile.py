# SPDX-License-Identifier: Apache-2.0
"""LowLatencyAllToAll in compiled graphs: its operators of torch.library (runtime/library.py).

In a graph what a dispatch brings is in tensors of its own, which the kernel writes: nothing is
copied, and a compiler sees when it is read for the last time. What only combine needs stays in the
slot. Which slot that is, a graph cannot know: a traced handle says which of the results that graphs
keep alive it is, a number that is the same in every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weft.errors import InvalidArgument, OutOfOrder
from weft.lowlatency.results import ExpertRows, Handle
from weft.runtime.check import check_choices, check_tensor, tracing
from weft.runtime.library import find, plain

if TYPE_CHECKING:
    from weft.lowlatency.operator import LowLatencyAllToAll


FiveTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class TracedHandles:
    """The results that graphs keep alive.

    taken: while tracing, by number; written when a graph has run, as any attribute is.
    alive: while running, the dispatch of each number.
    """

    def __init__(self, slots: int) -> None:
        self.taken = (False,) * slots
        self.alive: dict[int, Handle] = {}

    def take(self) -> int:
        """The number of a traced dispatch: -1 for the first that is free. Raises OutOfOrder."""
        for place, taken in enumerate(self.taken):
            if not taken:
                self._note(place, True)
                return -1 - place
        raise OutOfOrder(
            f"dispatch while {len(self.taken)} results of compiled graphs are alive: combine one "
            "first"
        )

    def release(self, number: int) -> None:
        """The traced dispatch of this number is combined."""
        self._note(-1 - number, False)

    def _note(self, place: int, taken: bool) -> None:
        self.taken = (*self.taken[:place], taken, *self.taken[place + 1 :])


def is_of_graph(handle: object) -> bool:
    """Is this the handle of a traced dispatch?"""
    return isinstance(handle, Handle) and handle.number < 0


@torch.library.custom_op("weft::lowlatency_dispatch", mutates_args=("order",))
def _dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    number: int,
    order: torch.Tensor,
    handle: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    owner: LowLatencyAllToAll = find(handle)
    alive = owner._traced_handles.alive
    if number in alive:  # an earlier run of the graph raised: nobody has that handle any more
        owner._drop(alive.pop(number))
    results = _results(owner)
    rows = owner._dispatch("dispatch", x, topk_ids, topk_weights, results)
    alive[number] = rows.handle
    return _shown(owner, results)


@_dispatch.register_fake
def _(*given: Any) -> FiveTensors:
    x, topk_ids, topk_weights, _, _, handle = given
    owner: LowLatencyAllToAll = find(handle)
    with tracing():
        owner.config.check_dispatch(x, topk_ids, topk_weights, owner.group.device)
    return _shown(owner, _results(owner))


@torch.library.custom_op("weft::lowlatency_combine", mutates_args=("out", "order"))
def _combine(
    y: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    out: torch.Tensor,
    add: torch.Tensor | None,
    counts: torch.Tensor | None,
    number: int,
    order: torch.Tensor,
    handle: int,
) -> None:
    owner: LowLatencyAllToAll = find(handle)
    alive = owner._traced_handles.alive
    real = alive.get(number) if number < 0 else owner._handle_of(number)
    if real is None:
        raise OutOfOrder(
            f"combine of dispatch {number}, which is not alive (below 0: of a compiled graph); "
            "each dispatch is combined once, by the all-to-all that made it"
        )
    owner._combine("combine", y, topk_ids, topk_weights, real, out, add, counts)
    alive.pop(number, None)


@_combine.register_fake
def _(*given: Any) -> None:
    y, topk_ids, topk_weights, out, add, _, _, _, handle = given
    owner: LowLatencyAllToAll = find(handle)
    config, device = owner.config, owner.group.device
    dtypes, shape = (owner.dtype,), config.shape
    with tracing():
        tokens = check_choices(topk_ids, topk_weights, shape.top_k, device)
    for name, tensor in (("out", out), ("add", add)):
        if tensor is not None:
            size = (tokens, shape.hidden)
            check_tensor(name, tensor, shape=size, dtypes=dtypes, device=device)
    if y is not None:
        rows = (owner.num_local_experts, shape.rows, shape.hidden)
        check_tensor("y", y, shape=rows, dtypes=dtypes, device=device)


def dispatch(
    owner: LowLatencyAllToAll,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
) -> ExpertRows:
    """Dispatch inside a compiled graph."""
    if owner.config.shape.gemm_push:
        raise InvalidArgument(
            "dispatch under torch.compile with combine='gemm_push': what stores rows at their "
            "owners is outside of what a compiler sees; use combine='push', or weft.MoE with "
            "overlap='gemm_push', which is one operation to it"
        )
    number = owner._traced_handles.take()
    names = (number, owner._order, owner._handle)
    rows, scales, counts, source, ranges = torch.ops.weft.lowlatency_dispatch(
        x.detach(), topk_ids, plain(topk_weights), *names
    )
    handle = Handle(number, -1 - number, topk_ids.shape[0], counts)
    shown = scales if owner.config.shape.group else None
    return ExpertRows(rows, shown, counts, source, ranges, handle)


def combine(
    owner: LowLatencyAllToAll,
    y: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    handle: Handle,
    out: torch.Tensor | None,
    add: torch.Tensor | None,
) -> torch.Tensor:
    """Combine inside a compiled graph, or of what one has dispatched."""
    if out is None:
        size = (topk_ids.shape[0], owner.config.shape.hidden)
        out = torch.empty(size, dtype=owner.dtype, device=owner._order.device)
    given = (plain(y), topk_ids, plain(topk_weights), out, plain(add))
    names = (handle.number, owner._order, owner._handle)
    torch.ops.weft.lowlatency_combine(*given, handle.counts, *names)
    if handle.number < 0:
        owner._traced_handles.release(handle.number)
    return out


def _results(owner: LowLatencyAllToAll) -> dict[str, torch.Tensor]:
    """New memory for what a dispatch brings, by the names that a slot has for it."""
    shapes = owner.config.result_shapes(owner.num_local_experts)
    device = owner._order.device
    return {
        name: torch.empty(shapes[name][0], dtype=shapes[name][1], device=device)
        for name in ("x", "scales", "counts", "source", "ranges")
    }


def _shown(owner: LowLatencyAllToAll, results: dict[str, torch.Tensor]) -> FiveTensors:
    """As callers see it; scales that there are not are empty."""
    scales = owner.config.shown_scales(results["scales"])
    metadata = (results["counts"], results["source"], results["ranges"])
    return (results["x"], results["scales"] if scales is None else scales, *metadata)
