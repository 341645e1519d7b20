# SPDX-License-Identifier: Apache-2.0
"""Base class of operators whose calls are rounds of dispatch and combine."""

from __future__ import annotations

from typing import Protocol

from weft.heap.header import CallRecord
from weft.keywords import internal
from weft.runtime.identity import make_dispatch_record
from weft.runtime.operator import Config, Operator


class ExchangeConfig(Config, Protocol):
    """Checked arguments of an exchange."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of one rank in one call."""


class ExchangeOperator(Operator):
    """Base class of operators that exchange rows in rounds of dispatch and combine."""

    config: ExchangeConfig
    _layer_call: CallRecord | None = None  # the dispatch of an MoE layer, see begin_round

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of one rank in one call."""
        return self.config.max_tokens

    @internal
    def begin_round(self, layer: int, rows: int, index: int) -> None:
        """Record the next dispatches as round `index` of a call of an MoE layer."""
        self._layer_call = make_dispatch_record(self._descriptor, layer, rows, index)

    @internal
    def end_rounds(self) -> None:
        """Record the next dispatches as calls of the operator itself."""
        self._layer_call = None
