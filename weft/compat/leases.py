"""Workspaces that equal all-to-alls of one process share, because their rounds never overlap.

Engines make one all-to-all for each layer and run one layer at a time. All that ask for the same
sizes get the same symmetric memory. Which call makes it and which gives it back follows from the
sequence of calls alone, so it is the same on every rank, as collective creation needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.alltoall.api import AllToAll
from weft.alltoall.received import Payload, Received
from weft.errors import InvalidArgument
from weft.memory import Group
from weft.memory.driver import relaxed
from weft.runtime.check import check_alignment, check_gradient


@dataclass(frozen=True, slots=True)
class Terms:
    """What two callers must have in common to share a workspace."""

    group: Group
    max_tokens: int
    top_k: int
    num_experts: int
    hidden: int
    dtype: torch.dtype
    payloads: tuple[Payload, ...]
    stats: int
    contiguous: bool
    timeout: float
    first_timeout: float

    def sizes(self) -> dict[str, Any]:
        """What the memory of an AllToAll follows from, as it takes it."""
        names = ("max_tokens", "top_k", "num_experts", "hidden", "dtype", "payloads", "stats")
        return {name: getattr(self, name) for name in names}

    def memory_bytes(self) -> int:
        """Bytes of symmetric memory of each rank."""
        return AllToAll.memory_bytes(ranks=self.group.size, **self.sizes())


class SharedWorkspace:
    """An AllToAll, and the ordinary memory that its views need, allocated once."""

    def __init__(self, terms: Terms) -> None:
        self.terms, self.users = terms, 0
        self.a2a = AllToAll(
            terms.group,
            **terms.sizes(),
            timeout=terms.timeout,
            first_timeout=terms.first_timeout,
        )
        try:
            with relaxed(terms.group.device):
                terms.group.together(self._allocate, doing="allocating what packs received rows")
        except Exception:
            self.a2a.close()
            raise

    def _allocate(self) -> None:
        terms, device = self.terms, self.terms.group.device
        slots = (terms.group.size, terms.max_tokens)
        self._unrouted = torch.empty((*slots, terms.top_k), dtype=torch.bool, device=device)
        self._silence = torch.zeros(terms.stats, dtype=torch.int32, device=device)
        rows = (*terms.payloads, Payload((terms.hidden,), terms.dtype)) if terms.contiguous else ()
        self._packed = [
            torch.empty(math.prod((*slots, *row.shape)), dtype=row.dtype, device=device)
            for row in rows
        ]

    def view(self, plane: int, received: torch.Tensor, tokens: int) -> torch.Tensor:
        """`[ep_size, tokens, *row]` of a received plane: in place, or packed if so agreed."""
        rows = received[:, :tokens]
        if not self.terms.contiguous or rows.is_contiguous():
            return rows
        return self._slice(plane, rows.shape).copy_(rows)

    def dispatch(
        self,
        payloads: Sequence[torch.Tensor],
        ids: torch.Tensor,
        stats: torch.Tensor | None,
    ) -> Received:
        """AllToAll.dispatch; zeros stand for statistics that this call does not bring."""
        if stats is None and self.terms.stats:
            stats = self._silence
        return self.a2a.dispatch(payloads, ids, stats=stats)

    def mark_unrouted(self, view: torch.Tensor, ids: torch.Tensor, value: int) -> None:
        """Write `value` into `view` wherever `ids` names no expert of this rank."""
        tokens = view.shape[1]
        unrouted = self._unrouted[:, :tokens]
        torch.lt(ids[:, :tokens], 0, out=unrouted)
        view.masked_fill_(unrouted, value)

    def outbox(self, tokens: int) -> torch.Tensor:
        """`[ep_size, tokens, hidden]` of the outbox, where peers read it."""
        return self.a2a.output()[:, :tokens]

    def results(self, tokens: int) -> torch.Tensor:
        """`[ep_size, tokens, hidden]` for experts to write: the outbox, or a packed stand-in."""
        rows = self.outbox(tokens)
        if not self.terms.contiguous or rows.is_contiguous():
            return rows
        return self._slice(-1, rows.shape)

    def take(self, payload: torch.Tensor, tokens: int, claimed: bool) -> None:
        """Put `payload` `[ep_size, tokens, hidden]` into the outbox, where it is not there already.

        claimed: the caller says that it is what `results` returned.
        Raises InvalidArgument for another shape, dtype or device, and for memory of the workspace
        that is not that tensor.
        """
        if payload.layout is not torch.strided or payload.is_nested:
            raise InvalidArgument("payload is a sparse or nested tensor; pass a dense one")
        check_gradient("payload", payload)
        check_alignment("payload", payload, payload.itemsize)
        outbox, offered = self.outbox(tokens), self.results(tokens)
        device, terms = self.terms.group.device, self.terms
        if (payload.shape, payload.dtype, payload.device) != (outbox.shape, terms.dtype, device):
            raise InvalidArgument(
                f"payload is {list(payload.shape)} {payload.dtype} on {payload.device}; it must be "
                f"{list(outbox.shape)} {terms.dtype} on {device}"
            )
        inside = payload.data_ptr() in (outbox.data_ptr(), offered.data_ptr())
        if (claimed or inside) and not _same(payload, offered):
            raise InvalidArgument(
                f"payload starts at {payload.data_ptr():#x} with strides {payload.stride()} and "
                f"payload_in_workspace={claimed}; the workspace's tensor starts at "
                f"{offered.data_ptr():#x} with strides {offered.stride()}: write into what "
                "get_combine_payload_tensor_in_workspace returned, or pass memory of your own"
            )
        if not _same(payload, outbox):
            outbox.copy_(payload)

    def _slice(self, plane: int, shape: torch.Size) -> torch.Tensor:
        return self._packed[plane][: shape.numel()].view(shape)

    def close(self) -> None:
        """Give the memory back. Local."""
        self.a2a.close()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Do two tensors of one shape show the same memory? Strides of single rows do not matter."""
    steps = zip(one.shape, one.stride(), other.stride(), strict=True)
    return one.data_ptr() == other.data_ptr() and all(n == 1 or a == b for n, a, b in steps)


_shared: dict[Terms, SharedWorkspace] = {}


def lease(terms: Terms) -> SharedWorkspace:
    """The workspace of these terms; collective when it is new. Raises what AllToAll raises."""
    workspace = _shared.get(terms)
    if workspace is None:
        workspace = _shared[terms] = SharedWorkspace(terms)
    workspace.users += 1
    return workspace


def release(workspace: SharedWorkspace) -> None:
    """Give a lease back; the last one frees the memory. Local."""
    workspace.users -= 1
    if not workspace.users:
        del _shared[workspace.terms]
        workspace.close()
