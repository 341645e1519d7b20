"""The dispatcher that moves nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher


class StandardDispatchOutput(NamedTuple):
    """For the runner."""

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: Any


class StandardCombineInput(NamedTuple):
    """From the runner."""

    hidden_states: torch.Tensor


class StandardDispatcher(BaseDispatcher):
    """Every rank has all experts' tokens."""

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> StandardDispatchOutput:
        """Nothing to do."""
        return StandardDispatchOutput(hidden_states, None, topk_output)

    def combine(self, combine_input: StandardCombineInput) -> torch.Tensor:
        """Nothing to do."""
        return combine_input.hidden_states
