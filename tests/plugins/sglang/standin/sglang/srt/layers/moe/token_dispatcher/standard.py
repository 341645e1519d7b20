# SPDX-License-Identifier: Apache-2.0
"""The dispatcher that moves nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher


class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: Any


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


class StandardDispatcher(BaseDispatcher):
    """Every rank has all experts' tokens."""

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> StandardDispatchOutput:
        return StandardDispatchOutput(hidden_states, None, topk_output)

    def combine(self, combine_input: StandardCombineInput) -> torch.Tensor:
        return combine_input.hidden_states
