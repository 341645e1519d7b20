# SPDX-License-Identifier: Apache-2.0
"""What an operator of several hosts is beside its part on one: a rail, and what it refuses."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary

from weft.errors import Aborted, GroupError
from weft.group import Group
from weft.heap.header import CallRecord, ErrorRecord
from weft.hosts.config import HostsConfig
from weft.hosts.rail import Rail
from weft.keywords import internal
from weft.runtime.identity import exchange_call
from weft.runtime.operator import Operator
from weft.runtime.report import DUPLICATE_EXPERT, input_error

# Rails that the operators of a group have opened, equal on all its ranks.
_rails_of_group: WeakKeyDictionary[Group, int] = WeakKeyDictionary()


class DispatchArguments(Protocol):
    """The arguments of a dispatch kernel, as far as its identity goes."""

    call: CallRecord


class AcrossHosts(Operator):
    """An operator whose rows also travel between hosts, where its group has several."""

    config: HostsConfig
    _rail: Rail | None = None
    _layer_call: tuple[int, int, int] | None = None  # of the MoE layer that calls, see begin_round
    _call: CallRecord | None = None  # of the latest dispatch

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of one rank in one call."""
        return self.config.max_tokens

    @internal
    def begin_round(self, layer: int, rows: int, index: int) -> None:
        """Let dispatches be round `index` of an MoE layer, see `exchange_call`."""
        self._layer_call = layer, rows, index

    @internal
    def end_rounds(self) -> None:
        """Dispatches are those of the operator's own callers again."""
        self._layer_call = None

    def _identify(self, args: DispatchArguments, rows: int) -> CallRecord:
        """Write into a dispatch's arguments which call it is."""
        layer, rows, index = self._layer_call or (self._layer, rows, 0)
        call = exchange_call(self.config.descriptor, layer, rows, index)
        if call is not self._call:
            self._call = args.call = call
        return call

    def _open_rail(self) -> None:
        """Make the rail of an operator that exists on every host. Collective over all of them."""
        span = self.config.span
        if span is None:
            return
        timeout, first_timeout = self.timeouts

        def make() -> Rail:
            limits = {"timeout": timeout, "first_timeout": first_timeout}
            return Rail(self.group, span, number, on_failure=self._fail, **limits)

        number = _rails_of_group.get(self.group, 0) + 1
        try:
            doing = f"connecting the hosts of a group for its {self.kind}"
            self._rail = self.group.together(make, doing=doing)
            _rails_of_group[self.group] = number
        except BaseException:
            self.close()
            raise

    def _own_bytes(self) -> int:
        return 0 if self.config.span is None else self.config.span.bytes

    def abort(self) -> None:
        super().abort()
        if self._rail is not None:
            self._rail.end(Aborted(f"rank {self.group.rank} called abort(); make a new group"))

    def _breakage(self, record: ErrorRecord) -> GroupError:
        error = super()._breakage(record)
        if self._rail is not None:  # ranks of other hosts need not wait for this one in vain
            self._rail.end(error)
        return error

    def _raise_refusals(self) -> None:
        super()._raise_refusals()
        if self._rail is None:
            return
        self._rail.raise_if_failed()
        reports = self._rail.reports()
        if reports is not None:
            raise input_error(*reports, drops_repeats=self._drops_repeats)

    def _refuse(self, record: ErrorRecord, count: int) -> None:
        # With several hosts the sender of a row says what is wrong with its ids.
        if self._rail is None or record.code != DUPLICATE_EXPERT:
            super()._refuse(record, count)

    def _free(self) -> None:
        super()._free()
        if self._rail is not None:
            self._rail.close()
