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
from weft.plugins.transformers.exchange import get_exchange


class ExpertParallel(EPImplementation):  # type: ignore[misc]  # transformers is not type-checked
    """Expert parallelism of one experts module; the module's own forward computes the experts.

    If all ranks have the same batch, each runs its experts, and `AllReduce` sums the results.
    Otherwise ranks exchange rows with `AllToAll`; in a tensor-parallel replica of several ranks,
    each sends a slice of the batch, and an all-gather concatenates the results.
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
        self._exchange = get_exchange(ep_mesh, max_tokens, timeout)
        self._first_layer = self._exchange.register_layer()
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
            self._exchange.close_with_error(error)
            raise
        return out

    def _run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.shares_batch:
            return self._run_all_reduce(x, ids, weights)
        if self._slices == 1:
            return self._run_all_to_all(x.contiguous(), ids.contiguous(), weights)
        size = -(-len(x) // self._slices)
        chunk = slice(self._slice * size, (self._slice + 1) * size)
        sums = self._run_all_to_all(x[chunk].contiguous(), ids[chunk].contiguous(), weights[chunk])
        padded = x.new_zeros(size, x.shape[1])
        gathered = x.new_empty(size * self._slices, x.shape[1])
        padded[: len(sums)] = sums
        all_gather(gathered, padded, group=self.tp_mesh.get_group())
        return gathered[: len(x)]

    def _run_all_reduce(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Run this rank's experts on a batch that all ranks have, and all-reduce the results."""
        reduce = self._exchange.get_operator(AllReduce, hidden=x.shape[1], dtype=x.dtype)
        local = ids - self._rank * self.num_local_experts
        local = local.masked_fill((local < 0) | (local >= self.num_local_experts), -1)
        sums = self._compute_local_sums(x, local, weights)
        for start in range(0, len(sums), reduce.max_tokens):
            chunk = sums[start : start + reduce.max_tokens]
            reduce.fused(chunk, out=chunk)
        return sums

    def _run_all_to_all(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Run this rank's batch with an all-to-all, in rounds if a rank's batch is large."""
        exchange, (tokens, hidden) = self._exchange, x.shape
        if self._first_layer:
            exchange.agree_on_rounds(tokens)
        if tokens > exchange.max_tokens_over_ranks:
            raise InvalidArgument(
                f"this layer got {tokens} rows, but the model's first MoE layer had at most "
                f"{exchange.max_tokens_over_ranks} on any rank: no later layer of a forward "
                "pass may have more rows"
            )
        out, sent_weights = torch.empty_like(x), weights.float().contiguous()
        if exchange.max_tokens_over_ranks == 0:
            return out
        a2a = exchange.get_operator(
            AllToAll,
            top_k=ids.shape[1],
            num_experts=self._num_experts,
            hidden=hidden,
            dtype=x.dtype,
        )
        for start in range(0, exchange.max_tokens_over_ranks, a2a.max_tokens):
            # The same number on all ranks.
            rows = min(exchange.max_tokens_over_ranks - start, a2a.max_tokens)
            chunk = slice(start, start + rows)
            received = a2a.dispatch(x[chunk], ids[chunk], sent_weights[chunk], rows=rows)
            tensors = (received.x, received.ids, received.weights)
            recv_x, local, scale = (tensor.flatten(0, 1) for tensor in tensors)
            sums = self._compute_local_sums(recv_x, local, scale.to(weights.dtype))
            a2a.combine(sums.view(-1, rows, hidden), out=out[chunk])
        return out

    def _compute_local_sums(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums of this rank's experts, `[rows, hidden]`.

        `ids` `[rows, top_k]` are local, -1 for none. Rows without any id are undefined in `x`.
        """
        if x.is_cuda or torch.compiler.is_dynamo_compiling():
            # The host does not know which ids are -1, so every row is passed. The module skips an
            # id past its last expert; the id's weight must be 0.
            unused = ids < 0
            local = ids.masked_fill(unused, self.num_local_experts).long()
            sums: torch.Tensor = self.experts_forward(x, local, weights.masked_fill(unused, 0.0))
            return sums.contiguous()
        # One row per local expert of a token, so that experts of other ranks cost nothing.
        row, column = (ids >= 0).nonzero(as_tuple=True)
        sums = x.new_zeros(x.shape, dtype=torch.float32)
        if len(row):
            local, scale = ids[row, column, None].long(), weights[row, column, None]
            sums.index_add_(0, row, self.experts_forward(x[row], local, scale).float())
        return sums.to(x.dtype)
