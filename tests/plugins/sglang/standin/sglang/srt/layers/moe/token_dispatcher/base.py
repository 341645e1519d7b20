# SPDX-License-Identifier: Apache-2.0
"""What all dispatchers are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class BaseDispatcher(ABC):
    def __init__(self) -> None:
        self.quant_config: dict[str, Any] = {}

    @abstractmethod
    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any: ...

    @abstractmethod
    def combine(self, combine_input: Any) -> torch.Tensor: ...
