"""What an operator of several hosts is beside its part on one: a rail, and what it refuses."""

from __future__ import annotations

from weft.errors import Aborted, GroupError
from weft.hosts.config import HostsConfig
from weft.hosts.rail import Rail
from weft.memory.header import ErrorRecord
from weft.runtime.operator import Operator
from weft.runtime.report import DUPLICATE_EXPERT, refusal


class AcrossHosts(Operator):
    """An operator whose rows also travel between hosts, where its group has several."""

    config: HostsConfig
    _rail: Rail | None = None

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of one rank in one call."""
        return self.config.max_tokens

    def _open_rail(self) -> None:
        """Make the rail of an operator that exists on every host. Collective over all of them."""
        span = self.config.span
        if span is None:
            return
        timeout, first_timeout = self._limits

        def make() -> Rail:
            limits = {"timeout": timeout, "first_timeout": first_timeout}
            return Rail(self.group, span, on_failure=self._fail, **limits)

        try:
            doing = f"connecting the hosts of a group for its {self._what}"
            self._rail = self.group.together(make, doing=doing)
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

    def check(self) -> None:
        super().check()
        reports = None if self._rail is None else self._rail.reports()
        if reports is not None:
            raise refusal(*reports, drops_repeats=self._drops_repeats)

    def _refuse(self, record: ErrorRecord, count: int) -> None:
        # With several hosts the sender of a row says what is wrong with its ids.
        if self._rail is None or record.code != DUPLICATE_EXPERT:
            super()._refuse(record, count)

    def _free(self) -> None:
        super()._free()
        if self._rail is not None:
            self._rail.close()
