# SPDX-License-Identifier: Apache-2.0
"""The EPImplementation that `weft.plugins.transformers.register` registers."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation

from weft.allreduce.operator import AllReduce
from weft.alltoall.operator import AllToAll
from weft.errors import InvalidArgument
from weft.group.torch_groups import all_gather
from weft.plugins.transformers.exchange import exchange_of


class ExpertParallel(EPImplementation):  # type: ignore[misc]  # transformers is not type-checked
    """Moves the tokens of one experts module by weft; the module's own forward computes them.

    Ranks that share one batch each run their own experts, and `AllReduce` adds the results. Ranks
    with batches of their own exchange rows by `AllToAll`; in a tensor-parallel replica of several
    ranks, each sends a slice of the batch, and an all-gather joins the results.
    """

    def __init__(
        self,
        experts: nn.Module,
        ep_mesh: DeviceMesh,
        tp_mesh: DeviceMesh,
        *,
        max_tokens: int,
        timeout: float,
    ) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._exchange = exchange_of(ep_mesh, max_tokens, timeout)
        self._first_layer = self._exchange.join()
        self._rank, self._num_experts = (
            ep_mesh.get_local_rank(),
            self.num_local_experts * ep_mesh.size(),
        )
        self._slice, self._slices = tp_mesh.get_local_rank(), tp_mesh.size()

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return each token's weighted sum over its experts on all ranks, `[tokens, hidden]`.

        Args:
            hidden_states: `[tokens, hidden]`.
            top_k_index: Global expert ids, `[tokens, top_k]`.
            top_k_weights: `[tokens, top_k]`.
        """
        if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
            raise InvalidArgument(
                "hidden_states require a gradient, but weft computes none: call the model under "
                'torch.no_grad(), or train it with ep_implementation="all_to_all"'
            )
        inputs = (hidden_states, top_k_index, top_k_weights)
        if torch.compiler.is_dynamo_compiling():
            return self._run(*inputs)
        try:
            out = self._run(*inputs)
            self._exchange.check()
        except BaseException as error:
            self._exchange.leave(error)
            raise
        return out

    def _run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.shares_batch:
            return self._run_and_reduce(x, ids, weights)
        if self._slices == 1:
            return self._run_exchanged(x.contiguous(), ids.contiguous(), weights)
        size = -(-len(x) // self._slices)
        part = slice(self._slice * size, (self._slice + 1) * size)
        sums = self._run_exchanged(x[part].contiguous(), ids[part].contiguous(), weights[part])
        padded, joined = x.new_zeros(size, x.shape[1]), x.new_empty(size * self._slices, x.shape[1])
        padded[: len(sums)] = sums
        all_gather(joined, padded, group=self.tp_mesh.get_group())
        return joined[: len(x)]

    def _run_and_reduce(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Run a batch that all ranks share: each rank runs its own experts, then all-reduce."""
        reduce = self._exchange.operator(AllReduce, hidden=x.shape[1], dtype=x.dtype)
        local = ids - self._rank * self.num_local_experts
        local = local.masked_fill((local < 0) | (local >= self.num_local_experts), -1)
        sums = self._sums(x, local, weights)
        for start in range(0, len(sums), reduce.max_tokens):
            part = sums[start : start + reduce.max_tokens]
            reduce.fused(part, out=part)
        return sums

    def _run_exchanged(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Run this rank's own batch by all-to-all, in as many rounds as the largest batch needs."""
        exchange, (tokens, hidden) = self._exchange, x.shape
        if self._first_layer:
            exchange.agree(tokens)
        if tokens > exchange.most:
            raise InvalidArgument(
                f"this layer got {tokens} rows, but the model's first MoE layer had at most "
                f"{exchange.most} on any rank: no layer of a forward pass may have more rows"
            )
        out, sent_weights = torch.empty_like(x), weights.float().contiguous()
        if exchange.most == 0:
            return out
        a2a = exchange.operator(
            AllToAll,
            top_k=ids.shape[1],
            num_experts=self._num_experts,
            hidden=hidden,
            dtype=x.dtype,
        )
        for start in range(0, exchange.most, a2a.max_tokens):
            rows = min(exchange.most - start, a2a.max_tokens)  # the same on all ranks
            part = slice(start, start + rows)
            received = a2a.dispatch(x[part], ids[part], sent_weights[part], rows=rows)
            tensors = (received.x, received.ids, received.weights)
            slots, local, scale = (each.flatten(0, 1) for each in tensors)
            sums = self._sums(slots, local, scale.to(weights.dtype))
            a2a.combine(sums.view(-1, rows, hidden), out=out[part])
        return out

    def _sums(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's weighted sums `[rows, hidden]`, computed by the module's own forward.

        `ids` `[rows, top_k]` are local, -1 for none. Rows without any id may contain anything.
        """
        if x.is_cuda or torch.compiler.is_dynamo_compiling():
            # The host does not know which ids are -1, so every row is passed. The module skips an
            # id past its last expert; the id's weight must be 0.
            unused = ids < 0
            local = ids.masked_fill(unused, self.num_local_experts).long()
            sums: torch.Tensor = self.experts_forward(x, local, weights.masked_fill(unused, 0.0))
            return sums.contiguous()
        # One row per choice, so that no rows are gathered or gated for experts of other ranks.
        row, choice = (ids >= 0).nonzero(as_tuple=True)
        sums = x.new_zeros(x.shape, dtype=torch.float32)
        if len(row):
            local, scale = ids[row, choice, None].long(), weights[row, choice, None]
            sums.index_add_(0, row, self.experts_forward(x[row], local, scale).float())
        return sums.to(x.dtype)
