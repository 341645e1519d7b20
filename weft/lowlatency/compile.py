# SPDX-License-Identifier: Apache-2.0
"""LowLatencyAllToAll's dispatch and combine as torch custom ops (runtime/library.py).

In a compiled graph the kernel writes the result to new tensors instead of a result buffer, so that
nothing is copied and the compiler knows their last use. The buffer keeps only the data that combine
needs. The graph cannot know which buffer that is, so a traced handle is the index of the result
among those that graphs keep alive, which is the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from weft.errors import InvalidArgument, OutOfOrder
from weft.lowlatency.config import LowLatencyConfig
from weft.lowlatency.results import ExpertRows, Handle
from weft.runtime.check import allow_fake_tensors, check_tensor, check_topk
from weft.runtime.library import TracedOperator, detach, lookup

FiveTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class TracedHandles:
    """Handles of the results that compiled graphs keep alive.

    Attributes:
        in_use: Whether each number is in use, while tracing. Dynamo writes attributes after the
            graph has run.
        handles: Handle of the dispatch of each number, while running.
    """

    def __init__(self, slots: int) -> None:
        self.in_use = (False,) * slots
        self.handles: dict[int, Handle] = {}

    def acquire(self) -> int:
        """Return a free number for a traced dispatch: -1, -2, ... Raises OutOfOrder."""
        for index, in_use in enumerate(self.in_use):
            if not in_use:
                self._set(index, True)
                return -1 - index
        raise OutOfOrder(
            f"dispatch while {len(self.in_use)} results of compiled graphs are alive: combine one "
            "first"
        )

    def release(self, number: int) -> None:
        """Free the number of a traced dispatch that has been combined."""
        self._set(-1 - number, False)

    def _set(self, index: int, in_use: bool) -> None:
        self.in_use = (*self.in_use[:index], in_use, *self.in_use[index + 1 :])


class TraceableLowLatency(TracedOperator, Protocol):
    """The attributes and methods of a LowLatencyAllToAll that the custom ops use."""

    @property
    def config(self) -> LowLatencyConfig: ...

    @property
    def num_local_experts(self) -> int: ...

    @property
    def traced_handles(self) -> TracedHandles: ...

    def run_dispatch(
        self,
        entry: str,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        results: Mapping[str, torch.Tensor] | None = None,
        /,
    ) -> ExpertRows: ...

    def run_combine(
        self,
        entry: str,
        y: torch.Tensor | None,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        handle: Handle,
        out: torch.Tensor | None,
        add: torch.Tensor | None,
        counts: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor: ...

    def find_handle(self, number: int) -> Handle | None: ...
    def drop_handle(self, handle: Handle) -> None: ...


def is_traced(handle: object) -> bool:
    """Whether a handle belongs to a traced dispatch."""
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
    owner: TraceableLowLatency = lookup(handle)
    handles = owner.traced_handles.handles
    if number in handles:  # an earlier run of the graph raised, and its handle is lost
        owner.drop_handle(handles.pop(number))
    results = _allocate_results(owner)
    rows = owner.run_dispatch("dispatch", x, topk_ids, topk_weights, results)
    handles[number] = rows.handle
    return _get_public_tensors(owner, results)


@_dispatch.register_fake
def _(*args: Any) -> FiveTensors:
    x, topk_ids, topk_weights, _, _, handle = args
    owner: TraceableLowLatency = lookup(handle)
    with allow_fake_tensors():
        owner.config.check_dispatch(x, topk_ids, topk_weights, owner.group.device)
    return _get_public_tensors(owner, _allocate_results(owner))


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
    owner: TraceableLowLatency = lookup(handle)
    handles = owner.traced_handles.handles
    live_handle = handles.get(number) if number < 0 else owner.find_handle(number)
    if live_handle is None:
        raise OutOfOrder(
            f"combine of dispatch {number}, which is not alive (below 0: of a compiled graph); "
            "each dispatch is combined once, by the all-to-all that created it"
        )
    owner.run_combine("combine", y, topk_ids, topk_weights, live_handle, out, add, counts)
    handles.pop(number, None)


@_combine.register_fake
def _(*args: Any) -> None:
    y, topk_ids, topk_weights, out, add, _, _, _, handle = args
    owner: TraceableLowLatency = lookup(handle)
    config, device = owner.config, owner.group.device
    dtypes, shape = (owner.dtype,), config.shape
    with allow_fake_tensors():
        tokens = check_topk(topk_ids, topk_weights, shape.top_k, device)
    for name, tensor in (("out", out), ("add", add)):
        if tensor is not None:
            size = (tokens, shape.hidden)
            check_tensor(name, tensor, shape=size, dtypes=dtypes, device=device)
    if y is not None:
        rows = (owner.num_local_experts, shape.rows, shape.hidden)
        check_tensor("y", y, shape=rows, dtypes=dtypes, device=device)


def dispatch(
    owner: TraceableLowLatency,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
) -> ExpertRows:
    """Dispatch inside a compiled graph."""
    if owner.config.shape.gemm_push:
        raise InvalidArgument(
            "dispatch under torch.compile with combine='gemm_push': the compiler does not know "
            "that rows are stored at their owners; use combine='push', or weft.MoE with "
            "overlap='gemm_push', which is one operator in the graph"
        )
    number = owner.traced_handles.acquire()
    rows, scales, counts, source, ranges = torch.ops.weft.lowlatency_dispatch(
        x.detach(), topk_ids, detach(topk_weights), number, owner.order_tensor, owner.library_handle
    )
    handle = Handle(number, -1 - number, topk_ids.shape[0], counts)
    public_scales = scales if owner.config.shape.group else None
    return ExpertRows(rows, public_scales, counts, source, ranges, handle)


def combine(
    owner: TraceableLowLatency,
    y: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    handle: Handle,
    out: torch.Tensor | None,
    add: torch.Tensor | None,
) -> torch.Tensor:
    """Combine inside a compiled graph, or with a handle of a traced dispatch."""
    if out is None:
        size = (topk_ids.shape[0], owner.config.shape.hidden)
        out = torch.empty(size, dtype=owner.dtype, device=owner.order_tensor.device)
    torch.ops.weft.lowlatency_combine(
        detach(y),
        topk_ids,
        detach(topk_weights),
        out,
        detach(add),
        handle.counts,
        handle.number,
        owner.order_tensor,
        owner.library_handle,
    )
    if handle.number < 0:
        owner.traced_handles.release(handle.number)
    return out


def _allocate_results(owner: TraceableLowLatency) -> dict[str, torch.Tensor]:
    """Allocate the tensors of a dispatch's result, by name."""
    shapes = owner.config.get_result_shapes(owner.num_local_experts)
    device = owner.order_tensor.device
    return {
        name: torch.empty(shapes[name][0], dtype=shapes[name][1], device=device)
        for name in ("x", "scales", "counts", "source", "ranges")
    }


def _get_public_tensors(
    owner: TraceableLowLatency, results: dict[str, torch.Tensor]
) -> FiveTensors:
    """Return the tensors of a result in the public layout; scales are empty if there are none."""
    scales = owner.config.view_scales(results["scales"])
    metadata = (results["counts"], results["source"], results["ranges"])
    return (results["x"], results["scales"] if scales is None else scales, *metadata)
