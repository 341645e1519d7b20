# SPDX-License-Identifier: Apache-2.0
"""Dispatchers for SGLang's FusedMoE layers. This module imports SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput

from weft.errors import OutOfOrder

if TYPE_CHECKING:
    from weft.alltoall.operator import AllToAll


class BlockDispatcher(BaseDispatcher):  # type: ignore[misc]  # SGLang is not type-checked
    """Dispatcher of a layer whose experts weft runs. SGLang must not call it.

    Attributes:
        runs_experts: Whether SGLang's block calls the experts. Otherwise weft runs the whole block.
    """

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id, self.runs_experts = layer_id, False

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        """Raise OutOfOrder: SGLang called the experts outside the block that weft runs."""
        raise OutOfOrder(
            f"the experts of layer {self.layer_id} were called directly, but weft runs their "
            "whole block: report the model, and use WEFT_SGLANG_FORM=dispatcher"
        )

    def combine(self, combine_input: Any) -> torch.Tensor:
        """Raise OutOfOrder, because no dispatch precedes."""
        raise OutOfOrder(f"combine without dispatch in layer {self.layer_id}")


class ExchangeDispatcher(BaseDispatcher):  # type: ignore[misc]
    """Exchanges tokens with `weft.AllToAll`; SGLang's runner computes the experts in between.

    Before each pair of calls, the caller sets `max_tokens` to the largest token count over all
    ranks, at most `all_to_all.max_tokens`.
    """

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.all_to_all: AllToAll | None = None
        self.max_tokens = 0

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> StandardDispatchOutput:
        """Return a view of the received rows, `[ranks * max_tokens, hidden]`.

        Expert ids are local, -1 for none; the runner skips those.
        """
        if self.all_to_all is None:
            raise OutOfOrder(
                f"layer {self.layer_id} runs before weft's hook after ModelRunner.load_model: the "
                "hook did not run"
            )
        received = self.all_to_all.dispatch(
            hidden_states.contiguous(),
            topk_output.topk_ids.contiguous(),
            topk_output.topk_weights.float().contiguous(),
            rows=self.max_tokens,
        )
        x, ids, weights = (t.flatten(0, 1) for t in (received.x, received.ids, received.weights))
        # Ids and weights are interleaved in memory, and SGLang's kernels need contiguous tensors.
        ids, weights = ids.contiguous(), weights.contiguous()
        topk = StandardTopKOutput(weights, ids, topk_output.router_logits)
        return StandardDispatchOutput(x, None, topk)

    def combine(self, combine_input: Any) -> torch.Tensor:
        """Return each token's sum over all ranks, `[tokens, hidden]`."""
        assert self.all_to_all is not None
        sums = combine_input.hidden_states
        return self.all_to_all.combine(sums.view(-1, self.max_tokens, sums.shape[1]))
