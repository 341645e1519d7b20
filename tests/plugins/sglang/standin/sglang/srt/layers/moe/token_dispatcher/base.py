"""What all dispatchers are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class BaseDispatcher(ABC):
    """Tokens to experts and back."""

    def __init__(self) -> None:
        self.quant_config: dict[str, Any] = {}

    @abstractmethod
    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        """To the experts."""

    @abstractmethod
    def combine(self, combine_input: Any) -> torch.Tensor:
        """Back."""
