"""CollectiveAllToAll: the same interface on torch.distributed, for groups that span nodes.

Dispatch is an all-gather of everything, combine a reduce-scatter: every rank receives every token,
so it moves ep_size / destinations times the bytes of the one-sided way. It is the baseline, and the
bridge beyond one node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from weft.alltoall.config import AllToAllConfig, Payload
from weft.alltoall.received import Received
from weft.errors import BadExpertId, OutOfOrder
from weft.memory import Group
from weft.memory.collective import all_gather, reduce_scatter
from weft.memory.driver import in_relaxed_mode
from weft.placement import Placed
from weft.runtime.check import check_alignment, check_group, check_tensor, tensors_of


class CollectiveAllToAll(Placed):
    """Dispatch and combine on all-gather and reduce-scatter (gloo on CPUs, NCCL on GPUs).

    Arguments, results and errors are those of `weft.AllToAll`, with these differences: buffers are
    allocated at construction in ordinary memory; sums are in fp32 but in the order of the
    collective, so bits may differ from the one-sided way; bad ids count as -1 and are raised by
    `check()` as a number, not one by one; timeouts are those of torch.distributed; there are no
    FP8 wires, halves, statistics, timelines or SM budgets, and views have max_tokens rows.
    """

    @in_relaxed_mode
    def __init__(
        self,
        group: Group,
        *,
        max_tokens: int,
        top_k: int,
        num_experts: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        payloads: Sequence[Payload] | None = None,
        expert_map: Sequence[int] | torch.Tensor | None = None,
    ) -> None:
        check_group(group)
        self.group = group

        def geometry() -> AllToAllConfig:
            return AllToAllConfig.of(
                ranks=group.size,
                max_tokens=max_tokens,
                top_k=top_k,
                num_experts=num_experts,
                hidden=hidden,
                dtype=dtype,
                payloads=payloads,
                expert_map=expert_map,
            )

        doing = "preparing a collective all-to-all"
        self._geometry = group.together(geometry, doing=doing)
        shape, self.dtype = self._geometry.shape, self._geometry.dtype
        self.max_tokens, self.top_k, self.hidden = shape.tokens, shape.top_k, shape.hidden
        self.num_experts = shape.experts
        self.payloads, self.placement = self._geometry.payloads, self._geometry.placement
        group.agree(self._geometry.manifest(), what="all-to-all geometry")
        self._process_group = group.process_group()
        self._pending: int | None = None
        self._closed = False
        self._allocate()

    def _allocate(self) -> None:
        ep, tokens, device = self.group.size, self.max_tokens, self.group.device
        # The last entry answers for id -1: owned by nobody.
        owners = (*self.placement.ranks, -1)
        self._owner = torch.tensor(owners, dtype=torch.int64, device=device)
        self._local = torch.tensor((*self.placement.local, -1), dtype=torch.int32, device=device)
        self._staged = [
            torch.zeros((tokens, p.row_bytes), dtype=torch.uint8, device=device)
            for p in self.payloads
        ]
        self._gathered = [
            torch.zeros((ep, tokens, p.row_bytes), dtype=torch.uint8, device=device)
            for p in self.payloads
        ]
        self._ids = torch.full((tokens, self.top_k), -1, dtype=torch.int64, device=device)
        self._weights = torch.zeros((tokens, self.top_k), dtype=torch.float32, device=device)
        self._count = torch.zeros(1, dtype=torch.int32, device=device)
        self._all_ids = torch.empty((ep, *self._ids.shape), dtype=torch.int64, device=device)
        size = (ep, *self._weights.shape)
        self._all_weights = torch.empty(size, dtype=torch.float32, device=device)
        self._counts = torch.zeros(ep, dtype=torch.int32, device=device)
        self._output = torch.zeros((ep, tokens, self.hidden), dtype=self.dtype, device=device)
        self._bad = torch.zeros((), dtype=torch.int64, device=device)
        self._received: Received | None = None

    def dispatch(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        num_tokens: torch.Tensor | None = None,
    ) -> Received:
        """See `weft.AllToAll.dispatch`."""
        self._check_open()
        if self._pending is not None:
            raise OutOfOrder(f"dispatch while {self._pending} tokens are away: call combine first")
        tensors = tensors_of("x", x)
        tokens = self._geometry.check_dispatch(
            tensors, topk_ids, topk_weights, num_tokens, None, self.group.device
        )
        for staged, tensor, payload in zip(self._staged, tensors, self.payloads, strict=True):
            staged[:tokens] = tensor.reshape(tokens, math.prod(payload.shape)).view(torch.uint8)
        known = (topk_ids >= 0) & (topk_ids < self.num_experts)
        self._bad += ((topk_ids != -1) & ~known).sum()
        self._ids.fill_(-1)
        self._ids[:tokens] = torch.where(known, topk_ids.long(), -1)
        self._weights[:tokens] = 1.0 if topk_weights is None else topk_weights
        self._count.fill_(tokens)
        if num_tokens is not None:
            self._count.copy_(num_tokens.clamp(0, tokens))
            rows = torch.arange(self.max_tokens, dtype=torch.int64, device=self.group.device)
            self._ids.masked_fill_((rows >= self._count)[:, None], -1)
        self._gather()
        self._pending = tokens
        self._received = self._view()
        return self._received

    def _gather(self) -> None:
        pairs = [
            *zip(self._gathered, self._staged, strict=True),
            (self._all_ids, self._ids),
            (self._all_weights, self._weights),
            (self._counts, self._count),
        ]
        for whole, part in pairs:
            all_gather(whole.view(-1, *part.shape[1:]), part, group=self._process_group)

    def _view(self) -> Received:
        here = self._owner[self._all_ids] == self.rank
        ids = torch.where(here, self._local[self._all_ids], -1).int()
        planes = tuple(
            g.view(self.ep_size * self.max_tokens, -1)
            .view(p.dtype)
            .view(self.ep_size, self.max_tokens, *p.shape)
            for g, p in zip(self._gathered, self.payloads, strict=True)
        )
        return Received(planes, ids, torch.where(here, self._all_weights, 0.0), self._counts)

    def output(self) -> torch.Tensor:
        """See `weft.AllToAll.output`."""
        self._check_open()
        return self._output

    def combine(
        self,
        y: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `weft.AllToAll.combine`."""
        self._check_open()
        if self._pending is None or self._received is None:
            raise OutOfOrder("combine without a dispatch: no tokens of this rank are away")
        tokens, device = self._pending, self.group.device
        shape = (tokens, self.hidden)
        for name, tensor, want in (("out", out, shape), ("add", add, shape), ("y", y, None)):
            if tensor is not None:
                size = want or self._output.shape
                check_tensor(name, tensor, shape=size, dtypes=(self.dtype,), device=device)
                check_alignment(name, tensor, tensor.itemsize)
        self._pending = None
        carries = (self._received.ids >= 0).any(dim=2, keepdim=True)
        rows = torch.where(carries, (self._output if y is None else y).float(), 0.0)
        mine = torch.empty((self.max_tokens, self.hidden), dtype=torch.float32, device=device)
        reduce_scatter(mine, rows.view(-1, self.hidden), group=self._process_group)
        mine += 0.0  # sums begin from 0: a token of nothing but -0.0 gets 0.0
        total = mine[:tokens] if add is None else mine[:tokens] + add.float()
        result = total.to(self.dtype)
        return result if out is None else out.copy_(result)

    def check(self) -> None:
        """Raise BadExpertId for ids out of range since the last check. Waits for the device."""
        self._check_open()
        bad = int(self._bad)
        if bad:
            self._bad.zero_()
            raise BadExpertId(
                f"rank {self.rank}: {bad} ids were outside 0..{self.num_experts - 1} and not -1; "
                "they were dropped. Fix the router or mask them with -1."
            )

    def close(self) -> None:
        """Give the memory back. Local, idempotent."""
        self._closed, self._received = True, None
        self._staged.clear()
        self._gathered.clear()
        self._output, self._ids, self._all_ids, self._weights, self._all_weights = (
            t.new_empty(0)
            for t in (self._output, self._ids, self._all_ids, self._weights, self._all_weights)
        )

    def _check_open(self) -> None:
        if self._closed:
            raise OutOfOrder("this all-to-all was closed; make a new one")
