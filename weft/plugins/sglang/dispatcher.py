# SPDX-License-Identifier: Apache-2.0
"""The dispatchers that FusedMoE layers are made with. Imports SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput

from weft.errors import OutOfOrder

if TYPE_CHECKING:
    from weft.alltoall.operator import AllToAll


class WholeBlock(BaseDispatcher):  # type: ignore[misc]  # SGLang is not type-checked
    """Of a layer whose block weft serves whole: nobody may ask it."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        """Raise: SGLang called the experts past the block that weft serves."""
        raise OutOfOrder(
            f"the experts of layer {self.layer_id} were called by themselves; weft serves their "
            "whole block, and this call would go around it: report the model, and use "
            "WEFT_SGLANG_FORM=dispatcher meanwhile"
        )

    def combine(self, combine_input: Any) -> torch.Tensor:
        """Raise, as dispatch does."""
        raise OutOfOrder(f"combine without dispatch in layer {self.layer_id}")


class Exchanged(BaseDispatcher):  # type: ignore[misc]
    """Tokens by `weft.AllToAll`; SGLang's runner multiplies between the two calls.

    `most` is set before each pair: tokens of the rank that has most, at most max_tokens.
    """

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.all_to_all: AllToAll | None = None
        self.most = 0

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> StandardDispatchOutput:
        """What all ranks sent here, `[ranks * most, hidden]` in the inbox itself.

        Ids are local, -1 for none, so the runner skips what was not sent.
        """
        if self.all_to_all is None:
            raise OutOfOrder(
                f"layer {self.layer_id} runs before its model was loaded: weft's hook on "
                "ModelRunner.load_model did not run"
            )
        received = self.all_to_all.dispatch(
            hidden_states.contiguous(),
            topk_output.topk_ids.contiguous(),
            topk_output.topk_weights.float().contiguous(),
            rows=self.most,
        )
        x, ids, weights = (t.flatten(0, 1) for t in (received.x, received.ids, received.weights))
        # Ids and weights are adjacent in a route, and SGLang's kernels ask for no strides.
        ids, weights = ids.contiguous(), weights.contiguous()
        chosen = StandardTopKOutput(weights, ids, topk_output.router_logits)
        return StandardDispatchOutput(x, None, chosen)

    def combine(self, combine_input: Any) -> torch.Tensor:
        """`[tokens, hidden]`: each token's sum over ranks."""
        assert self.all_to_all is not None
        sums = combine_input.hidden_states
        return self.all_to_all.combine(sums.view(-1, self.most, sums.shape[1]))
