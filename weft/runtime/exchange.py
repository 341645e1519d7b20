# SPDX-License-Identifier: Apache-2.0
"""Base class of operators whose calls are rounds of dispatch and combine."""

from __future__ import annotations

from typing import Protocol

from weft.heap.header import CallRecord
from weft.keywords import internal
from weft.runtime.identity import exchange_call
from weft.runtime.operator import Config, Operator


class ExchangeConfig(Config, Protocol):
    """Checked arguments of an exchange."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of one rank in one call."""


class ExchangeOperator(Operator):
    """An operator that exchanges rows in rounds of dispatch and combine."""

    config: ExchangeConfig
    _layer_call: CallRecord | None = None  # the dispatch of an MoE layer, see begin_round

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of one rank in one call."""
        return self.config.max_tokens

    @internal
    def begin_round(self, layer: int, rows: int, index: int) -> None:
        """Let dispatches be round `index` of a call of an MoE layer, see `exchange_call`."""
        self._layer_call = exchange_call(self._descriptor, layer, rows, index)

    @internal
    def end_rounds(self) -> None:
        """Let dispatches be calls of the operator itself again."""
        self._layer_call = None
